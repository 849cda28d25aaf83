"""POST /v1/completions."""

import codecs
import time
from typing import Any

import orjson
from aiohttp import web

from engine.api.messages import TokenLogprobText
from server.client import GenerateOptions
from server.receive import receive_object
from server.routes.chat import finite_logprob
from server.routes.generate import Envelope, Generation, respond, usage_of
from server.schema.completions import parse_completion
from server.schema.fields import ignored_header
from server.schema.limits import allowed_seconds, check_limits
from server.service import NOTES, SERVICE
from server.stream import Choice, Piece, RequestStream


async def completions(request: web.Request) -> web.StreamResponse:
    arrival_ns = time.monotonic_ns()
    service = request.app[SERVICE]
    service.check_open()
    body = await receive_object(request)
    completion = parse_completion(body, service.defaults)
    model = service.check_model(completion.model)
    request[NOTES].prefer_id(completion.request_id, request)
    service.report_unknown(completion.ignored)
    check_limits(body, service.config)
    generation = Generation(
        prompts=completion.prompts,
        options=GenerateOptions(
            params=completion.params,
            priority=completion.priority,
            cache_salt=completion.cache_salt,
            want_prompt_text=completion.echo,
            is_batch=completion.is_batch,
            incremental=completion.stream,
        ),
        stream_options=completion.stream_options,
        ignored_headers=ignored_header(completion.ignored),
        total_s=allowed_seconds(body, service.config),
    )
    fmt = CompletionFormat(
        Envelope.make("cmpl", model, service),
        echo=completion.echo,
        with_logprobs=completion.params.logprobs is not None,
    )
    return await respond(request, generation, fmt, arrival_ns)


class CompletionFormat:
    """Chunks and the whole response have the same object name and the same kind of choice."""

    def __init__(self, envelope: Envelope, echo: bool, with_logprobs: bool) -> None:
        self._envelope = envelope
        self._echo = echo
        self._with_logprobs = with_logprobs
        self._offsets: dict[int, TextOffsets] = {}  # by choice index
        self._head = envelope.chunk_head("text_completion")

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        """The echoed prompt; there is no role chunk."""
        if not self._echo:
            return b""
        text = choice.stream.prompt_texts[choice.prompt_index]
        return self._chunk(choice.index, orjson.dumps(text), b"null", b"null", usage)

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        end = b"null"
        if piece.finish_reason is not None:
            end = b'%b,"stop_reason":%b' % (
                orjson.dumps(piece.finish_reason),
                orjson.dumps(piece.stop_reason),
            )
        logprobs = b"null"
        if self._with_logprobs:
            logprobs = orjson.dumps(self._logprobs(choice, piece.logprobs))
        return self._chunk(choice.index, orjson.dumps(piece.text), logprobs, end, usage)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))

    def whole(self, stream: RequestStream) -> dict[str, Any]:
        choices = []
        for choice in stream.choices:
            piece = choice.take()
            assert piece is not None, "a finished choice always has a last piece"
            prompt_text = stream.prompt_texts[choice.prompt_index] if self._echo else ""
            choices.append(
                {
                    "index": choice.index,
                    "text": prompt_text + piece.text,
                    "logprobs": self._logprobs(choice, piece.logprobs),
                    "finish_reason": piece.finish_reason,
                    "stop_reason": piece.stop_reason,
                }
            )
        return {
            **self._envelope.fields("text_completion"),
            "choices": choices,
            "usage": usage_of(stream),
        }

    def _chunk(self, index: int, text: bytes, logprobs: bytes, end: bytes, usage: bytes) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._head,
            index,
            text,
            logprobs,
            end,
            usage,
        )

    def _logprobs(self, choice: Choice, entries: list[TokenLogprobText]) -> dict[str, Any] | None:
        """Four lists of equal length."""
        if not self._with_logprobs:
            return None
        offsets = self._offsets.setdefault(choice.index, TextOffsets())
        return {
            "tokens": [entry.chosen.token for entry in entries],
            "token_logprobs": [finite_logprob(entry.chosen.logprob) for entry in entries],
            "top_logprobs": [top_by_text(entry) for entry in entries],
            "text_offset": [offsets.next(entry.chosen.bytes) for entry in entries],
        }


class TextOffsets:
    """Where each token begins in the text, in characters, counted from the tokens' true bytes.

    A token that only completes a character begins where that character does.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def next(self, token_bytes: bytes) -> int:
        begin = self._offset
        self._offset += len(self._decoder.decode(token_bytes))
        return begin


def top_by_text(entry: TokenLogprobText) -> dict[str, float]:
    """The k best and the sampled token; of two ids with the same text, the likelier one counts."""
    top: dict[str, float] = {}
    for candidate in (*entry.top, entry.chosen):
        logprob = finite_logprob(candidate.logprob)
        if logprob > top.get(candidate.token, -float("inf")):
            top[candidate.token] = logprob
    return top
