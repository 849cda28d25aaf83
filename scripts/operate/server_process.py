"""scripts/serve.py as a process of a tool: on a free port, and gone when the tool is.

It gets a process group of its own, so that Ctrl-C reaches the tool alone, which then ends the server by its
id. Should the tool be killed, the kernel ends the server (engine/api/process.py), and that its children.
"""

import contextlib
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from engine.api.config import ConfigError
from engine.api.process import die_with_parent
from server.cli import parse
from server.config import ADMIN_KEY_VARIABLE, REPOSITORY, child_environment

POLL_S = 0.1
END_PATIENCE_S = 15.0  # after SIGTERM
SHOWN_LINES = 5  # of the log of a server that failed
ANY_CERTIFICATE = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # theirs names another host than loopback
ANY_CERTIFICATE.check_hostname = False
ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE
DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ANY_CERTIFICATE)
)


class ServerFailed(Exception):
    """It ended, or was not ready in time; the text ends with the last lines of its log."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # of the server, if it ended


class ServerProcess:
    """Use as a context manager; then `wait_ready`.

    `flags` are those of serve.py; with a certificate among them `url` is https. `key` opens every path.
    """

    def __init__(self, flags: list[str], log: Path) -> None:
        """Raises ServerFailed for a server that would not let us in."""
        self.flags = flags
        self.log = log
        self.port = free_port()
        self.url = f"{scheme_of(flags)}://127.0.0.1:{self.port}"
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


def scheme_of(flags: list[str]) -> str:
    """Of a server with these flags, its --config included. Raises ServerFailed."""
    try:
        server, _ = parse(flags)
    except ConfigError:
        return "http"  # the server will say what is wrong, better than a wait for it
    if server.ssl_certfile and server.ssl_cert_reqs == ssl.CERT_REQUIRED:
        raise ServerFailed(
            f"--ssl-cert-reqs {server.ssl_cert_reqs}: this program has no certificate to show; give "
            "--ssl-cert-reqs 1 as well, which lets clients in without one",
            2,
        )
    return "https" if server.ssl_certfile else "http"


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
