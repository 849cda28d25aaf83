"""What chat and completions share: from parsed request to streamed or whole response.

The status line of a stream is held back until its first choice is scheduled (or a keep-alive is
due), so that everything wrong with a request until then is a plain HTTP error.

    receive body -> parse -> EngineClient.generate -> RequestStream
                                                        | stream: true    write_stream -> SSE
                                                        | stream: false   wait, one JSON body
    finally: EngineClient.abort                         (client gone, error, or nothing left to do)
"""

import asyncio
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import orjson
from aiohttp import HttpVersion11, web

from engine.api.messages import Prompt
from server import sse
from server.client import GenerateOptions
from server.deadline import Deadline
from server.errors import ApiError, internal_error
from server.request_metrics import request_metrics
from server.schema.fields import ignored_header
from server.schema.limits import allowed_seconds, check_limits
from server.schema.sampling import CommonRequest, StreamOptions
from server.service import NOTES, SERVICE, Service
from server.stream import Choice, Piece, RequestStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Envelope:
    """The fields that every chunk of a response repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def make(cls, prefix: str, model: str, service: Service) -> "Envelope":
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=service.system_fingerprint,
        )

    def fields(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def chunk_head(self, object_name: str) -> bytes:
        """The bytes of a chunk's event up to its first choice."""
        return b"data: %b" % orjson.dumps(self.fields(object_name))[:-1] + b',"choices":['


class Format(Protocol):
    """How one endpoint writes choices. Bytes are whole events, the usage field left open."""

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        """The first event of a choice; b"" if it has none."""

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """One event with new text, or the end, or both."""

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The event after all choices."""

    def whole(self, stream: RequestStream) -> dict[str, Any]:
        """The response that is not streamed."""


@dataclass(frozen=True)
class Generation:
    """A parsed request, the same for both endpoints."""

    prompts: list[Prompt]
    options: GenerateOptions
    stream_options: StreamOptions
    ignored_headers: dict[str, str]
    total_s: float = 0.0  # until its last token; 0: any time
    has_own_limit: bool = False  # `total_s` is its `timeout`, not --request-timeout


def make_generation(
    prompts: list[Prompt],
    common: CommonRequest,
    body: dict[str, Any],
    service: Service,
    **more: Any,
) -> Generation:
    """`more`: fields of GenerateOptions that only one endpoint has. Raises ApiError."""
    service.report_unknown(common.ignored)
    check_limits(body, service.config, common.ignored)
    options = GenerateOptions(
        params=common.params,
        priority=common.priority,
        cache_salt=common.cache_salt,
        clamp_max_tokens=common.clamp_max_tokens,
        want_token_ids=common.details.token_ids,
        incremental=common.stream,
        **more,
    )
    headers = ignored_header(common.ignored)
    total_s = allowed_seconds(body, service.config)
    has_own_limit = body.get("timeout") is not None
    return Generation(prompts, options, common.stream_options, headers, total_s, has_own_limit)


async def respond(
    request: web.Request, generation: Generation, fmt: Format, arrival_ns: int
) -> web.StreamResponse:
    service = request.app[SERVICE]
    notes = request[NOTES]
    allowance = service.allowances[notes.key]
    num_completions = len(generation.prompts) * generation.options.params.n
    service.check_queue(num_completions)
    allowance.check(num_completions)
    stream = submit(generation, service, arrival_ns)
    allowance.begin(num_completions)
    notes.stream, notes.prompts = stream, generation.prompts
    request_id = notes.request_id
    service.live[stream] = request_id
    ids = [choice.req_id for choice in stream.choices]
    service.reports.remember(request_id, range(ids[0], ids[-1] + 1))
    logger.debug("request id=%s received as %d..%d", request_id, ids[0], ids[-1])
    try:
        queue_s, total_s = service.config.queue_timeout, generation.total_s
        with Deadline(stream, queue_s, total_s, generation.has_own_limit):
            if generation.options.incremental:
                return await write_stream(request, stream, generation, fmt)
            await stream.wait_finished()
        answer = fmt.whole(stream)
        if wants_metrics(request):
            answer["metrics"] = request_metrics(stream)
        return web.Response(
            body=orjson.dumps(answer),
            content_type="application/json",
            headers=generation.ignored_headers,
        )
    finally:
        service.client.abort(stream)
        del service.live[stream]
        notes.usage = usage_of(stream)
        allowance.end(num_completions, notes.usage["total_tokens"])
        logger.debug("request id=%s returned: %s", request_id, notes.usage)


def submit(generation: Generation, service: Service, arrival_ns: int) -> RequestStream:
    """Hand it to the engine. The caller must `abort` the stream in a `finally`. Raises ApiError."""
    client, options = service.client, generation.options
    params = options.params
    client.metrics.params_n.observe(params.n)
    if params.max_tokens is not None:
        client.metrics.params_max_tokens.observe(params.max_tokens)
    if service.config.clamp_max_tokens:
        options = msgspec.structs.replace(options, clamp_max_tokens=True)
    return client.generate(generation.prompts, options, arrival_ns)


def wants_metrics(request: web.Request) -> bool:
    config = request.app[SERVICE].config
    return config.enable_request_metrics or request.headers.get("X-Request-Metrics") == "1"


async def write_stream(
    request: web.Request, stream: RequestStream, generation: Generation, fmt: Format
) -> web.StreamResponse:
    """Write events as they come. Events that are ready together share one write."""
    keep_alive_s = request.app[SERVICE].config.sse_keep_alive
    options = generation.stream_options
    response: web.StreamResponse | None = None
    num_open = len(stream.choices)
    try:
        while num_open:
            choices = await stream.next(keep_alive_s)
            events: list[bytes] = [] if choices else [sse.KEEP_ALIVE]
            for choice in choices:
                usage = usage_field(stream, choice, options)
                if not choice.is_opened:
                    choice.is_opened = True
                    events.append(fmt.opening(choice, usage))
                piece = choice.take()
                if piece is not None:
                    events.append(fmt.delta(choice, piece, usage))
                    num_open -= piece.finish_reason is not None
            is_first = response is None
            if response is None:
                response = await sse.open_response(request, generation.ignored_headers)
                stream.write_now = direct_writer(request, stream, options, fmt)
            if not num_open:
                if options.include_usage:
                    events.append(last_chunk(request, stream, fmt))
                events.append(sse.DONE)
            data = b"".join(events)
            if data or is_first:
                await send(request, response, data, stream)
        assert response is not None
        await send_end(request, response)
        return response
    except ConnectionError:  # the client has gone; the caller aborts
        assert response is not None
        return response
    except Exception as error:
        if response is None:
            raise
        if not isinstance(error, ApiError):
            logger.exception("request %s failed while streaming", request[NOTES].request_id)
            error = internal_error()
        return await end_with_error(request, response, error)


def direct_writer(
    request: web.Request, stream: RequestStream, options: StreamOptions, fmt: Format
) -> Callable[[list[Choice]], bool] | None:
    """For `RequestStream.write_now`. None without chunks (HTTP/1.0), which it writes itself.

    It cannot wait, so it writes only while nothing of this response is unsent.
    """
    transport = request.transport
    if transport is None or request.version < HttpVersion11:
        return None

    def write(choices: list[Choice]) -> bool:
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        for choice in choices:
            if choice.finish_reason is not None or not choice.is_opened:
                return False
        events = []
        for choice in choices:
            piece = choice.take()
            if piece is not None:
                events.append(fmt.delta(choice, piece, usage_field(stream, choice, options)))
        if data := b"".join(events):
            transport.write(sse.chunk(data))
        return True

    return write


def last_chunk(request: web.Request, stream: RequestStream, fmt: Format) -> bytes:
    """The usage, and the request's times beside it if they are wanted."""
    event = fmt.usage_chunk(usage_of(stream))
    if not wants_metrics(request):
        return event
    times = orjson.dumps(request_metrics(stream))
    return event.removesuffix(b"}\n\n") + b',"metrics":%b}\n\n' % times


