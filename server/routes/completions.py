"""POST /v1/completions."""

import time
from array import array
from typing import Any

import orjson
from aiohttp import web

from engine.api.messages import TokenLogprobText
from server.logprobs import CompletionLogprobs, prompt_logprobs
from server.receive import receive_object
from server.routes.generate import Envelope, Generation, id_list, make_generation, respond, usage_of
from server.schema.completions import CompletionRequest, parse_completion
from server.schema.sampling import TokenDetails
from server.service import NOTES, SERVICE, Service
from server.stream import Choice, Piece, RequestStream


async def completions(request: web.Request) -> web.StreamResponse:
    arrival_ns = time.monotonic_ns()
    service = request.app[SERVICE]
    service.check_open()
    body = await receive_object(request)
    completion = parse_completion(body, service.defaults)
    request[NOTES].prefer_id(completion.common.request_id, request)
    return await respond(request, *completion_work(completion, body, service), arrival_ns)


def completion_work(
    completion: CompletionRequest, body: dict[str, Any], service: Service
) -> tuple[Generation, "CompletionFormat"]:
    """What to generate and how to answer, for HTTP and for batches. Raises ApiError."""
    common = completion.common
    model = service.check_model(common.model)
    generation = make_generation(
        completion.prompts,
        common,
        body,
        service,
        want_prompt_text=completion.echo,
        is_batch=completion.is_batch,
    )
    fmt = CompletionFormat(
        Envelope.make("cmpl", model, service),
        n=completion.n,
        echo=completion.echo,
        details=common.details,
    )
    return generation, fmt


class CompletionFormat:
    """Chunks and the whole response have the same object name and the same kind of choice."""

    def __init__(self, envelope: Envelope, n: int, echo: bool, details: TokenDetails) -> None:
        self._envelope = envelope
        self._n = n
        self._echo = echo
        self._details = details
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice index
        self._told: set[int] = set()  # choices whose prompt's ids are in a chunk
        self._head = envelope.chunk_head("text_completion")

    def opening(self, choice: Choice, usage: bytes) -> bytes:
        """The echoed prompt; there is no role chunk."""
        if not self._echo:
            return b""
        stream, prompt = choice.stream, choice.prompt_index
        logprobs = orjson.dumps(self._lists(choice, stream.prompt_logprobs[prompt]))
        text = orjson.dumps(stream.prompt_texts[prompt])
        return self._chunk(choice, text, logprobs, b"null" + self._ids(choice, b""), usage)

    def delta(self, choice: Choice, piece: Piece, usage: bytes) -> bytes:
        end = b"null"
        if piece.finish_reason is not None:
            end = b'%b,"stop_reason":%b' % (
                orjson.dumps(piece.finish_reason),
                orjson.dumps(piece.stop_reason),
            )
        logprobs = orjson.dumps(self._lists(choice, piece.logprobs))
        end += self._ids(choice, piece.token_ids)
        return self._chunk(choice, orjson.dumps(piece.text), logprobs, end, usage)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b'%b],"usage":%b}\n\n' % (self._head, orjson.dumps(usage))

    def whole(self, stream: RequestStream) -> dict[str, Any]:
        choices = [
            self._whole_choice(index, choice) for index, choice in enumerate(best(stream, self._n))
        ]
        return {
            **self._envelope.fields("text_completion"),
            "choices": choices,
            "usage": usage_of(stream),
        }

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        stream, prompt = choice.stream, choice.prompt_index
        piece = choice.take()
        assert piece is not None, "a finished choice always has a last piece"
        text, entries = piece.text, piece.logprobs
        if self._echo:
            text = stream.prompt_texts[prompt] + text
            entries = stream.prompt_logprobs[prompt] + entries
        result: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._lists(choice, entries),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        num_prompt_top = self._details.num_prompt_top
        if num_prompt_top is not None:
            known = stream.prompt_logprobs[prompt]
            result["prompt_logprobs"] = prompt_logprobs(known, num_prompt_top)
        if self._details.token_ids:
            result["token_ids"] = array("i", piece.token_ids).tolist()
            result["prompt_token_ids"] = array("i", stream.prompt_token_ids[prompt]).tolist()
        return result

    def _chunk(
        self, choice: Choice, text: bytes, logprobs: bytes, end: bytes, usage: bytes
    ) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._head,
            choice.index,
            text,
            logprobs,
            end,
            usage,
        )

    def _ids(self, choice: Choice, token_ids: bytes) -> bytes:
        """The members of a chunk for `return_token_ids`; the prompt's are in a choice's first."""
        if not self._details.token_ids:
            return b""
        ids = b',"token_ids":' + id_list(token_ids)
        if choice.index not in self._told:
            self._told.add(choice.index)
            prompt_ids = choice.stream.prompt_token_ids[choice.prompt_index]
            ids += b',"prompt_token_ids":' + id_list(prompt_ids)
        return ids

    def _lists(self, choice: Choice, entries: list[TokenLogprobText]) -> dict[str, Any] | None:
        num_top = self._details.num_top
        if num_top is None:
            return None
        state = self._logprobs.get(choice.index)
        if state is None:
            state = CompletionLogprobs(num_top, self._details.names_are_ids)
            self._logprobs[choice.index] = state
        return state.lists(entries)


def best(stream: RequestStream, n: int) -> list[Choice]:
    """n choices of each prompt: all in order, or of more candidates those likeliest by token."""
    choices = stream.choices
    num_candidates = len(choices) // stream.num_prompts
    if num_candidates == n:
        return choices
    chosen: list[Choice] = []
    for first in range(0, len(choices), num_candidates):
        candidates = choices[first : first + num_candidates]
        candidates.sort(key=lambda choice: choice.mean_logprob, reverse=True)
        chosen += candidates[:n]
    return chosen
