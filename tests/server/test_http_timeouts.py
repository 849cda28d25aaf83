"""Time limits and slow or vanished peers: each ends in the answer that the documents promise."""

import asyncio
import json
import socket
import time
from typing import Any

import aiohttp
import pytest

from engine.api.messages import Deltas, Generate
from server import http_server, receive, stream
from tests.server.conftest import Site, eventually, running_site
from tests.server.fake_backend import Script

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "x"}


async def raw_connection(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = site.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def post_bytes(body: dict[str, Any], *headers: bytes) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        b"POST /v1/completions HTTP/1.1", b"Host: a", b"Content-Type: application/json",
        b"Content-Length: %d" % len(data), *headers,
    ]  # fmt: skip
    return b"\r\n".join([*lines, b"", data])


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], Any]:
    """Status, headers (names in lower case) and JSON of an answer after which the server closes."""
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    headers = {name.lower(): value for name, value in (line.split(b": ", 1) for line in lines)}
    return int(first.split(b" ")[1]), headers, json.loads(body)


# --- deadlines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_queue_timeout(streamed: bool) -> None:
    async with running_site(queue_timeout=0.15) as site:
        site.backend.script = lambda g: Script(hold="queued")
        body = {**BODY, "n": 2, "stream": streamed}
        status, headers, answer = await asyncio.wait_for(site.post_full(TEXT, body), 5)
        assert (status, answer["error"]["code"]) == (503, "queue_timeout")
        assert answer["error"]["type"] == "server_error"
        assert headers["Retry-After"] == "1"
        await eventually(lambda: len(site.backend.aborted) == 2)
        assert site.service.client.num_queued == 0
        assert await site.metric('srv:aborted_requests_total{phase="queued"') == 2


