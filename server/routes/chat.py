"""POST /v1/chat/completions."""

import time
from typing import Any

import orjson
from aiohttp import web

from engine.api.messages import LogprobEntry, TokenLogprobText
from server.answer.parser import AnswerFormat
from server.answer.reader import AnswerReader, DeltaWriter
from server.client import GenerateOptions
from server.receive import receive_object
from server.routes.generate import Envelope, Generation, respond, usage_of
from server.schema.chat import parse_chat
from server.schema.fields import ignored_header
from server.schema.limits import allowed_seconds, check_limits
from server.service import NOTES, SERVICE
from server.stream import Choice, Piece, RequestStream

REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


async def chat_completions(request: web.Request) -> web.StreamResponse:
    arrival_ns = time.monotonic_ns()
    service = request.app[SERVICE]
    service.check_open()
    body = await receive_object(request)
    chat = parse_chat(body, service.defaults, service.chat_rules)
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
            shown_special=list(chat.answer.calls.special) if chat.answer.calls else [],
            reasoning_mark=chat.answer.reasoning.begin if chat.answer.reasoning else "",
            structured_after_mark=chat.structured_after_mark,
        ),
        stream_options=chat.stream_options,
        ignored_headers=ignored_header(chat.ignored),
        total_s=allowed_seconds(body, service.config),
    )
    fmt = ChatFormat(
        Envelope.make("chatcmpl", model, service),
        chat.top_logprobs,
        chat.answer,
        REASONING_FIELDS[service.config.reasoning_field],
        chat.echo_text,
    )
    return await respond(request, generation, fmt, arrival_ns)


class ChatFormat:
    """Chunks are put together from prepared bytes: only the text itself is encoded each time."""

    def __init__(
        self,
        envelope: Envelope,
        top_logprobs: int | None,
        answer: AnswerFormat,
        reasoning_fields: tuple[str, ...],
        echo_text: str,
    ) -> None:
        self._envelope = envelope
        self._answer = answer
        self._readers: dict[int, AnswerReader] = {}  # by choice index
        self._writer = DeltaWriter(answer.calls, reasoning_fields)
        self._echo_text = echo_text
        self._top_logprobs = top_logprobs
        self._head = envelope.chunk_head("chat.completion.chunk")

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        deltas = [b'{"role":"assistant","content":""}']
        if self._echo_text:
            deltas.append(orjson.dumps({"content": self._echo_text}))
        return b"".join(self._chunk(choice, delta, usage) for delta in deltas)

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """A chunk for each kind of thing in the piece; none if all of it is not certain yet."""
        if self._answer.is_plain:
            text = b'{"content":%b}' % orjson.dumps(piece.text) if piece.text else b"{}"
            logprobs = self._logprob_bytes(piece.logprobs)
            return self._chunk(choice, text, usage, logprobs, end_bytes(piece, piece.finish_reason))
        reader = self._reader(choice)
        deltas = [orjson.dumps(self._writer.delta(event)) for event in reader.read(piece)]
        reason = reader.finish_reason(piece.finish_reason)
        if reason is not None:
            deltas.append(b"{}")
        if not deltas:
            return b""
        first, last = self._logprob_bytes(reader.take_logprobs()), end_bytes(piece, reason)
        return b"".join(
            self._chunk(
                choice,
                delta,
                usage,
                first if position == 0 else b"null",
                last if position == len(deltas) - 1 else b"null",
            )
            for position, delta in enumerate(deltas)
        )

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))

    def whole(self, stream: RequestStream) -> dict[str, Any]:
        choices = []
        for choice in stream.choices:
            piece = choice.take()
            assert piece is not None, "a finished choice always has a last piece"
            reader = self._reader(choice)
            message = self._writer.message(reader.read(piece), self._echo_text)
            choices.append(
                {
                    "index": choice.index,
                    "message": message,
                    "logprobs": self._logprobs(piece.logprobs),
                    "finish_reason": reader.finish_reason(piece.finish_reason),
                    "stop_reason": piece.stop_reason,
                }
            )
        return {
            **self._envelope.fields("chat.completion"),
            "choices": choices,
            "usage": usage_of(stream),
        }

    def _reader(self, choice: Choice) -> AnswerReader:
        reader = self._readers.get(choice.index)
        if reader is None:
            reader = self._readers[choice.index] = AnswerReader(self._answer, choice)
        return reader

    def _chunk(
        self,
        choice: Choice,
        delta: bytes,
        usage: bytes,
        logprobs: bytes = b"null",
        end: bytes = b"null",
    ) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._head,
            choice.index,
            delta,
            logprobs,
            end,
            usage,
        )

    def _logprob_bytes(self, entries: list[TokenLogprobText]) -> bytes:
        if self._top_logprobs is None or not entries:
            return b"null"
        return orjson.dumps(self._logprobs(entries))

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


def end_bytes(piece: Piece, reason: str | None) -> bytes:
    """The finish_reason of a chunk, and the stop_reason behind it if it is the last."""
    if reason is None:
        return b"null"
    return b'%b,"stop_reason":%b' % (orjson.dumps(reason), orjson.dumps(piece.stop_reason))


def logprob_entry(entry: LogprobEntry) -> dict[str, Any]:
    return {
        "token": entry.token,
        "logprob": finite_logprob(entry.logprob),
        "bytes": list(entry.bytes),
    }


def finite_logprob(logprob: float) -> float:
    """Never -inf nor NaN: neither can be written as JSON."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
