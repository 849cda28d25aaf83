"""How events reach the socket: written in the turn in which they come, without the handler's task."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from server.routes import generate
from server.routes.completions import CompletionFormat
from server.stream import Choice, Piece, RequestStream, Turn
from tests.server.conftest import Site, eventually, read_paced_events, running_site
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
    site.backend.script = lambda g: Script(["a", "b", "c", "d"], paced=True)
    response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
    events = await read_paced_events(site, response)
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b", "c", "d"]
    written = b"".join(task_writes)
    assert b'"text":"b"' not in written
    assert b'"text":"c"' not in written
    assert written.endswith(b"data: [DONE]\n\n")


async def test_choices_of_a_step_share_a_chunk(site: Site) -> None:
    """One event each, in one chunk of the body, and none gets lost or mixed up."""
    site.backend.script = lambda g: Script(["a", "b", "c"], paced=True)
    chunks = []
    async with raw_stream(site, n=3) as reader:
        await reader.readuntil(b"\r\n\r\n")
        while size := int(await reader.readline(), 16):
            chunks.append((await reader.readexactly(size + 2)).removesuffix(b"\r\n"))
            if b'"text":"' in chunks[-1]:
                site.backend.go_on()
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


class SetClock:
    """What a stream asks of its event loop, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.create_future = asyncio.get_running_loop().create_future

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((self.now + seconds, callback))

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        due = [callback for at, callback in self.timers if at <= self.now]
        self.timers = [(at, callback) for at, callback in self.timers if at > self.now]
        for callback in due:
            callback()
        await settle()


async def settle() -> None:
    for _ in range(3):  # a task's first turn, a flush at the end of one, the task that it wakes
        await asyncio.sleep(0)


async def test_keep_alive_waits_from_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that the task did not write put it off as well."""
    stream = RequestStream(Turn(), num_prompts=1, arrival_ns=0, incremental=True)
    clock = SetClock()
    monkeypatch.setattr(stream, "_loop", clock)
    choice = stream.add_choice(1, prompt_index=0)
    stream.accept(0, 5, None)
    stream.write_now = lambda choices: choice.take() is not None
    waiting = asyncio.create_task(stream.next(quiet_s=1.0))
    await settle()
    for _ in range(3):
        await clock.advance(0.75)
        choice.add_text("a")
        await settle()
        assert stream.num_pending_chars == 0, "written"
        assert not waiting.done()
    await clock.advance(0.75)
    assert not waiting.done()
    await clock.advance(0.25)
    assert await waiting == []


async def test_keep_alive_in_a_pause_between_events(site: Site) -> None:
    async with running_site(sse_keep_alive=0.05) as site:
        site.backend.script = lambda g: Script(["a", "b", "c"], paced=True)
        response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
        async with asyncio.timeout(20):
            events = await read_paced_events(site, response, num_comments=3)
    texts = [json.loads(e)["choices"][0]["text"] for e in events if e.startswith("{")]
    assert texts == ["a", "b", "c"]


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
    site.backend.script = lambda g: Script(["a", "b", "bad", "c", "d"], paced=True)
    response = await site.session.post(site.url + TEXT, json={"prompt": "x", "stream": True})
    events = await read_paced_events(site, response)
    assert json.loads(events[-1])["error"]["code"] == "internal_error"
    assert [json.loads(e)["choices"][0]["text"] for e in events[:-1]] == ["a", "b"]
    ids = {g.req_id for g in site.backend.generates}
    await eventually(lambda: site.backend.aborted == ids)
    site.backend.script = lambda g: Script(["a", "b"])
    status, _ = await site.post(TEXT, {"prompt": "x"})
    assert status == 200
