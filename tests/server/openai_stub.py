"""A server with OpenAI's API in a thread: streams by the clock, or misbehaves in a chosen way.

It records when each request came and when each piece was written, on the clock that its clients use
(`time.perf_counter`), so that a test can compare what a client measured with what was really done.
"""

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CUT_SHORT = {"stall", "error_event", "cut", "no_end"}


@dataclass
class Seen:
    """One request, with the stub's own times."""

    body: dict[str, Any]
    headers: dict[str, str]
    came: float
    written: list[float] = field(default_factory=list)  # of each piece
    ended: float = 0.0
    peer: Any = None  # the client's end of the connection


class OpenAIStub:
    """Use as a context manager. `mode` may change at any time and holds for requests that come later.

    stream: well; http_500; http_429 (with Retry-After, `refusals` times, then well); cut (connection
    closed after two pieces); drop (closed before an answer); silent (no answer); stall (nothing after two
    pieces); error_event; json (no stream); garbage; no_end (two pieces, then a clean end); linger (well,
    but the body does not end)
    """

    def __init__(self, first_s: float = 0.0, gap_s: float = 0.0, usage: bool = True) -> None:
        self.first_s, self.gap_s, self.usage = first_s, gap_s, usage
        self.mode = "stream"
        self.refusals = 10**9
        self.retry_after = "1"
        self.slots: asyncio.Semaphore | None = None  # requests served at a time, if set
        self.metrics = ""
        self.refusal = "broken"  # body of http_500
        self.broken = b""  # sent before the pieces
        self.counts: dict[str, Any] = {}  # instead of what `usage` says
        self.seen: list[Seen] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> "OpenAIStub":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub-model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.metrics:
            raise web.HTTPNotFound
        return web.Response(text=self.metrics)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        came = time.perf_counter()
        seen = Seen(await request.json(), dict(request.headers), came)
        seen.peer = request.get_extra_info("peername")
        self.seen.append(seen)
        if self.slots is not None:
            async with self.slots:
                return await self._answer(request, seen)
        return await self._answer(request, seen)

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        mode = self.mode
        if mode == "http_429" and self.refusals > 0:
            self.refusals -= 1
            error = {"error": {"message": "the queue is full", "code": "queue_full"}}
            return web.json_response(error, status=429, headers={"Retry-After": self.retry_after})
        if mode == "http_500":
            return web.Response(status=500, text=self.refusal)
        if mode == "json":
            return web.json_response({"choices": [{"text": "all at once"}]})
        if mode == "drop":
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if mode == "silent":
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if mode == "garbage":
            await response.write(b'data: {"usage": {oops\n\n')
            return response
        await self._stream(request, response, seen, mode)
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, seen: Seen, mode: str
    ) -> None:
        chat = request.path.endswith("chat/completions")
        if chat:
            await response.write(event({"delta": {"role": "assistant", "content": ""}}))
        if self.broken:
            await response.write(self.broken)
        count = seen.body["max_tokens"]
        next_write = seen.came + self.first_s
        for number in range(count):
            await asyncio.sleep(max(0.0, next_write - time.perf_counter()))
            piece = f' "text":"{number}"'  # looks like a key, and is none
            choice = {"delta": {"content": piece}} if chat else {"text": piece}
            await response.write(event(choice))
            seen.written.append(time.perf_counter())
            next_write = seen.written[-1] + self.gap_s
            if number == 1 and mode in CUT_SHORT:
                if mode == "stall":
                    await asyncio.sleep(60)
                if mode == "error_event":
                    await response.write(b'data: {"error": {"message": "the engine died"}}\n\n')
                if mode == "cut":
                    assert request.transport is not None
                    request.transport.abort()
                return
        last = {"delta": {}} if chat else {"text": ""}
        await response.write(event({**last, "finish_reason": "length"}))
        if self.usage and seen.body.get("stream_options"):
            usage = {
                "prompt_tokens": 7,
                "completion_tokens": 2 * count,
                "total_tokens": 0,
                **self.counts,
            }
            await response.write(
                f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
            )
        await response.write(b"data: [DONE]\n\n")
        seen.ended = time.perf_counter()
        if mode == "linger":
            await asyncio.sleep(60)


def event(choice: dict[str, Any]) -> bytes:
    chunk = {"id": "x", "choices": [{"index": 0, "finish_reason": None, **choice}], "usage": None}
    return f"data: {json.dumps(chunk)}\n\n".encode()
