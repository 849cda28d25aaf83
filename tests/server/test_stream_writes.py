"""How events reach the socket: written in the turn in which they come, without the handler's task."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from server.routes import generate
from server.routes.completions import CompletionFormat
from server.stream import Choice, Piece
from tests.server.conftest import Site, eventually, read_events, running_site
from tests.server.fake_backend import Script

TEXT = "/v1/completions"


@asynccontextmanager
async def raw_stream(site: Site, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """The bytes of an answer, as they come."""
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "x", "stream": True, **fields}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        writer.close()


@pytest.fixture
def task_writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What handlers' tasks write, as opposed to `RequestStream.write_now`."""
    written: list[bytes] = []
    send = generate.send

    async def noted(request: web.Request, response: Any, data: bytes, *more: Any) -> None:
        written.append(data)
        await send(request, response, data, *more)

    monkeypatch.setattr(generate, "send", noted)
    return written


async def test_only_beginning_and_end_need_the_task(site: Site, task_writes: list[bytes]) -> None:
    site.backend.script = lambda g: Script(["a", "b", "c", "d"], delay_s=0.05)
    response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
    events = await read_events(response)
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b", "c", "d"]
    written = b"".join(task_writes)
    assert b'"text":"b"' not in written
    assert b'"text":"c"' not in written
    assert written.endswith(b"data: [DONE]\n\n")


async def test_choices_of_a_step_share_a_chunk(site: Site) -> None:
    """One event each, in one chunk of the body, and none gets lost or mixed up."""
    site.backend.script = lambda g: Script(["a", "b", "c"], delay_s=0.05)
    async with raw_stream(site, n=3) as reader:
        data = await reader.readuntil(b"0\r\n\r\n")
    chunks = data.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2]
    middle = [chunk for chunk in chunks if b'"text":"b"' in chunk]
    assert len(middle) == 1
    events = [json.loads(e.removeprefix(b"data: ")) for e in middle[0].split(b"\n\n")[:-1]]
    assert [(e["choices"][0]["index"], e["choices"][0]["text"]) for e in events] == [
        (index, "b") for index in range(3)
    ]


async def test_headers_come_with_the_first_event(site: Site) -> None:
    site.backend.script = lambda g: Script(["a"], hold="decode")
    async with raw_stream(site, echo=True) as reader:
        first = await reader.read(1 << 16)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"text":"the prompt"' in first


async def test_headers_come_without_an_event_once_a_request_has_started(site: Site) -> None:
    site.backend.script = lambda g: Script(hold="prefill")
    async with raw_stream(site) as reader:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Transfer-Encoding: chunked" in head


async def test_keep_alive_waits_from_the_last_event(task_writes: list[bytes]) -> None:
    """Events that the task did not write put it off as well."""
    async with running_site(sse_keep_alive=1.0) as site:
        site.backend.script = lambda g: Script(["a"] * 14, delay_s=0.1)
        response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
        events = await read_events(response)
    assert len(events) == 15
    assert b": keep-alive\n\n" not in task_writes


async def test_keep_alive_in_a_pause_between_events(site: Site) -> None:
    async with running_site(sse_keep_alive=0.05) as site:
        site.backend.script = lambda g: Script(["a", "b", "c"], delay_s=0.3)
        response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
        events = await read_events(response)
    texts = [json.loads(e)["choices"][0]["text"] for e in events if e.startswith("{")]
    assert texts == ["a", "b", "c"]
    assert events.count(": keep-alive") >= 6


async def test_a_failure_while_writing_ends_that_stream_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one error event without [DONE], as if the task had met it, and the request is aborted."""
    delta = CompletionFormat.delta

    def failing(self: CompletionFormat, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        if piece.text == "bad":
            raise ZeroDivisionError
        return delta(self, choice, piece, usage)

    monkeypatch.setattr(CompletionFormat, "delta", failing)
    site.backend.script = lambda g: Script(["a", "b", "bad", "c", "d"], delay_s=0.05)
    response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
    events = await read_events(response)
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b"]
    ids = {g.req_id for g in site.backend.generates}
    await eventually(lambda: site.backend.aborted == ids)
    site.backend.script = lambda g: Script(["a", "b"])
    status, _ = await site.post(TEXT, {"prompt": "x"})
    assert status == 200
