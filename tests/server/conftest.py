"""The HTTP application on a free port in this process, before a scripted backend; and the real
server as a subprocess."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.api.messages import Sockets
from scripts.operate.server_process import free_port
from server.app import build_app
from server.client import EngineClient
from server.config import ServerConfig
from server.health import EngineStatus
from server.http_server import HttpServer, bind
from server.link import SocketLink
from server.metrics import Exporter, Metrics
from server.service import Service
from server.tls import TlsContext, tls_context
from tests.server.fake_backend import FakeBackend
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0  # the first start on a GPU compiles kernels; a server that ends is noticed at once


@dataclass
class Site:
    """One running application and its backend."""

    url: str
    service: Service
    backend: FakeBackend
    session: aiohttp.ClientSession
    tls: TlsContext | None = None

    async def post(self, path: str, body: Any = None, **more: Any) -> tuple[int, dict[str, Any]]:
        status, _, answer = await self.post_full(path, body, **more)
        return status, answer

    async def post_full(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any, Any]:
        """Status, headers and decoded body. `data=` in `more` sends raw bytes."""
        if "data" not in more:
            more["json"] = body
        async with self.session.post(self.url + path, **more) as response:
            return response.status, response.headers, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def metric(self, line_start: str) -> float:
        """Value of the first metric line that begins with `line_start`."""
        async with self.session.get(self.url + "/metrics") as response:
            for line in (await response.text()).splitlines():
                if line.startswith(line_start):
                    return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {line_start}")


@asynccontextmanager
async def running_site(ready: bool = True, **settings: Any) -> AsyncIterator[Site]:
    """An application with the given `ServerConfig` fields; `ready=False`: still loading."""
    config = ServerConfig(**{"host": "127.0.0.1", "port": 0, **settings})
    names = config.served_model_name or ["tiny"]
    with tempfile.TemporaryDirectory(prefix="sluice-test-") as run_dir:
        metrics, status = Metrics(), EngineStatus(stall_timeout_s=config.stall_timeout)
        client = EngineClient(SocketLink(Sockets.in_directory(run_dir)), status, metrics)
        exporter = Exporter(metrics, status, names[0], config.max_queued_requests)
        service = Service(config, client, exporter, names)
        listeners = bind(config.host, config.port)
        tls = tls_context(config)
        server = HttpServer(build_app(service), listeners, tls.context if tls else None)
        client.start()
        await server.start()
        backend = FakeBackend(run_dir)
        backend.start()
        if ready:
            backend.ready()
            await eventually(lambda: status.is_loaded)
        scheme = "https" if tls else "http"
        url = f"{scheme}://127.0.0.1:{listeners[0].getsockname()[1]}"
        try:
            async with aiohttp.ClientSession() as session:
                yield Site(url, service, backend, session, tls)
        finally:
            await server.stop(0.1)
            backend.stop()
            client.close()


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with running_site() as running:
        yield running


async def read_events(response: aiohttp.ClientResponse) -> list[str]:
    """The `data:` payloads and comment lines of an event stream, after checking its framing."""
    return events_in(await response.read())


def events_in(stream: bytes) -> list[str]:
    raw = stream.decode()
    assert raw.endswith("\n\n")
    events = raw.removesuffix("\n\n").split("\n\n")
    for event in events:
        assert "\n" not in event, "one line an event"
        assert event.startswith(("data: ", ": ")), event
    return [event.removeprefix("data: ") for event in events]


async def read_paced_events(
    site: Site, response: aiohttp.ClientResponse, num_comments: int = 0
) -> list[str]:
    """As `read_events`, of a `paced` script: each piece is sent when the one before has been read,
    and so many comments after it."""
    raw, num_read = b"", 0
    while event := await response.content.readuntil(b"\n\n"):
        raw += event
        num_read = num_read + 1 if event.startswith(b":") else 0
        if num_read == num_comments:
            site.backend.go_on()
    return events_in(raw)


@dataclass
class LiveServer:
    """scripts/serve.py in a process of its own."""

    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def get(self, path: str) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def stop(self, timeout: float = 20.0) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextmanager
def live_server(model_dir: str | Path, *flags: str) -> Iterator[LiveServer]:
    """Start the three real processes on `model_dir`, wait for /ready, and end them at the exit.

    `flags` must have --num-blocks: by itself a server takes most of a GPU, and here several share one.
    """
    assert "--num-blocks" in flags
    with spawned(str(model_dir), *flags) as server:
        wait_for(server, "/ready", START_S)
        yield server


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still meanwhile: however fast an engine is, its requests do not end."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def spawned(*flags: str, env: dict[str, str] | None = None) -> Iterator[LiveServer]:
    """scripts/serve.py with `flags` on a free port, without waiting for anything."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sluice-test-") as folder:
        log = Path(folder) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "scripts/serve.py"), *flags, "--port", str(port)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        try:
            yield LiveServer(f"http://127.0.0.1:{port}", process, log)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def wait_for(server: LiveServer, path: str, seconds: float, status: int = 200) -> None:
    """Poll `path` until it answers `status`. Fails with the server's log."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if server.get(path)[0] == status:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(
        f"{path} did not answer {status}; exit code {server.process.poll()}\n{server.log.read_text()}"
    )
