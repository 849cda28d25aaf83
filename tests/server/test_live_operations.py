"""Keys, TLS, the prefix cache and profiles with the three real processes."""

import json
import os
import re
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import children_of
from tests.server import certificates
from tests.server.conftest import START_S, LiveServer, spawned
from tests.waiting import wait_until

USER, ADMIN = "user-key", "admin-key"
FLAGS = (
    "--dtype", "float32", "--cpu-threads", "1", "--max-model-len", "256", "--num-blocks", "64",
    "--block-size", "16", "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--served-model-name", "tiny", "--host", "localhost",
)  # fmt: skip


def make_opener() -> urllib.request.OpenerDirector:
    """Whatever certificate is served, and no proxy that the environment may name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )


OPENER = make_opener()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operations")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    model = make_tiny("llama", folder / "model")
    cert, key = certificates.write_first(folder)
    flags = (
        *FLAGS, "--ssl-certfile", cert, "--ssl-keyfile", key, "--admin-key", ADMIN,
        "--profile-dir", str(folder / "traces"), "--log-requests", "on",
    )  # fmt: skip
    with spawned(model, *flags, env={"SLUICE_API_KEY": USER}) as running:
        running.url = running.url.replace("http://127.0.0.1", "https://localhost")
        wait_until(lambda: is_ready(running), START_S, running.log.read_text)
        yield running


def is_ready(server: LiveServer) -> bool:
    assert server.process.poll() is None, server.log.read_text()
    try:
        return call(server, "/ready", key="")[0] == 200
    except OSError:
        return False


def call(server: LiveServer, path: str, body: Any = None, key: str = USER) -> tuple[int, Any]:
    request = urllib.request.Request(
        server.url + path,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", **({"x-api-key": key} if key else {})},
    )
    try:
        with OPENER.open(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def cached_tokens(server: LiveServer) -> int:
    body = {"prompt": list(range(3, 43)), "max_tokens": 2, "temperature": 0}
    status, answer = call(server, "/v1/completions", body)
    assert status == 200, answer
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_keys_of_a_real_server(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert call(server, "/v1/completions", body, key="")[0] == 401
    assert call(server, "/v1/completions", body)[0] == 200
    assert call(server, "/server_info")[0] == 403
    status, info = call(server, "/server_info", key=ADMIN)
    assert (status, info["server"]["api_key"]) == (200, "set")
    for pid in (server.process.pid, *children_of(server.process.pid)):
        visible = Path(f"/proc/{pid}/environ").read_bytes() if pid != server.process.pid else b""
        assert USER.encode() not in visible, "the other processes need no keys"
    log = server.log.read_text()
    (settings,) = re.findall("server settings: (.*)", log)
    assert "api_key='set' admin_key='set'" in settings
    assert re.search(r"; \d+ as by default$", settings)
    assert "drain_timeout" not in settings, "what is as by default is only counted"
    assert [key for key in (USER, ADMIN) if key in log] == []
    assert "no key is set" not in log


def test_the_prefix_cache_is_forgotten(server: LiveServer) -> None:
    assert cached_tokens(server) == 0
    assert cached_tokens(server) == 32
    status, answer = call(server, "/admin/reset_prefix_cache", {}, key=ADMIN)
    assert (status, answer["status"]) == (200, "ok")
    assert "blocks forgotten" in answer["detail"]
    assert cached_tokens(server) == 0


def test_a_profile_of_real_steps(server: LiveServer, folder: Path) -> None:
    assert call(server, "/stop_profile", {}, key=ADMIN)[0] == 400
    assert call(server, "/start_profile", {}, key=ADMIN)[0] == 200
    cached_tokens(server)
    status, answer = call(server, "/stop_profile", {}, key=ADMIN)
    assert status == 200
    (file,) = (folder / "traces").iterdir()
    assert file.name in answer["detail"]
    assert call(server, "/health?deep=1", key="") == (200, {"status": "ok"})


def test_sighup_changes_the_certificate_and_ends_nothing(server: LiveServer, folder: Path) -> None:
    port = int(server.url.rpartition(":")[2])

    def served() -> str:
        return ssl.get_server_certificate(("localhost", port))

    assert served() == certificates.FIRST_CERTIFICATE
    certificates.write_second(folder)
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(lambda: served() == certificates.SECOND_CERTIFICATE, 10, server.log.read_text)
    (folder / "tls.key").write_text("broken")
    os.kill(server.process.pid, signal.SIGHUP)
    wait_until(
        lambda: "keeping the old certificate" in server.log.read_text(), 10, server.log.read_text
    )
    assert served() == certificates.SECOND_CERTIFICATE
    assert call(server, "/ready", key="")[0] == 200
    assert server.stop() == 0, "SIGTERM still ends it"
