"""POST /v1/chat/completions."""

import time
from array import array
from typing import Any

import orjson
from aiohttp import web

from engine.api.messages import TokenLogprobText
from server.answer.parser import AnswerFormat
from server.answer.reader import AnswerReader, DeltaWriter
from server.logprobs import chat_logprobs, prompt_logprobs
from server.receive import receive_object
from server.routes.generate import Envelope, Generation, id_list, make_generation, respond, usage_of
from server.schema.chat import ChatRequest, parse_chat
from server.schema.sampling import TokenDetails
from server.service import NOTES, SERVICE, Service
from server.stream import Choice, Piece, RequestStream

REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    arrival_ns = time.monotonic_ns()
    service = request.app[SERVICE]
    service.check_open()
    body = await receive_object(request)
    chat = parse_chat(body, service.defaults, service.chat_rules)
    request[NOTES].prefer_id(chat.common.request_id, request)
    return await respond(request, *chat_work(chat, body, service), arrival_ns)


def chat_work(
    chat: ChatRequest, body: dict[str, Any], service: Service
) -> tuple[Generation, "ChatFormat"]:
    """What to generate and how to answer, for HTTP and for batches. Raises ApiError."""
    common, answer = chat.common, chat.answer
    model = service.check_model(common.model)
    generation = make_generation(
        [chat.prompt],
        common,
        body,
        service,
        shown_special=list(answer.calls.special) if answer.calls else [],
        reasoning_mark=answer.reasoning.begin if answer.reasoning else "",
        structured_after_mark=chat.structured_after_mark,
    )
    fmt = ChatFormat(
        Envelope.make("chatcmpl", model, service),
        common.details,
        answer,
        REASONING_FIELDS[service.config.reasoning_field],
        chat.echo_text,
    )
    return generation, fmt


class ChatFormat:
    """Chunks are put together from prepared bytes: only the text itself is encoded each time."""

    def __init__(
        self,
        envelope: Envelope,
        details: TokenDetails,
        answer: AnswerFormat,
        reasoning_fields: tuple[str, ...],
        echo_text: str,
    ) -> None:
        self._envelope = envelope
        self._answer = answer
        self._readers: dict[int, AnswerReader] = {}  # by choice index
        self._writer = DeltaWriter(answer.calls, reasoning_fields)
        self._echo_text = echo_text
        self._details = details
        self._token_ids: dict[int, bytes] = {}  # read, and not in a chunk yet; by choice index
        self._has_told_prompt = False
        self._head = envelope.chunk_head("chat.completion.chunk")

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        if self._details.token_ids and not self._has_told_prompt:
            self._has_told_prompt = True
            usage += b',"prompt_token_ids":' + id_list(choice.stream.prompt_token_ids[0])
        deltas = [b'{"role":"assistant","content":""}']
        if self._echo_text:
            deltas.append(orjson.dumps({"content": self._echo_text}))
        return b"".join(self._chunk(choice, delta, usage) for delta in deltas)

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        """A chunk for each kind of thing in the piece; none if all of it is not certain yet."""
        if self._details.token_ids:
            self._token_ids[choice.index] = self._token_ids.get(choice.index, b"") + piece.token_ids
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
            entry = {
                "index": choice.index,
                "message": message,
                "logprobs": self._logprobs(piece.logprobs),
                "finish_reason": reader.finish_reason(piece.finish_reason),
                "stop_reason": piece.stop_reason,
            }
            if self._details.token_ids:
                entry["token_ids"] = array("i", piece.token_ids).tolist()
            choices.append(entry)
        answer = {
            **self._envelope.fields("chat.completion"),
            "choices": choices,
            "usage": usage_of(stream),
        }
        if self._details.num_prompt_top is not None:
            entries = stream.prompt_logprobs[0]
            answer["prompt_logprobs"] = prompt_logprobs(entries, self._details.num_prompt_top)
        if self._details.token_ids:
            answer["prompt_token_ids"] = array("i", stream.prompt_token_ids[0]).tolist()
        return answer

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
        if self._details.token_ids and choice.index in self._token_ids:
            end += b',"token_ids":' + id_list(self._token_ids.pop(choice.index))
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._head,
            choice.index,
            delta,
            logprobs,
            end,
            usage,
        )

    def _logprob_bytes(self, entries: list[TokenLogprobText]) -> bytes:
        if self._details.num_top is None or not entries:
            return b"null"
        return orjson.dumps(self._logprobs(entries))

    def _logprobs(self, entries: list[TokenLogprobText]) -> dict[str, Any] | None:
        if self._details.num_top is None:
            return None
        return chat_logprobs(entries, self._details.num_top, self._details.names_are_ids)


def end_bytes(piece: Piece, reason: str | None) -> bytes:
    """The finish_reason of a chunk, and the stop_reason behind it if it is the last."""
    if reason is None:
        return b"null"
    return b'%b,"stop_reason":%b' % (orjson.dumps(reason), orjson.dumps(piece.stop_reason))
