"""Turns the engine's steps into text for the server: one pass over the columns of a step."""

import logging
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from engine.api.messages import (
    AddRequest,
    Deltas,
    FinishReason,
    RequestError,
    StepOutput,
    TokenLogprobs,
    TokenLogprobText,
)
from tokenizer_proc.completion import CompletionText
from tokenizer_proc.detokenize import text_stream
from tokenizer_proc.logprobs import with_text
from tokenizer_proc.prompt_tokens import PromptTokens
from tokenizer_proc.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

# HTTP status of a request that the engine refuses; any other code is the server's fault.
STATUS_OF_REJECTION = {
    "context_length_exceeded": 400,
    "exceeds_kv_capacity": 400,
    "invalid_value": 400,
    "invalid_token_id": 400,
    "invalid_schema": 400,
    "queue_full": 429,
    "queue_timeout": 503,
    "not_ready": 503,
    "draining": 503,
}


@dataclass(slots=True)
class Live:
    """One request of the engine. It may stand for several choices that cannot differ."""

    completion: CompletionText
    copies: int = 1  # choices req_id .. req_id + copies - 1 all get the same
    wants_token_ids: bool = False
    prompt: PromptTokens | None = None  # if its log-probabilities are wanted
    form_param: str = ""  # the field that says what the text has to look like

    @property
    def is_plain(self) -> bool:
        """Between its beginning and its end there is nothing but text, all of which can be shown."""
        wants_more = self.wants_token_ids or self.completion.params.logprobs is not None
        return self.copies == 1 and self.completion.matcher is None and not wants_more


class OutputProcessor:
    """Owns the text of every live request. A request leaves with its terminal message or its abort."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.live: dict[int, Live] = {}

    def add(
        self,
        request: AddRequest,
        copies: int = 1,
        wants_token_ids: bool = False,
        prompt_texts: list[str] | None = None,
        shown_special: Sequence[str] = (),
        form_param: str = "",
    ) -> None:
        """Expect the output of `request`. Call it before the engine can answer.

        `prompt_texts`: what each prompt token adds to the text, to come with its log-probability.
        `shown_special`: special tokens that are a part of the text in any case.
        """
        prompt_ids = np.frombuffer(request.token_ids, dtype="<i4")
        skip = request.params.skip_special_tokens
        stream = text_stream(self.vocabulary, skip, prompt_ids, shown_special)
        live = Live(
            CompletionText(request.params, stream), copies, wants_token_ids, form_param=form_param
        )
        if request.params.prompt_logprobs is not None:
            live.prompt = PromptTokens(self.vocabulary, prompt_ids, prompt_texts)
        self.live[request.req_id] = live

    def forget(self, req_ids: Iterable[int]) -> list[int]:
        """Drop requests; returns those that were live. Their later output is ignored."""
        return [req_id for req_id in req_ids if self.live.pop(req_id, None) is not None]

    def process(self, step: StepOutput) -> tuple[Deltas, list[int]]:
        """The step as text, and the ids of requests that the engine must be told to stop.

        Requests that are unknown (aborted, or ended by a stop string some steps ago) are skipped.
        """
        deltas = Deltas(req_ids=[], texts=[], counts=[], finished=[])
        self._started(step, deltas)
        abort_ids = self._prompts(step, deltas) if step.prompt_logprobs else []
        ends = {index: (reason, token) for index, reason, token in step.finished}
        logprobs = {entry.index: entry for entry in step.logprobs}
        first = 0
        for index, (req_id, count) in enumerate(zip(step.req_ids, step.counts, strict=True)):
            tokens = range(first, first + count)
            first += count
            live = self.live.get(req_id)
            if live is None:
                continue
            row = len(deltas.req_ids)
            try:
                if live.is_plain and index not in ends:
                    text = "".join([live.completion.push(step.token_ids[i]) for i in tokens])
                    add_row(deltas, req_id, text, count, None)
                    continue
                ended = self._advance(
                    live, req_id, step.token_ids, tokens, logprobs, ends.get(index), deltas
                )
            except Exception:
                logger.exception("request %d: its output cannot be turned into text", req_id)
                add_row(deltas, req_id, "", 0, (FinishReason.ERROR, None))
                ended = True
            if live.copies > 1:
                add_copies(deltas, row, live.copies)
            if ended:
                del self.live[req_id]
                if index not in ends:
                    abort_ids.append(req_id)
        for req_id, _, _ in step.rejected:
            live = self.live.get(req_id)
            if live is not None and live.completion.num_tokens:
                add_rest(deltas, req_id, live)
        return deltas, abort_ids

    def _started(self, step: StepOutput, deltas: Deltas) -> None:
        for req_id, num_cached, queue_us in step.started:
            live = self.live.get(req_id)
            if live is not None:
                ids = range(req_id, req_id + live.copies)
                deltas.started += [(copy, num_cached, queue_us) for copy in ids]
                if live.prompt is not None:
                    deltas.prompt_logprobs.append((req_id, live.prompt.first()))

    def _prompts(self, step: StepOutput, deltas: Deltas) -> list[int]:
        """Prompt tokens with their log-probabilities; returns the ids of requests that failed."""
        failed = []
        for columns in step.prompt_logprobs:
            req_id = columns.req_id
            live = self.live.get(req_id)
            if live is None or live.prompt is None:
                continue
            try:
                deltas.prompt_logprobs.append((req_id, live.prompt.take(columns)))
            except Exception:
                logger.exception("request %d: its prompt cannot be turned into text", req_id)
                row = len(deltas.req_ids)
                add_row(deltas, req_id, "", 0, (FinishReason.ERROR, None))
                add_copies(deltas, row, live.copies)
                del self.live[req_id]
                failed.append(req_id)
        return failed

    def rejected(self, step: StepOutput) -> list[RequestError]:
        """Terminal messages for the live requests that the engine refused, at once or on their way.

        After `process`, which releases what was held of their texts.
        """
        errors = []
        for req_id, code, message in step.rejected:
            live = self.live.pop(req_id, None)
            if live is not None:
                param = live.form_param if code == "invalid_schema" else ""
                errors.append(
                    RequestError(
                        req_id=req_id,
                        n=live.copies,
                        status=STATUS_OF_REJECTION.get(code, 500),
                        code=code,
                        message=f"{param}: {message}" if param else message,
                        param=param or None,
                    )
                )
        return errors

    def _advance(
        self,
        live: Live,
        req_id: int,
        token_ids: list[int],
        tokens: range,  # of token_ids: those of this request
        logprobs: dict[int, TokenLogprobs],  # by position in token_ids
        end: tuple[FinishReason, int | None] | None,
        deltas: Deltas,
    ) -> bool:
        """Add one request's row to `deltas`. Returns whether the request has ended."""
        completion = live.completion
        reason, stop_token = end or (None, None)
        stop_id = stop_token if stop_token in completion.params.stop_token_ids else None
        shows_stop_token = stop_id is not None and completion.params.include_stop_str_in_output
        num_before = completion.num_tokens
        text = ""
        for position in tokens:
            if reason is FinishReason.STOP and position == tokens[-1] and not shows_stop_token:
                completion.skip(logprobs[position].sampled if position in logprobs else 0.0)
                break
            entry = self._entry(completion, token_ids[position], logprobs.get(position))
            text += completion.push(token_ids[position], entry)
            if completion.stop_string is not None:
                break
        if reason is not None and completion.stop_string is None:
            text += completion.finish()
        finish: tuple[FinishReason, str | int | None] | None = None
        if completion.stop_string is not None:
            finish = (FinishReason.STOP, completion.stop_string)
        elif reason is not None:
            finish = (reason, stop_id)
        all_is_shown = finish is not None and completion.stop_string is None
        entries = completion.take_entries(everything=all_is_shown)
        count = completion.num_tokens - num_before
        if live.wants_token_ids and count:
            ids = array("i", token_ids[tokens.start : tokens.start + count])
            deltas.token_ids.append((len(deltas.req_ids), ids.tobytes()))
        if finish is not None and completion.params.logprobs is not None:
            deltas.logprob_sums.append((len(deltas.req_ids), completion.logprob_sum))
        add_row(deltas, req_id, text, count, finish, entries)
        return finish is not None

    def _entry(
        self, completion: CompletionText, token_id: int, logprobs: TokenLogprobs | None
    ) -> TokenLogprobText | None:
        if logprobs is None:
            return None
        skip_special_tokens = completion.params.skip_special_tokens
        return with_text(logprobs, token_id, self.vocabulary, skip_special_tokens)


