"""The real server process with a scripted backend in place of its children: it starts in a blink, and
SIGTERM, drain, health and connections are the real ones.

    python -m tests.deploy.replica --port 8001 --served-model-name a [any flag of the server]

A completion has `max_tokens` pieces, "0 1 2 ...", DELAY_S apart.
"""

import asyncio
import logging
import sys

from engine.api.messages import Generate, Phase
from server.cli import parse
from server.http_server import bind, close_all
from server.launcher import Launcher
from server.run_dir import private_run_dir
from tests.server.fake_backend import FakeBackend, Script

DELAY_S = 0.02
HEARTBEAT_S = 0.5


def script(generate: Generate) -> Script:
    pieces = [f"{i} " for i in range(generate.params.max_tokens or 1)]
    return Script(pieces=pieces, delay_s=DELAY_S)


class Replica(Launcher):
    async def start_and_watch(self) -> int:
        backend = FakeBackend(self.run_dir)
        backend.script = script
        backend.start()
        backend.ready()
        try:
            turn = 1
            while True:
                await asyncio.sleep(HEARTBEAT_S)
                turn += 1
                backend.state(Phase.SERVING, 1.0, loop_count=turn)
        finally:
            backend.stop()


def main() -> int:
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s")
    server, engine = parse(sys.argv[1:])
    listeners = bind(server.host, server.port)
    try:
        with private_run_dir() as run_dir:
            return asyncio.run(Replica(server, engine, listeners, run_dir).run())
    finally:
        close_all(listeners)


if __name__ == "__main__":
    sys.exit(main())