async def send(
    request: web.Request,
    response: web.StreamResponse,
    data: bytes,
    stream: RequestStream | None = None,
) -> None:
    """Raises ConnectionError when the client has gone, or reads nothing for --write-timeout.

    What arrives for a slow reader meanwhile is held in memory, bounded by that time and by size.
    """
    await within_write_timeout(request, response.write(data), stream)


async def send_end(request: web.Request, response: web.StreamResponse) -> None:
    """As `send`."""
    await within_write_timeout(request, response.write_eof())


async def within_write_timeout(
    request: web.Request, write: Coroutine[Any, Any, None], stream: RequestStream | None = None
) -> None:
    seconds = request.app[SERVICE].config.write_timeout
    try:
        async with asyncio.timeout(seconds) as limit:
            if stream is not None:
                stream.write_limit = limit
            try:
                await write
            finally:
                if stream is not None:
                    stream.write_limit = None
    except TimeoutError:
        request[NOTES].stream_error = "write_timeout"
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionError("the client reads too slowly, or not at all") from None


async def end_with_error(
    request: web.Request, response: web.StreamResponse, error: ApiError
) -> web.StreamResponse:
    """The error event, and no [DONE]: clients take [DONE] for success.

    The TCP connection stays: its keep-alive was promised, and a client may be reusing it already.
    """
    request[NOTES].stream_error = error.code
    request.app[SERVICE].client.metrics.rejected[error.code] += 1
    try:
        data = sse.event(error.body(request[NOTES].request_id))
        if request.app[SERVICE].config.done_after_error:
            data += sse.DONE
        await send(request, response, data)
        await send_end(request, response)
    except ConnectionError:
        pass
    return response


def id_list(token_ids: bytes) -> bytes:
    """int32 as JSON."""
    return orjson.dumps(array("i", token_ids).tolist())


def usage_field(stream: RequestStream, choice: Choice, options: StreamOptions) -> bytes:
    """The usage member of a chunk: absent, null, or the running numbers of its choice."""
    if options.continuous_usage_stats:
        prompt_tokens = stream.num_prompt_tokens[choice.prompt_index]
        running = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": choice.num_tokens,
            "total_tokens": prompt_tokens + choice.num_tokens,
        }
        return b',"usage":' + orjson.dumps(running)
    return b',"usage":null' if options.include_usage else b""


def usage_of(stream: RequestStream) -> dict[str, Any]:
    """Prompt tokens once for each prompt, whatever n is; completion tokens of all choices."""
    prompt_tokens = sum(stream.num_prompt_tokens)
    completion_tokens = sum(choice.num_tokens for choice in stream.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(stream.num_cached_tokens)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in stream.choices)
        },
    }
