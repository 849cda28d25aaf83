"""POST /v1/chat/completions."""

import time
from typing import Any

import orjson
from aiohttp import web

from engine.api.messages import LogprobEntry, TokenLogprobText
from server.client import GenerateOptions
from server.receive import receive_object
from server.routes.generate import Envelope, Generation, respond, usage_of
from server.schema.chat import parse_chat
from server.schema.fields import ignored_header
from server.schema.limits import allowed_seconds, check_limits
from server.service import NOTES, SERVICE
from server.stream import Choice, Piece, RequestStream

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


async def chat_completions(request: web.Request) -> web.StreamResponse:
    arrival_ns = time.monotonic_ns()
    service = request.app[SERVICE]
    service.check_open()
    body = await receive_object(request)
    chat = parse_chat(body, service.defaults)
    model = service.check_model(chat.model)
    request[NOTES].prefer_id(chat.request_id, request)
    service.report_unknown(chat.ignored)
    check_limits(body, service.config)
    generation = Generation(
        prompts=[chat.prompt],
        options=GenerateOptions(
            params=chat.params,
            priority=chat.priority,
            cache_salt=chat.cache_salt,
            incremental=chat.stream,
        ),
        stream_options=chat.stream_options,
        ignored_headers=ignored_header(chat.ignored),
        total_s=allowed_seconds(body, service.config),
    )
    fmt = ChatFormat(Envelope.make("chatcmpl", model, service), chat.top_logprobs)
    return await respond(request, generation, fmt, arrival_ns)


class ChatFormat:
    """Chunks are put together from prepared bytes: only the text itself is encoded each time."""

    def __init__(self, envelope: Envelope, top_logprobs: int | None) -> None:
        self._envelope = envelope
        self._top_logprobs = top_logprobs
        self._head = envelope.chunk_head("chat.completion.chunk")

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        return (
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}]%b}\n\n' % (self._head, choice.index, usage)
        )

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        content = b'"content":%b' % orjson.dumps(piece.text) if piece.text else b""
        end = b"null"
        if piece.finish_reason is not None:
            end = b'%b,"stop_reason":%b' % (
                orjson.dumps(piece.finish_reason),
                orjson.dumps(piece.stop_reason),
            )
        logprobs = b"null"
        if self._top_logprobs is not None and piece.logprobs:
            logprobs = orjson.dumps(self._logprobs(piece.logprobs))
        return b'%b{"index":%d,"delta":{%b},"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._head,
            choice.index,
            content,
            logprobs,
            end,
            usage,
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))

    def whole(self, stream: RequestStream) -> dict[str, Any]:
        choices = []
        for choice in stream.choices:
            piece = choice.take()
            assert piece is not None, "a finished choice always has a last piece"
            choices.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": piece.text, "refusal": None},
                    "logprobs": self._logprobs(piece.logprobs),
                    "finish_reason": piece.finish_reason,
                    "stop_reason": piece.stop_reason,
                }
            )
        return {
            **self._envelope.fields("chat.completion"),
            "choices": choices,
            "usage": usage_of(stream),
        }

    def _logprobs(self, entries: list[TokenLogprobText]) -> dict[str, Any] | None:
        if self._top_logprobs is None:
            return None
        k = self._top_logprobs
        return {
            "content": [
                {
                    **logprob_entry(entry.chosen),
                    "top_logprobs": [logprob_entry(top) for top in entry.top[:k]],
                }
                for entry in entries
            ],
            "refusal": None,
        }


def logprob_entry(entry: LogprobEntry) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": finite_logprob(entry.logprob),
        "bytes": list(entry.bytes),
    }


def finite_logprob(logprob: float) -> float:
    """Never -inf nor NaN: neither can be written as JSON."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