def add_row(
    deltas: Deltas,
    req_id: int,
    text: str,
    count: int,
    finish: tuple[FinishReason, str | int | None] | None,
    entries: list[TokenLogprobText] | None = None,
) -> None:
    row = len(deltas.req_ids)
    deltas.req_ids.append(req_id)
    deltas.texts.append(text)
    deltas.counts.append(count)
    if finish is not None:
        deltas.finished.append((row, *finish))
    if entries:
        deltas.logprobs.append((row, entries))


def add_rest(deltas: Deltas, req_id: int, live: Live) -> None:
    """What was held of a text that a `RequestError` ends."""
    completion, row = live.completion, len(deltas.req_ids)
    text = completion.finish()
    if completion.params.logprobs is not None:
        deltas.logprob_sums.append((row, completion.logprob_sum))
    entries = completion.take_entries(everything=completion.stop_string is None)
    add_row(deltas, req_id, text, 0, None, entries)
    add_copies(deltas, row, live.copies)


def add_copies(deltas: Deltas, row: int, copies: int) -> None:
    """The choices after the one in the last row `row` get the same, under the ids that follow."""

    def repeat(column: list[tuple[Any, ...]]) -> None:
        if column and column[-1][0] == row:
            column += [(row + copy, *column[-1][1:]) for copy in range(1, copies)]

    deltas.req_ids += [deltas.req_ids[row] + copy for copy in range(1, copies)]
    deltas.texts += deltas.texts[row:] * (copies - 1)
    deltas.counts += deltas.counts[row:] * (copies - 1)
    for column in (deltas.finished, deltas.logprobs, deltas.token_ids, deltas.logprob_sums):
        repeat(cast(list[tuple[Any, ...]], column))
