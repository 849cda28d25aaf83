"""scripts/serve.py as a process of a tool: on a free port, and gone when the tool is.

It gets a process group of its own, so that Ctrl-C reaches the tool alone, which then ends the server by its
id. Should the tool be killed, the kernel ends the server (engine/api/process.py), and that its children.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from engine.api.process import die_with_parent
from server.config import ADMIN_KEY_VARIABLE, REPOSITORY, child_environment

POLL_S = 0.1
END_PATIENCE_S = 15.0  # after SIGTERM
SHOWN_LINES = 5  # of the log of a server that failed
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(Exception):
    """It ended, or was not ready in time; the text ends with the last lines of its log."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # of the server, if it ended


class ServerProcess:
    """Use as a context manager; then `wait_ready`.

    `flags` are those of serve.py. `key` opens every path of it.
    """

    def __init__(self, flags: list[str], log: Path) -> None:
        self.flags = flags
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = secrets.token_hex(16)
        self.process: subprocess.Popen[bytes] | None = None
        self.ready_s = 0.0  # how long the start took

    def __enter__(self) -> "ServerProcess":
        command = [sys.executable, str(REPOSITORY / "scripts" / "serve.py"), *self.flags]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**child_environment(), ADMIN_KEY_VARIABLE: self.key},
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ServerFailed."""
        assert self.process is not None
        started = time.monotonic()
        while True:
            code = self.process.poll()
            self.ready_s = time.monotonic() - started
            if code is not None:
                raise ServerFailed(f"the server ended with exit code {code}:\n{self.tail()}", code)
            if self.ready_s > timeout_s:
                raise ServerFailed(f"the server was not ready in {timeout_s:.0f} s:\n{self.tail()}")
            if is_ready(self.url):
                return
            time.sleep(POLL_S)

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-SHOWN_LINES:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_ready(url: str) -> bool:
    try:
        with DIRECT.open(url + "/ready", timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end the tool as Ctrl-C does: through its `with` blocks."""

    def interrupt(number: int, frame: FrameType | None) -> Any:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
