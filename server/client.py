"""EngineClient: requests on their way through the other processes.

It owns a request until its own terminal event: the last `Deltas`, a `RequestError`, or an
`abort` from here. Messages that arrive after that are dropped and counted.
"""

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from engine.api.inspection import AnyReport
from engine.api.messages import (
    Abort,
    Accepted,
    CallError,
    Control,
    ControlAction,
    ControlResult,
    Deltas,
    Detokenize,
    DetokenizeResult,
    EngineFailed,
    EngineState,
    EngineStats,
    FinishReason,
    Generate,
    Inspect,
    Inspection,
    Prompt,
    RequestError,
    Subject,
    Tokenize,
    TokenizeResult,
    TokenizerReady,
)
from engine.api.sampling import SamplingParams, StructuredOutput
from server.errors import RETRY_QUEUE_S, ApiError
from server.health import EngineStatus
from server.link import Link
from server.metrics import Metrics
from server.stream import FINISH_NAMES, Choice, RequestStream, Turn


class GenerateOptions(msgspec.Struct, frozen=True):
    """What a generation needs beside its prompts."""

    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    want_prompt_text: bool = False
    clamp_max_tokens: bool = False
    is_batch: bool = False  # the field `prompt` is a list of prompts, so errors name the entry
    incremental: bool = False  # wake the handler for every delta, rather than once at the end
    shown_special: list[str] = []
    reasoning_mark: str = ""
    structured_after_mark: StructuredOutput | None = None
    want_token_ids: bool = False


