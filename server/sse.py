"""Server-sent events: the framing, and the response that carries them."""

from aiohttp import web

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment line, which clients skip

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
    "Connection": "keep-alive",
}


def event(payload: bytes) -> bytes:
    """One event; `payload` is JSON, hence a single line."""
    return b"data: %b\n\n" % payload


async def open_response(request: web.Request, headers: dict[str, str]) -> web.StreamResponse:
    """Send the status line and headers of an event stream. From here on, errors come as events."""
    response = web.StreamResponse(headers={**HEADERS, **headers})
    await response.prepare(request)
    return response
