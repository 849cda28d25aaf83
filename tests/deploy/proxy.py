"""A real nginx in front of replicas, with the shipped files: only addresses and paths are replaced.

Everything lives in one temporary directory, on free ports, as an ordinary user.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.server import certificates
from tests.server.conftest import ROOT, free_port

DEPLOY = ROOT / "deploy"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
needs_nginx = pytest.mark.skipif(
    NGINX is None, reason="nginx is not installed; the Debian package `nginx` has it"
)
# `user`: workers of an nginx that root starts would be somebody else, who may not write here.
MAIN = """\
{user}
daemon off;
master_process on;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log info;
events {{ worker_connections 256; }}
http {{
    access_log {folder}/access.log;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/sluice.conf;
}}
"""
START_S = 15.0


@dataclass
class Replica:
    """tests/deploy/replica.py in a process of its own, on a port that it keeps over restarts."""

    name: str
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def launch(self) -> None:
        command = [sys.executable, "-m", "tests.deploy.replica", "--port", str(self.port)]
        command += ["--served-model-name", "tiny", self.name, *self.flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, seconds: float = 20.0) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=1) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.HTTPError):
            return False

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.is_ready():
            assert time.monotonic() < deadline, f"replica {self.name} did not become ready"
            time.sleep(0.02)


@contextmanager
def replicas(*names: str, flags: Sequence[str] = ()) -> Iterator[list[Replica]]:
    """Ready replicas, which also serve their own name as a model, so that tests can tell them apart."""
    running = [Replica(name, flags) for name in names]
    try:
        for replica in running:
            replica.launch()
        for replica in running:
            replica.wait_ready()
        yield running
    finally:
        for replica in running:
            if replica.process is not None and replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()


@dataclass
class Proxy:
    url: str
    plain_url: str  # of the port without TLS
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "error.log").read_text()


@contextmanager
def nginx(folder: Path, upstreams: Sequence[Replica]) -> Iterator[Proxy]:
    """nginx with deploy/nginx.conf for one replica, and deploy/nginx-replicas.conf for several."""
    assert NGINX is not None
    tls_port, plain_port = free_port(), free_port()
    certificate, key = certificates.write_first(folder)
    name = "nginx.conf" if len(upstreams) == 1 else "nginx-replicas.conf"
    text = (DEPLOY / name).read_text()
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{tls_port} ssl;"),
        ("listen 80;", f"listen 127.0.0.1:{plain_port};"),
        ("/etc/nginx/sluice.crt", certificate),
        ("/etc/nginx/sluice.key", key),
    ):
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    if len(upstreams) == 1:
        text = text.replace("127.0.0.1:8000", f"127.0.0.1:{upstreams[0].port}")
    else:
        servers = (DEPLOY / "nginx-replicas.list").read_text()
        lines = re.findall(r"^server \S+( .*)$", servers, re.MULTILINE)[: len(upstreams)]
        lines = [
            f"server 127.0.0.1:{r.port}{rest}" for r, rest in zip(upstreams, lines, strict=True)
        ]
        (folder / "sluice-replicas.list").write_text("\n".join(lines))
    (folder / "sluice.conf").write_text(text)
    user = "user root;" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(MAIN.format(folder=folder, user=user))
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with (folder / "stderr.log").open("wb") as errors:
        process = subprocess.Popen([*command, "-e", str(folder / "error.log")], stderr=errors)
    proxy = Proxy(f"https://127.0.0.1:{tls_port}", f"http://127.0.0.1:{plain_port}", folder)
    try:
        wait_listening(process, proxy)
        yield proxy
    finally:
        process.send_signal(signal.SIGQUIT if process.poll() is None else signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(5)


def wait_listening(process: "subprocess.Popen[bytes]", proxy: Proxy) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.build_opener(NoRedirect).open(proxy.plain_url, timeout=1)
        except urllib.error.HTTPError:
            return  # the redirect to HTTPS
        except OSError:
            time.sleep(0.02)
    raise AssertionError("nginx did not start:\n" + (proxy.folder / "stderr.log").read_text())


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: object) -> None:
        return None


def session() -> aiohttp.ClientSession:
    """A client that trusts the self-signed certificate and never waits for a free connection."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=False, limit=0))