class EngineClient:
    """Sends requests to the other processes and hands what comes back to their streams."""

    def __init__(self, link: Link, status: EngineStatus, metrics: Metrics) -> None:
        self.status = status
        self.metrics = metrics
        self._link = link
        self._choices: dict[int, Choice] = {}  # live ones, by request id
        self._turn = Turn()
        self._num_queued = 0  # live choices that the engine has not started
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1
        self._handlers: dict[type, Callable[[Any], None]] = {
            # from tokenizer_proc
            Deltas: self._on_deltas,
            Accepted: self._on_accepted,
            RequestError: self._on_request_error,
            TokenizerReady: self._on_tokenizer_ready,
            TokenizeResult: self._on_call_result,
            DetokenizeResult: self._on_call_result,
            CallError: self._on_call_error,
            # from the engine
            EngineState: self.status.on_state,
            EngineStats: self._on_stats,
            EngineFailed: self._on_failed,
            ControlResult: self._on_control_result,
            Inspection: self._on_call_result,
        }

    def start(self) -> None:
        """Listen to the other processes, which start after this."""
        self._link.start(self._on_reply, self._on_state)

    def close(self) -> None:
        self._link.close()

    # --- requests ---------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Completions that have not ended."""
        return len(self._choices)

    @property
    def num_queued(self) -> int:
        """Completions that the engine has not started."""
        return self._num_queued

    @property
    def num_startable(self) -> int:
        """How many queued completions the engine can start in its next step, as far as is known.

        0 while the engine has any waiting: then something else than --max-num-seqs is in the way.
        """
        limits, stats = self.status.limits, self.status.stats
        if limits is None or (stats is not None and stats.num_waiting):
            return 0
        return max(0, limits.max_num_seqs - (self.num_live - self._num_queued))

    def generate(
        self, prompts: list[Prompt], options: GenerateOptions, arrival_ns: int
    ) -> RequestStream:
        """Send one `Generate` for each prompt. The caller must `abort` the stream in a `finally`."""
        n = options.params.n
        stream = RequestStream(
            self._turn,
            len(prompts),
            arrival_ns,
            options.incremental,
            options.is_batch,
            options.params.prompt_logprobs is not None,
        )
        self.status.set_has_work(True)
        try:
            for prompt_index, prompt in enumerate(prompts):
                req_id = self._reserve_ids(n)
                for choice_id in range(req_id, req_id + n):
                    self._choices[choice_id] = stream.add_choice(choice_id, prompt_index)
                self._num_queued += n
                self._link.send(
                    Generate(
                        req_id=req_id,
                        prompt=prompt,
                        params=options.params,
                        arrival_ns=arrival_ns,
                        priority=options.priority,
                        cache_salt=options.cache_salt,
                        want_prompt_text=options.want_prompt_text,
                        clamp_max_tokens=options.clamp_max_tokens,
                        shown_special=options.shown_special,
                        reasoning_mark=options.reasoning_mark,
                        structured_after_mark=options.structured_after_mark,
                        want_token_ids=options.want_token_ids,
                    )
                )
        except BaseException:  # what cannot be sent must not stay in the table
            self.abort(stream)
            raise
        return stream

    def abort(self, stream: RequestStream) -> None:
        """End what still runs of a stream, e.g. because its client has gone. Idempotent."""
        stream.close()
        aborted = [c for c in stream.choices if self._remove(c.req_id) is not None]
        if aborted:
            self._link.send(Abort(req_ids=[c.req_id for c in aborted]))
        for choice in aborted:
            self.metrics.request_aborted(choice, failed=stream.error is not None)

    def fail_all(self, error: ApiError) -> None:
        """End every live request and call with `error` (their handlers then abort them)."""
        for stream in {id(c.stream): c.stream for c in self._choices.values()}.values():
            stream.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def tokenize(self, prompt: Prompt, return_token_strs: bool) -> TokenizeResult:
        """Raises ApiError, e.g. when the chat template refuses the messages."""
        call_id = self._reserve_ids(1)
        return await self._call(
            call_id,
            Tokenize(call_id=call_id, prompt=prompt, return_token_strs=return_token_strs),
        )

    async def detokenize(self, token_ids: "array[int]") -> DetokenizeResult:
        """Raises ApiError, e.g. for ids outside the vocabulary."""
        call_id = self._reserve_ids(1)
        return await self._call(call_id, Detokenize(call_id=call_id, token_ids=token_ids.tobytes()))

    async def control(self, action: ControlAction) -> str:
        """Have the engine do something between two steps; what it says of it. Raises ApiError."""
        call_id = self._reserve_ids(1)
        result: ControlResult = await self._call(call_id, Control(call_id=call_id, action=action))
        return result.message

    async def inspect(self, subject: Subject, last: int, req_ids: list[int]) -> AnyReport:
        """What the engine says of itself between two steps, however long that takes."""
        call_id = self._reserve_ids(1)
        question = Inspect(call_id=call_id, subject=subject, last=last, req_ids=req_ids)
        answer: Inspection = await self._call(call_id, question)
        return answer.report

    async def _call(self, call_id: int, message: Tokenize | Detokenize | Control | Inspect) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._update_has_work()
        try:
            self._link.send(message)
            return await future
        except asyncio.CancelledError:  # the client has gone
            self._link.send(Abort(req_ids=[call_id]))
            raise
        finally:
            del self._calls[call_id]
            self._update_has_work()

    def _reserve_ids(self, n: int) -> int:
        first = self._next_id
        self._next_id += n
        return first

    def _remove(self, req_id: int) -> Choice | None:
        choice = self._choices.pop(req_id, None)
        if choice is not None:
            if not choice.started_ns:
                self._num_queued -= 1
            self._update_has_work()
        return choice

    def _update_has_work(self) -> None:
        self.status.set_has_work(bool(self._choices or self._calls))

    # --- messages -----------------------------------------------------------------------------------

    def _on_reply(self, message: Any) -> None:
        self.status.on_reply()
        self._handlers[type(message)](message)

    def _on_state(self, message: Any) -> None:
        self._handlers[type(message)](message)

    def _on_stats(self, stats: EngineStats) -> None:
        self.metrics.engine_stats(self.status.stats, stats)
        self.status.on_stats(stats)

    def _on_failed(self, failure: EngineFailed) -> None:
        self.status.failure = failure

    def _on_deltas(self, deltas: Deltas) -> None:
        now = time.monotonic_ns()
        choices = self._choices
        for req_id, num_cached, queue_us in deltas.started:
            choice = choices.get(req_id)
            if choice is None:
                self.metrics.late_messages += 1
            elif not choice.started_ns:
                self._on_started(choice, num_cached, queue_us, now)
        for req_id, prompt_entries in deltas.prompt_logprobs:
            choice = choices.get(req_id)
            if choice is not None:
                choice.stream.add_prompt_logprobs(choice.prompt_index, prompt_entries)
        for index, ids in deltas.token_ids:
            choice = choices.get(deltas.req_ids[index])
            if choice is not None:
                choice.token_ids += ids
        for req_id, text, count in zip(deltas.req_ids, deltas.texts, deltas.counts, strict=True):
            choice = choices.get(req_id)
            if choice is None:
                self.metrics.late_messages += 1
                continue
            if count:
                self.metrics.tokens_arrived(choice, count, now)
            if text:
                choice.add_text(text)
        for index, entries in deltas.logprobs:
            choice = choices.get(deltas.req_ids[index])
            if choice is not None:
                choice.logprobs.extend(entries)
        for index, logprob_sum in deltas.logprob_sums:
            choice = choices.get(deltas.req_ids[index])
            if choice is not None:
                choice.logprob_sum = logprob_sum
        for index, reason, stop_reason in deltas.finished:
            choice = self._remove(deltas.req_ids[index])
            if choice is not None:
                self._on_finished(choice, reason, stop_reason, now)

    def _on_started(self, choice: Choice, num_cached: int, queue_us: int, now: int) -> None:
        stream = choice.stream
        # this message may come with the first token, at the end of the step in which it started
        choice.started_ns = min(now, stream.arrival_ns + queue_us * 1000)
        choice.queue_us = queue_us
        self._num_queued -= 1
        if choice.index % (len(stream.choices) // stream.num_prompts) == 0:
            # The first choice computes the prompt that the others share.
            stream.num_cached_tokens[choice.prompt_index] = num_cached
        self.metrics.request_started(queue_us)
        stream.mark(choice)

    def _on_finished(
        self, choice: Choice, reason: FinishReason, stop_reason: str | int | None, now: int
    ) -> None:
        if reason in FINISH_NAMES:
            self.metrics.request_finished(choice, FINISH_NAMES[reason], now)
            choice.stream.finish(choice, FINISH_NAMES[reason], stop_reason)
            return
        self.metrics.request_aborted(choice, failed=reason is FinishReason.ERROR)
        what = "met an internal error" if reason is FinishReason.ERROR else "was ended early"
        choice.stream.fail(ApiError(500, "internal_error", f"This request {what} in the engine."))

    def _on_accepted(self, accepted: Accepted) -> None:
        choice = self._choices.get(accepted.req_id)
        if choice is None:
            self.metrics.late_messages += 1
            return
        choice.stream.accept(
            choice.prompt_index,
            accepted.num_prompt_tokens,
            accepted.prompt_text,
            accepted.prompt_end,
            accepted.prompt_token_ids,
        )

    def _on_request_error(self, error: RequestError) -> None:
        choices = [self._remove(req_id) for req_id in range(error.req_id, error.req_id + error.n)]
        live = [choice for choice in choices if choice is not None]
        if not live:
            self.metrics.late_messages += 1
            return
        stream = live[0].stream
        param, message = error.param, error.message
        if stream.is_batch and param is not None and param.startswith("prompt"):
            where = f"prompt[{live[0].prompt_index}]"
            param = where + param.removeprefix("prompt")
            if message.startswith("prompt["):
                message = where + message.removeprefix("prompt")
        retry_after = RETRY_QUEUE_S if error.status in (429, 503) else None
        stream.fail(ApiError(error.status, error.code, message, param, retry_after=retry_after))
        for choice in live:
            if choice.started_ns:
                self.metrics.request_aborted(choice, failed=True)
            else:
                self.metrics.request_rejected(error.status)

    def _on_tokenizer_ready(self, ready: TokenizerReady) -> None:
        self.status.limits = ready.limits
        self.status.chat_template = ready.chat_template
        self.status.changed_at = time.time()

    def _on_control_result(self, result: ControlResult) -> None:
        if result.is_done:
            self._on_call_result(result)
            return
        future = self._calls.get(result.call_id)
        if future is not None and not future.done():
            future.set_exception(ApiError(400, "invalid_value", result.message))

    def _on_call_result(
        self, result: TokenizeResult | DetokenizeResult | ControlResult | Inspection
    ) -> None:
        future = self._calls.get(result.call_id)
        if future is not None and not future.done():
            future.set_result(result)

    def _on_call_error(self, error: CallError) -> None:
        future = self._calls.get(error.call_id)
        if future is not None and not future.done():
            future.set_exception(ApiError(error.status, error.code, error.message, error.param))
