"""Reading a request's body: media type, size and time limits, compression, then JSON.

Compressed bodies are inflated here and not by aiohttp, which does it while it parses HTTP: of any request,
before its key is looked at, at one go and without a limit, so that 2 MB can hold the event loop for seconds.
"""

import asyncio
from typing import Any

from aiohttp import web

from server.errors import ApiError
from server.inflate import CODINGS, Inflater
from server.schema.body import parse_object
from server.service import SERVICE

BODY_TIMEOUT_S = 30.0


async def receive_object(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400, 408, 413 or 415."""
    check_media_type(request)
    coding = content_coding(request)
    limit = request.app[SERVICE].config.max_body_size
    if request.content_length is not None and request.content_length > limit:
        raise too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise ApiError(
            408, "request_timeout", f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s."
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(limit) from None
    except web.RequestPayloadError as error:
        raise ApiError(400, "invalid_json", f"The body could not be read: {error}") from None
    if coding == "identity":
        return parse_object(body)
    async with request.app[SERVICE].inflating:
        return parse_object(await inflate(body, coding, limit))


def check_media_type(request: web.Request) -> None:
    """A body without a Content-Type is taken for JSON; any other type must say JSON.

    Not so from a browser: a page of any origin may send such a body without asking first (Fetch, 3.2.2).
    """
    if "Content-Type" not in request.headers:
        if "Origin" in request.headers:
            raise ApiError(
                415,
                "unsupported_media_type",
                "Requests of web pages need a Content-Type: send application/json",
            )
        return
    media_type = request.content_type.lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Type must be application/json, got {media_type!r:.80}",
        )


def content_coding(request: web.Request) -> str:
    """One of CODINGS. Raises ApiError 415 for others, and for several at once."""
    value = ", ".join(request.headers.getall("Content-Encoding", []))
    coding = value.strip().lower().removeprefix("x-") or "identity"  # RFC 9110, 8.4.1.3: x-gzip
    if coding not in CODINGS:
        taken = ", ".join(CODINGS)
        raise ApiError(
            415,
            "unsupported_media_type",
            f"Content-Encoding must be one of {taken}, got {value!r:.80}",
            headers={"Accept-Encoding": taken},  # RFC 9110, 15.5.16
        )
    return coding


async def inflate(data: bytes, coding: str, limit: int) -> bytearray:
    """The body that `data` hold, no further than `limit` bytes. Raises ApiError 400 or 413."""
    body = bytearray()
    inflater = Inflater(coding)
    for piece in inflater.pieces(data):
        body += piece
        if len(body) > limit:
            raise too_large(limit)
        await asyncio.sleep(0)  # others have a turn
    inflater.finish()
    return body


def too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        "request_too_large",
        f"The body is larger than {limit} bytes (--max-body-size).",
        headers={"Connection": "close"},
    )
