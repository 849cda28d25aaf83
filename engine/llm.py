"""Offline use: the same engine in this process, driven step by step.

    from engine import LLM, SamplingParams

    llm = LLM(model="DIR")
    outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=32))
    print(outputs[0].outputs[0].text)

Below it is the whole engine in this process (engine/offline.py), with the functions that the server's
processes run; so both faces give the same text.
"""

import gc
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.api.messages import (
    ChatPrompt,
    Deltas,
    FinishReason,
    Generate,
    Prompt,
    RequestError,
    TokenLogprobText,
)
from engine.api.sampling import SamplingParams, StructuredOutput
from engine.held_signals import uninterrupted
from engine.llm_arguments import (
    PromptInput,
    as_list,
    as_prompt,
    check_conversations,
    make_config,
    params_for,
)
from engine.offline import OfflineEngine, trim_heap
from engine.progress_bar import ProgressBar
from tokenizer_proc.errors import PromptError
from tokenizer_proc.prepare import PreparedRequest


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # a stop or EOS token included
    finish_reason: str | None = None  # stop, length or error
    stop_reason: str | int | None = None  # the stop string or id that ended it
    logprobs: list[TokenLogprobText] | None = None  # by token, if asked for
    cumulative_logprob: float | None = None
    error: str | None = None  # why, if finish_reason is error


@dataclass
class Logprob:
    """One token in a place of the prompt."""

    logprob: float
    rank: int  # 1 = most likely
    decoded_token: str