@pytest.mark.parametrize("hold", ["prefill", "decode"])
async def test_queue_timeout_is_for_what_has_not_started(hold: str) -> None:
    async with running_site(queue_timeout=0.7) as site:
        site.backend.script = lambda g: Script(["a"], hold=hold)
        task = asyncio.create_task(site.post(TEXT, BODY))
        await asyncio.sleep(1.0)
        assert site.service.client.num_live == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_list_of_prompts_may_wait_once_one_has_started() -> None:
    async with running_site(queue_timeout=0.5) as site:

        def script(generate: Generate) -> Script:
            is_first = len(site.backend.generates) == 1
            return Script(["a", "b"], delay_s=0.4) if is_first else Script(hold="queued")

        site.backend.script = script
        task = asyncio.create_task(site.post(TEXT, {"prompt": ["x", "y"]}))
        await eventually(lambda: len(site.backend.finished) == 1)
        assert site.service.client.num_live == 1
        second = site.backend.generates[1].req_id
        site.backend.script = lambda g: Script()
        started = Deltas(req_ids=[], texts=[], counts=[], finished=[], started=[(second, 0, 0)])
        site.backend.send("replies", started)
        await eventually(lambda: site.service.client.num_queued == 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("by_request", [False, True])
async def test_request_timeout_while_running(path: str, by_request: bool) -> None:
    settings = {} if by_request else {"request_timeout": 0.5}
    async with running_site(**settings) as site:
        site.backend.script = lambda g: Script(["a"], hold="decode")
        body = BODY if path == TEXT else {"messages": [{"role": "user", "content": "x"}]}
        fields = {"timeout": 0.5} if by_request else {}
        status, headers, answer = await site.post_full(path, {**body, **fields})
        assert (status, answer["error"]["code"]) == (408, "request_timeout")
        assert headers["x-should-retry"] == "false"
        advice = (
            "ask for fewer tokens, or for a longer time" if by_request else "ask for fewer tokens"
        )
        assert answer["error"]["message"].endswith(f"; {advice}.")
        ids = {generate.req_id for generate in site.backend.generates}
        await eventually(lambda: site.backend.aborted == ids)
        assert await site.metric("vllm:e2e_request_latency_seconds_count") == 0
        assert await site.metric("vllm:time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("by_request", [False, True])
async def test_a_limit_that_passes_before_the_start(by_request: bool) -> None:
    """The client's own: its time is over. The server's: it was full, and another may not be."""
    async with running_site(request_timeout=10 if by_request else 0.2) as site:
        site.backend.script = lambda g: Script(hold="queued")
        fields = {"timeout": 1e-6} if by_request else {}
        status, headers, answer = await site.post_full(TEXT, {**BODY, **fields})
        error = answer["error"]
        if by_request:
            assert (status, error["code"]) == (408, "request_timeout")
            assert "not even started within 1e-06 s (its timeout)" in error["message"]
            assert headers["x-should-retry"] == "false"
        else:
            assert (status, error["code"]) == (503, "queue_timeout")
            assert headers["Retry-After"] == "1"
        await eventually(lambda: site.service.client.num_queued == 0)


async def test_its_own_limit_counts_where_the_servers_passes_at_the_same_moment() -> None:
    async with running_site(queue_timeout=0.15) as site:
        site.backend.script = lambda g: Script(hold="queued")
        status, answer = await site.post(TEXT, {**BODY, "timeout": 0.15})
        assert (status, answer["error"]["code"]) == (408, "request_timeout")


async def test_request_timeout_in_a_stream_is_an_event() -> None:
    async with running_site(request_timeout=0.2) as site:
        site.backend.script = lambda g: Script(["a"], hold="decode")
        async with site.session.post(site.url + TEXT, json={**BODY, "stream": True}) as response:
            assert response.status == 200
            text = await response.text()
        assert '"code":"request_timeout"' in text
        assert "[DONE]" not in text


async def test_a_request_in_time_is_not_disturbed() -> None:
    async with running_site(request_timeout=30, queue_timeout=30) as site:
        assert (await site.post(TEXT, {**BODY, "timeout": 5}))[0] == 200
        assert (await site.post(TEXT, {**BODY, "timeout": None}))[0] == 200
        assert site.service.live == {}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0, "invalid_value"),
        (-1, "invalid_value"),
        (31, "invalid_value"),
        ("5", "invalid_type"),
        (True, "invalid_type"),
    ],
)
async def test_bad_timeouts(value: Any, code: str) -> None:
    async with running_site(request_timeout=30) as site:
        status, answer = await site.post(TEXT, {**BODY, "timeout": value})
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, code, "timeout")
        assert site.backend.generates == []


# --- slow senders -------------------------------------------------------------------------------------


async def test_a_body_that_does_not_arrive(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(http_server, "LINGER_S", 0.1)
    reader, writer = await raw_connection(site)
    writer.write(post_bytes(BODY, b"Connection: close")[:-3])
    status, headers, answer = await read_answer(reader)
    assert (status, answer["error"]["code"]) == (408, "request_timeout")
    assert headers[b"x-should-retry"] == b"false"
    writer.close()


@pytest.mark.parametrize(
    ("start", "more"), [(b"G", b""), (b"GET /live HTTP/1.1\r\nHost: a\r\nX-Slow: ", b"x")]
)
async def test_headers_that_do_not_arrive(
    site: Site, monkeypatch: pytest.MonkeyPatch, start: bytes, more: bytes
) -> None:
    """A byte now and then does not help: the time counts from the first one."""
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    reader, writer = await raw_connection(site)
    await asyncio.sleep(0.05)
    writer.write(start)

    async def drip() -> None:
        while not writer.is_closing():
            await asyncio.sleep(0.05)
            writer.write(more)

    task = asyncio.create_task(drip())
    status, headers, answer = await read_answer(reader)
    task.cancel()
    assert (status, answer["error"]["code"]) == (408, "request_timeout")
    assert headers[b"x-request-id"]
    assert headers[b"connection"] == b"close"
    writer.close()


async def test_the_header_clock_does_not_run_between_requests(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.5)
    site.backend.script = lambda g: Script(["a"], delay_s=0.6)
    reader, writer = await raw_connection(site)
    for pause in (0.6, 0.0):  # idle for longer than the limit, then again at once
        await asyncio.sleep(pause)
        request = post_bytes(BODY)
        writer.write(request[:40])
        await asyncio.sleep(0.02)
        writer.write(request[40:] + b"\r\n")  # some clients send one line break too many
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
    await asyncio.sleep(0.6)
    assert not reader.at_eof()
    writer.close()


async def test_idle_connections_close_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_server.KEEP_ALIVE_S > 60, "proxies must be the ones that close"
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.1)
    async with running_site() as site:
        reader, writer = await raw_connection(site)
        writer.write(b"GET /live HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 200")
        writer.close()


