"""One server behind nginx with deploy/nginx.conf."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.proxy import Proxy, Replica, needs_nginx, nginx, replicas, session
from tests.server import certificates

pytestmark = needs_nginx
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    with replicas("a") as (only,):
        yield only


@pytest.fixture(scope="module")
def proxy(replica: Replica, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with nginx(tmp_path_factory.mktemp("nginx"), [replica]) as running:
        yield running


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with session() as running:
        yield running


def body_of(num_tokens: int, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": "x", "max_tokens": num_tokens, **fields}


async def until_live(client: aiohttp.ClientSession, url: str, wanted: int) -> None:
    """Wait until the replica at `url` has `wanted` requests."""
    async with asyncio.timeout(20):
        while True:
            async with client.get(url + "/load") as response:
                answer = await response.json()
            if answer["running"] + answer["waiting"] == wanted:
                return
            await asyncio.sleep(0.01)


async def test_streams_arrive_token_by_token(proxy: Proxy, client: aiohttp.ClientSession) -> None:
    """With proxy_buffering at its default: each event comes while later ones are not yet made."""
    arrivals = []
    async with client.post(proxy.url + TEXT, json=body_of(25, stream=True)) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                arrivals.append(time.monotonic())
    assert len(arrivals) >= 25
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    separate = sum(gap > 0.002 for gap in gaps)
    assert separate > len(gaps) / 2, "events came in lumps"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(
    proxy: Proxy, replica: Replica, client: aiohttp.ClientSession, stream: bool
) -> None:
    """Over a socket of our own: asyncio's TLS first waits for the other side to say goodbye."""
    context = ssl.create_default_context(cadata=certificates.FIRST_CERTIFICATE)
    address = ("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    text = json.dumps(body_of(400, stream=stream))
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    connection = socket.create_connection(address)
    with context.wrap_socket(connection, server_hostname="localhost") as wrapped:
        wrapped.sendall((head + text).encode())
        await until_live(client, replica.url, 1)
    await until_live(client, replica.url, 0)
    async with client.get(replica.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    (line,) = (line for line in lines if 'finished_reason="abort"' in line)
    assert float(line.split()[-1]) >= 1


async def test_errors_pass_unchanged(proxy: Proxy, client: aiohttp.ClientSession) -> None:
    for body, status, code in (
        (body_of(0), 400, "invalid_value"),
        ({**body_of(1), "model": "none"}, 404, "model_not_found"),
    ):
        async with client.post(proxy.url + TEXT, json=body) as response:
            answer = await response.json()
        assert (response.status, answer["error"]["code"]) == (status, code)


async def test_request_ids_pass_or_are_made(proxy: Proxy, client: aiohttp.ClientSession) -> None:
    async with client.get(proxy.url + "/version", headers={"X-Request-Id": "mine"}) as response:
        assert response.headers.getall("X-Request-Id") == ["mine"]
    async with client.get(proxy.url + "/version") as response:
        (made,) = response.headers.getall("X-Request-Id")
    assert len(made) == 32


async def test_large_bodies_are_refused_in_our_form(
    proxy: Proxy, client: aiohttp.ClientSession
) -> None:
    headers = {"Content-Type": "application/json", "Expect": "100-continue"}
    data = b" " * (32 * 1024 * 1024 + 1)
    async with client.post(proxy.url + TEXT, data=data, headers=headers) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"
    text = json.dumps(body_of(1, prompt="x" * 2_000_000))
    headers.pop("Expect")
    async with client.post(proxy.url + TEXT, data=text, headers=headers) as response:
        assert response.status == 200, "2 MB are above nginx's own limit, and fine"


async def test_tls_and_the_way_there(proxy: Proxy, client: aiohttp.ClientSession) -> None:
    url = proxy.plain_url + "/v1/models?x=1"
    async with client.get(url, allow_redirects=False) as response:
        assert response.status == 308
        assert response.headers["Location"] == "https://127.0.0.1/v1/models?x=1"
    async with client.get(proxy.url + "/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny", "a"]


@pytest.mark.parametrize("path", ["/metrics", "/admin/drain", "//debug/kv", "/server_info/"])
async def test_paths_of_operators_are_not_public(
    proxy: Proxy, client: aiohttp.ClientSession, path: str
) -> None:
    async with client.get(proxy.url + path) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_url"


async def test_a_server_that_is_away(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    """Never started: nginx answers in our form, with the request's id."""
    with nginx(tmp_path, [Replica("a")]) as proxy:
        headers = {"X-Request-Id": "mine"}
        async with client.post(proxy.url + TEXT, json=body_of(1), headers=headers) as response:
            answer = await response.json()
    assert (response.status, answer["error"]["code"]) == (502, "unreachable")
    assert answer["error"]["message"].endswith("Request id: mine")