@dataclass
class RequestOutput:
    """A prompt with its completions, in the order of the prompts given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    finished: bool = False
    # by prompt token, if asked for: its own and the best by id; None for the first, which has none
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class LLM:
    """A model ready to generate. Keyword arguments are the engine's flags with underscores, and the server's `chat_template`.

    Without `model` the small default model is prepared and used. Raises ConfigError (a ValueError with
    one helpful line) when the settings, the files or the memory do not work. Use it as a context
    manager, or call `shutdown`, to free the memory. Threads may share it: their calls run one after
    another, so one call with many prompts is faster.
    """

    def __init__(
        self,
        model: str | Path = "",
        *,
        tokenizer: str = "",
        chat_template: str = "",
        **settings: Any,
    ) -> None:
        config = make_config(str(model), tokenizer, settings)
        self.engine = OfflineEngine(config, chat_template, self._on_deltas, self._on_error)
        self.config = self.engine.config
        self.tokenizer = self.engine.tokenizer
        self.ids = itertools.count(1)
        self.live: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        self.num_generated = 0
        self.is_shut_down = False
        self.pid = os.getpid()
        self.turn = threading.RLock()  # one batch at a time; steps of two threads would mix

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free weights and KV cache. The object cannot be used afterwards.

        In a forked process it does nothing, as all that there is to end is its parent's.
        """
        if os.getpid() != self.pid:
            return
        with self.turn, uninterrupted():
            if self.is_shut_down:
                return
            self.live.clear()
            self.is_shut_down = True
            self.engine.shutdown()
            del self.engine
            gc.collect()
            trim_heap()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one prompt or many; results come in the order of the prompts.

        A prompt is a string, a list of token ids, or {"prompt": str} / {"prompt_token_ids": ids}.
        `sampling_params` is one for all, or one for each. Raises PromptError (a ValueError) for a
        prompt that cannot run, before any of them does.
        """
        self._check_process()
        asked = [as_prompt(p) for p in as_list(prompts)]
        with self.turn:
            return self._run(asked, sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of such lists)."""
        self._check_process()
        is_one = isinstance(messages, list) and messages and isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        check_conversations(conversations)
        if not isinstance(chat_template_kwargs, dict | None):
            raise ValueError(f"chat_template_kwargs is a dict, got {chat_template_kwargs!r:.80}")
        prompts: list[Prompt] = [
            ChatPrompt(
                messages=conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]
        with self.turn:
            return self._run(prompts, sampling_params, use_tqdm)

    def _check_process(self) -> None:
        """Before the lock is taken, which a thread of the parent may hold for ever in its copy."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this LLM belongs to process {self.pid}, and this is a forked one, {os.getpid()}: make "
                'the LLM in the new process, started with multiprocessing.get_context("spawn")'
            )

    def _check_alive(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("this LLM was shut down; make a new one")

    # --- one batch --------------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self._check_alive()
        params = params_for(prompts, sampling_params)
        requests = self._prepare_all(prompts, params)
        outputs = [output for output, _, _ in requests]
        with ProgressBar(len(outputs), use_tqdm) as bar:
            try:
                with uninterrupted():
                    self._check_alive()  # the handler of a signal may have shut it down,
                    self._abort_all()  # or broken off a call before it could do this
                    for request in requests:
                        self._submit(*request)
                self._drive(outputs, bar)
            finally:  # on Ctrl-C or a timeout: nothing of this batch may run on in the next one
                with uninterrupted():
                    self._abort_all()
        return outputs

    def _prepare_all(
        self, prompts: list[Prompt], params: list[SamplingParams]
    ) -> list[tuple[RequestOutput, Generate, PreparedRequest]]:
        """Raises PromptError, which says of which of many prompts it speaks."""
        requests = []
        for i, each in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self._prepare(*each))
            except PromptError as error:
                if len(prompts) == 1:
                    raise
                message = f"prompts[{i}]: {error.message}"
                raise PromptError(error.status, error.code, message, error.param) from None
        return requests

    def _prepare(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[RequestOutput, Generate, PreparedRequest]:
        req_id = next(self.ids)
        for _ in range(params.n - 1):
            next(self.ids)
        generate = Generate(
            req_id=req_id,
            prompt=prompt,
            params=params,
            arrival_ns=time.monotonic_ns(),
            want_prompt_text=True,
            want_token_ids=True,
        )
        prepared = self.engine.pipeline.prepare(generate)
        completions = [
            CompletionOutput(
                index=i,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            for i in range(params.n)
        ]
        ids = prepared.token_ids.tolist()
        output = RequestOutput(str(req_id), prepared.prompt_text, ids, completions)
        output.prompt_logprobs = None if params.prompt_logprobs is None else []
        return output, generate, prepared

    def _submit(self, output: RequestOutput, generate: Generate, prepared: PreparedRequest) -> None:
        for req_id, completion in enumerate(output.outputs, generate.req_id):
            self.live[req_id] = (output, completion)
        self.engine.submit(generate, prepared)

    def _drive(self, outputs: list[RequestOutput], bar: ProgressBar) -> None:
        started, generated = time.monotonic(), self.num_generated
        while self.live:
            with uninterrupted():
                self.engine.step()
                seconds = time.monotonic() - started
                rate = (self.num_generated - generated) / seconds if seconds else 0.0
                bar.show(sum(o.finished for o in outputs), f"{rate:.1f} generated tok/s")
        if not all(output.finished for output in outputs):
            self._check_alive()
        while (
            not self.is_shut_down and self.engine.has_work()
        ):  # a row that an overlapped step wasted
            with uninterrupted():
                self.engine.step()

    def _abort_all(self) -> None:
        if self.live:
            ids = list(self.live)
            self.live.clear()
            self.engine.abort(ids)
            while self.engine.has_work():
                self.engine.step()

    def _on_deltas(self, deltas: Deltas) -> None:
        for req_id, cached, _ in deltas.started:
            output = self.live[req_id][0]
            output.num_cached_tokens = max(output.num_cached_tokens, cached)
        for req_id, entries in deltas.prompt_logprobs:
            prompt_logprobs = self.live[req_id][0].prompt_logprobs
            assert prompt_logprobs is not None
            prompt_logprobs += [by_token(entry) for entry in entries]
        for req_id, text in zip(deltas.req_ids, deltas.texts, strict=True):
            self.live[req_id][1].text += text
        for row, ids in deltas.token_ids:
            self.live[deltas.req_ids[row]][1].token_ids += np.frombuffer(ids, np.int32).tolist()
        self.num_generated += sum(deltas.counts)
        for row, entries in deltas.logprobs:
            completion = self.live[deltas.req_ids[row]][1]
            assert completion.logprobs is not None
            completion.logprobs += entries
        for row, logprob_sum in deltas.logprob_sums:
            self.live[deltas.req_ids[row]][1].cumulative_logprob = logprob_sum
        for row, reason, stop_reason in deltas.finished:
            output, completion = self.live.pop(deltas.req_ids[row])
            completion.finish_reason = reason.name.lower()
            completion.stop_reason = stop_reason
            if reason is FinishReason.ERROR:
                completion.error = "an internal error in the engine; the log says more"
            output.finished = all(c.finish_reason for c in output.outputs)

    def _on_error(self, error: RequestError) -> None:
        for req_id in range(error.req_id, error.req_id + error.n):
            output, completion = self.live.pop(req_id)
            completion.finish_reason = "error"
            completion.error = error.message
            output.finished = all(c.finish_reason for c in output.outputs)


def by_token(entry: TokenLogprobText) -> dict[int, Logprob] | None:
    if entry.rank == 0:  # the first token of a prompt
        return None
    ranked = entry.ranked(len(entry.top))
    return {e.token_id: Logprob(e.logprob, rank, e.token) for rank, e in ranked}


__all__ = [
    "LLM",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
]