# --- slow readers and vanished ones -------------------------------------------------------------------


async def test_a_stream_holds_a_mebibyte_for_a_slow_reader(site: Site) -> None:
    """Beyond that it is cut off at once, long before --write-timeout (60 s)."""
    assert stream.MAX_PENDING_CHARS == 2**20
    site.backend.script = lambda g: Script(["x" * 20_000] * 1500, hold="decode")
    began = time.monotonic()
    async with site.session.post(site.url + TEXT, json={**BODY, "stream": True}) as stuck:
        await eventually(lambda: len(site.backend.aborted) == 1)
        assert time.monotonic() - began < site.service.config.write_timeout
        with pytest.raises(aiohttp.ClientError):
            await stuck.read()
    assert site.service.client.num_live == 0
    assert (await site.post("/tokenize", BODY))[0] == 200


async def test_pending_text_counts_what_is_not_taken(site: Site) -> None:
    site.backend.script = lambda g: Script(["abc", "de"], hold="decode")
    task = asyncio.create_task(site.post(TEXT, BODY))
    await eventually(lambda: len(site.service.live) == 1)
    (live,) = site.service.live
    await eventually(lambda: live.num_pending_chars == 5)
    piece = live.choices[0].take()
    assert piece is not None
    assert (piece.text, live.num_pending_chars) == ("abcde", 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_half_closed_connections_count_as_gone(site: Site) -> None:
    """TCP cannot tell `shutdown(SHUT_WR)` from a client that has left, so the request ends."""
    site.backend.script = lambda g: Script(hold="decode")
    _, writer = await raw_connection(site)
    writer.write(post_bytes(BODY))
    await eventually(lambda: len(site.backend.generates) == 1)
    writer.write_eof()
    ids = {site.backend.generates[0].req_id}
    await eventually(lambda: site.backend.aborted == ids)
    writer.close()


@pytest.mark.parametrize("hold", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("fields", [{"n": 4}, {"prompt": list("abcde")}])
async def test_killed_clients_leave_nothing_running(
    site: Site, hold: str, streamed: bool, is_reset: bool, fields: dict[str, Any]
) -> None:
    """With FIN or RST, in every phase, streamed or not, for all choices and prompts."""
    site.backend.script = lambda g: Script(["a"], hold=hold)
    num_prompts = len(fields.get("prompt", "x"))
    count = num_prompts * fields.get("n", 1)
    _, writer = await raw_connection(site)
    writer.write(post_bytes({**BODY, "ignore_eos": True, **fields, "stream": streamed}))
    await eventually(lambda: len(site.backend.generates) == num_prompts)
    client = site.service.client
    await eventually(lambda: {c.phase for c in client._choices.values()} == {hold})
    if is_reset:
        linger = b"\1\0\0\0\0\0\0\0"  # on, 0 s: close() sends RST
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()
    await eventually(lambda: len(site.backend.aborted) == count)
    assert (client.num_live, client.num_queued, site.service.live) == (0, 0, {})
    assert await site.metric("vllm:num_requests_waiting") == 0
    assert (
        await site.metric('vllm:request_success_total{engine="0",finished_reason="abort"') == count
    )
    assert await site.metric("vllm:e2e_request_latency_seconds_count") == 0
