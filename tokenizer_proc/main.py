"""The tokenizer process: sockets and threads around `prepare` and `OutputProcessor`.

        ingress (PULL) ──► Generate ──► thread pool: render, encode, name blocks ──┐
                           Abort ─────► forget, tell the engine                    │ results, eventfd
        replies (PUSH) ◄── Accepted, RequestError ◄────────────────────────────────┤
        submit  (PUSH) ◄── AddRequest ◄────────────────────────────────────────────┘
        tokens  (PULL) ──► StepOutput ──► text ──► one Deltas to replies, AbortRequests to submit

One thread owns sockets and tables. A request is in exactly one table: in `encoding` while a thread
works on its prompt, in `output.live` while the engine has it. Its terminal message or its abort removes
it, and whatever arrives for it later is dropped.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from engine.api.messages import (
    Abort,
    AbortReason,
    AbortRequests,
    Accepted,
    CallError,
    Control,
    Detokenize,
    DetokenizeResult,
    EngineHello,
    EngineLimits,
    Generate,
    Ingress,
    Inspect,
    Message,
    RequestError,
    Sockets,
    StepOutput,
    Tokenize,
    TokenizeResult,
    TokenizerReady,
    TokenPrompt,
    Tokens,
    decoder,
    encoder,
)
from tokenizer_proc.bound import token_bound
from tokenizer_proc.constraints import Constraints
from tokenizer_proc.encode import Encoder, check_token_ids, prompt_param
from tokenizer_proc.errors import PromptError
from tokenizer_proc.loading import Tokenizer, check_fits_model
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.prepare import PreparedRequest, prepare
from tokenizer_proc.prompt_tokens import token_texts
from tokenizer_proc.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

T = TypeVar("T")

ENCODING_THREADS = 2
MESSAGES_PER_TURN = 64  # of ingress, before the engine's output gets its turn again


class TokenizerLoop:
    """Binds `ingress` and `tokens`, connects `submit` and `replies`; `run` serves until `stop`."""

    def __init__(
        self, tokenizer: Tokenizer, sockets: Sockets, epoch: int = 0, default_seed: int = 0
    ) -> None:
        self.tokenizer = tokenizer
        self.epoch = epoch
        self.default_seed = default_seed
        self.vocabulary = Vocabulary(tokenizer)
        self.prompts = Encoder(tokenizer, token_bound(self.vocabulary))
        self.output = OutputProcessor(self.vocabulary)
        self.encoding: set[int] = set()  # ids of requests and calls that wait for a thread
        self.limits: EngineLimits | None = None  # known once the engine said hello
        self.constraints: Constraints | None = None  # from then on, too
        self.engine_has_pieces = False
        self.stopping = False

        self.context = zmq.Context()
        self.ingress = self._socket(zmq.PULL, sockets.ingress)
        self.tokens = self._socket(zmq.PULL, sockets.tokens)
        self.submit = self._socket(zmq.PUSH, sockets.submit)
        self.replies = self._socket(zmq.PUSH, sockets.replies)
        self.encoder = encoder()
        self.ingress_decoder = decoder(Ingress)
        self.tokens_decoder = decoder(Tokens)

        self.pool = ThreadPoolExecutor(ENCODING_THREADS, thread_name_prefix="encode")
        self.grammar_pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")  # these may be slow
        self.results: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Never closed, as a thread may still write to it after the end of `run`.
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(0)  # never block: depth is bounded by the number of live requests
        socket.linger = 0
        if kind == zmq.PULL:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket

    def stop(self) -> None:
        """End `run` soon. May be called from any thread and from a signal handler."""
        self.stopping = True
        os.eventfd_write(self.wake_fd, 1)

    def run(self) -> None:
        """Serve until `stop`. Raises TokenizerLoadError if tokenizer and model do not fit."""
        poller = zmq.Poller()
        poller.register(self.tokens, zmq.POLLIN)
        poller.register(self.wake_fd, zmq.POLLIN)
        try:
            while not self.stopping:
                if self.limits is not None and self.ingress not in poller:
                    poller.register(self.ingress, zmq.POLLIN)  # until now requests waited in it
                ready = dict(poller.poll())
                if self.tokens in ready:
                    self._drain(self.tokens, self.tokens_decoder, self._on_engine_message)
                if self.wake_fd in ready:
                    os.eventfd_read(self.wake_fd)
                    self._finish_jobs()
                if self.ingress in ready:
                    self._drain(self.ingress, self.ingress_decoder, self._on_server_message)
        finally:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.grammar_pool.shutdown(wait=False, cancel_futures=True)
            self.prompts.chat.close()
            if self.constraints is not None:
                self.constraints.checker.close()
            self.context.destroy(linger=0)

    def _drain(
        self, socket: zmq.Socket[bytes], decoder: Any, handle: Callable[[Any], None]
    ) -> None:
        for _ in range(MESSAGES_PER_TURN):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decoder.decode(data)
            except msgspec.DecodeError:
                logger.exception("dropped a message that is not of this protocol")
                continue
            handle(message)

    def _send(self, socket: zmq.Socket[bytes], message: Message) -> None:
        socket.send(self.encoder.encode(message))

    # --- from the engine --------------------------------------------------------------------------

    def _on_engine_message(self, message: EngineHello | StepOutput) -> None:
        if message.epoch != self.epoch:
            logger.debug("dropped %s of epoch %d", type(message).__name__, message.epoch)
        elif isinstance(message, StepOutput):
            self._on_step(message)
        elif self.limits is None:
            check_fits_model(self.tokenizer, message.limits.vocab_size)
            self.vocabulary.pad_to(message.limits.vocab_size)
            self.limits = message.limits
            self.constraints = Constraints(self.vocabulary, message.limits)
            self._send(
                self.replies,
                TokenizerReady(
                    limits=message.limits,
                    has_chat_template=self.prompts.has_chat_template,
                    chat_template=self.prompts.chat.template_text,
                ),
            )

    def _on_step(self, step: StepOutput) -> None:
        deltas, abort_ids = self.output.process(step)
        if deltas.req_ids or deltas.started or deltas.prompt_logprobs:
            self._send(self.replies, deltas)
        if abort_ids:
            self._send(
                self.submit, AbortRequests(req_ids=abort_ids, reason=AbortReason.STOP_STRING)
            )
        for error in self.output.rejected(step):
            self._send(self.replies, error)

    # --- from the server --------------------------------------------------------------------------

    def _on_server_message(
        self, message: Generate | Abort | Tokenize | Detokenize | Control | Inspect
    ) -> None:
        assert self.limits is not None
        limits = self.limits
        if isinstance(message, Generate):
            self._start(
                choice_ids(message),
                lambda: self._prepare(message, limits),
                lambda result: self._on_prepared(message, result),
                self.grammar_pool if self._may_be_slow(message) else self.pool,
            )
        elif isinstance(message, Abort):
            self._on_abort(message.req_ids)
        elif isinstance(message, Control | Inspect):
            self._send(self.submit, message)  # it is for the engine
        elif isinstance(message, Tokenize):
            self._start(
                range(message.call_id, message.call_id + 1),
                lambda: self._tokenize(message, limits),
                lambda result: self._reply_to_call(message.call_id, result),
            )
        else:
            self._start(
                range(message.call_id, message.call_id + 1),
                lambda: self._detokenize(message, limits),
                lambda result: self._reply_to_call(message.call_id, result),
            )

    def _may_be_slow(self, message: Generate) -> bool:
        assert self.constraints is not None
        forms = (message.params.structured, message.structured_after_mark)
        return any(form is not None and not self.constraints.is_known(form) for form in forms)

    def _on_abort(self, req_ids: list[int]) -> None:
        """No terminal message: the server forgot the requests before it asked."""
        self.encoding.difference_update(req_ids)
        live = self.output.forget(req_ids)
        if live:
            self._send(self.submit, AbortRequests(req_ids=live, reason=AbortReason.CLIENT))

    def _on_prepared(self, generate: Generate, result: PreparedRequest | PromptError) -> None:
        """Submit the choices that were not aborted while the prompt was being encoded."""
        wanted = self.encoding.intersection(choice_ids(generate))
        self.encoding -= wanted
        if not wanted:
            return
        if isinstance(result, PromptError):
            self._send(
                self.replies,
                RequestError(
                    req_id=generate.req_id,
                    n=generate.params.n,
                    status=result.status,
                    code=result.code,
                    message=result.message,
                    param=result.param,
                ),
            )
            return
        self._send(
            self.replies,
            Accepted(
                req_id=generate.req_id,
                num_prompt_tokens=result.num_prompt_tokens,
                prompt_text=result.prompt_text,
                prompt_token_ids=result.token_ids.tobytes() if generate.want_token_ids else None,
                prompt_end=result.prompt_end,
            ),
        )
        for request in result.requests:
            if request.req_id in wanted:
                self.output.add(
                    request,
                    result.copies,
                    generate.want_token_ids,
                    result.token_texts,
                    generate.shown_special,
                )
                if request.params.structured is not None and not self.engine_has_pieces:
                    assert self.constraints is not None
                    self._send(self.submit, self.constraints.pieces)
                    self.engine_has_pieces = True
                self._send(self.submit, request)

    # --- work for the threads ---------------------------------------------------------------------

    def _prepare(self, generate: Generate, limits: EngineLimits) -> PreparedRequest:
        """`prepare`; for an echo with log-probabilities the text is that of the tokens.

        It is another one than was sent only if the tokenizer normalizes what it reads.
        """
        result = prepare(self.prompts, generate, limits, self.default_seed, self.constraints)
        if generate.want_prompt_text and generate.params.prompt_logprobs is not None:
            texts = token_texts(self.vocabulary, result.token_ids, result.added)
            result = replace(result, prompt_text="".join(texts), token_texts=texts)
        return result

    def _tokenize(self, call: Tokenize, limits: EngineLimits) -> TokenizeResult:
        prompt = self.prompts.encode(call.prompt)
        is_text = not isinstance(call.prompt, TokenPrompt)
        check_token_ids(prompt.token_ids, limits.vocab_size, prompt_param(call.prompt), is_text)
        names = None
        if call.return_token_strs:
            names = [self.vocabulary.name(token_id) for token_id in prompt.token_ids.tolist()]
        return TokenizeResult(
            call_id=call.call_id,
            token_ids=prompt.token_ids.tobytes(),
            max_model_len=limits.max_model_len,
            token_strs=names,
        )

    def _detokenize(self, call: Detokenize, limits: EngineLimits) -> DetokenizeResult:
        token_ids = np.frombuffer(call.token_ids, dtype="<i4")
        check_token_ids(token_ids, limits.vocab_size, "tokens")
        return DetokenizeResult(call_id=call.call_id, text=self.prompts.decode(token_ids.tolist()))

    def _reply_to_call(
        self, call_id: int, result: TokenizeResult | DetokenizeResult | PromptError
    ) -> None:
        if call_id not in self.encoding:
            return
        self.encoding.remove(call_id)
        if isinstance(result, PromptError):
            error = result
            self._send(
                self.replies,
                CallError(
                    call_id=call_id,
                    status=error.status,
                    code=error.code,
                    message=error.message,
                    param=error.param,
                ),
            )
        else:
            self._send(self.replies, result)

    def _start(
        self,
        ids: range,
        work: Callable[[], T],
        done: Callable[[T | PromptError], None],
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        """Run `work` in the pool of threads, then `done` with its result in the loop's thread.

        Neither runs if all of `ids`, which are put into `encoding`, are aborted before a thread is
        free.
        """
        self.encoding.update(ids)

        def job() -> None:
            if self.encoding.isdisjoint(ids):
                return
            result: T | PromptError
            try:
                result = work()
            except PromptError as error:
                result = error
            except BaseException:  # a panic of the Rust tokenizer is no Exception
                logger.exception("a prompt could not be processed")
                result = PromptError(500, "internal_error", "the prompt could not be processed")
            self.results.put(lambda: done(result))
            os.eventfd_write(self.wake_fd, 1)

        (pool or self.pool).submit(job)

    def _finish_jobs(self) -> None:
        while True:
            try:
                finish = self.results.get_nowait()
            except Empty:
                return
            finish()


def choice_ids(generate: Generate) -> range:
    return range(generate.req_id, generate.req_id + generate.params.n)
