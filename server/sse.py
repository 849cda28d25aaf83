"""Server-sent events: the framing, and the response that carries them."""

from aiohttp import HttpVersion11, web

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment line, which clients skip

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON, hence a single line."""
    return b"data: %b\n\n" % payload


def chunk(data: bytes) -> bytes:
    """`data`, not empty, as one chunk of a body (RFC 9112, 7.1)."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class EventStream(web.StreamResponse):
    """Its headers go out with the first write: one packet less for the client to wake up for."""

    _send_headers_immediately = False


async def open_response(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Prepare the status line and headers of an event stream. From here on, errors come as events.

    The caller's first write sends them, even if it is empty.

    HTTP/1.0 has no chunks: only a closed connection tells its clients that the stream has ended.
    """
    response = EventStream(headers={**HEADERS, **headers})
    if request.keep_alive and request.version >= HttpVersion11:
        response.headers["Connection"] = "keep-alive"
    else:
        response.headers["Connection"] = "close"
        response.force_close()
    await response.prepare(request)
    return response
