"""The tokenizer process: sockets and threads around a `TextPipeline`.

        ingress (PULL) ──► Generate ──► thread pool: render, encode, name blocks ──┐
                           Abort ─────► forget, tell the engine                    │ results, eventfd
        replies (PUSH) ◄── Accepted, RequestError ◄────────────────────────────────┤
        submit  (PUSH) ◄── AddRequest ◄────────────────────────────────────────────┘
        tokens  (PULL) ──► StepOutput ──► text ──► one Deltas to replies, AbortRequests to submit

One thread owns sockets and tables. A request is in exactly one table: in `encoding` while a thread
works on its prompt, in `pipeline.output.live` while the engine has it. Its terminal message or its abort removes
it, and whatever arrives for it later is dropped.
"""

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec
import numpy as np
import zmq

from engine.api.messages import (
    Abort,
    AbortReason,
    AbortRequests,
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
from tokenizer_proc.encode import Encoder, check_token_ids, prompt_param
from tokenizer_proc.errors import PromptError
from tokenizer_proc.loading import Tokenizer, check_fits_model
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.pipeline import TextPipeline, accepted, choice_ids, refused
from tokenizer_proc.prepare import PreparedRequest
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
        self.encoder = Encoder(tokenizer, token_bound(self.vocabulary))
        self.encoding: set[int] = set()  # ids of requests and calls that wait for a thread
        self.pipeline: TextPipeline | None = None  # once the engine said hello
        self.stopping = False

        self.context = zmq.Context()
        self.ingress = self._socket(zmq.PULL, sockets.ingress)
        self.tokens = self._socket(zmq.PULL, sockets.tokens)
        self.submit = self._socket(zmq.PUSH, sockets.submit)
        self.replies = self._socket(zmq.PUSH, sockets.replies)
        self.message_encoder = encoder()
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
                if self.pipeline is not None and self.ingress not in poller:
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
            if self.pipeline is not None:
                self.pipeline.close()
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
        socket.send(self.message_encoder.encode(message))

    # --- from the engine --------------------------------------------------------------------------

    def _on_engine_message(self, message: EngineHello | StepOutput) -> None:
        if message.epoch != self.epoch:
            logger.debug("dropped %s of epoch %d", type(message).__name__, message.epoch)
        elif isinstance(message, EngineHello):
            self._on_hello(message.limits)
        elif self.pipeline is not None:
            self._on_step(message, self.pipeline.output)

    def _on_hello(self, limits: EngineLimits) -> None:
        if self.pipeline is not None:
            return
        check_fits_model(self.tokenizer, limits.vocab_size)
        self.pipeline = TextPipeline(self.encoder, self.vocabulary, limits, self.default_seed)
        chat_template = self.encoder.chat.template_text
        self._send(self.replies, TokenizerReady(limits=limits, chat_template=chat_template))

    def _on_step(self, step: StepOutput, output: OutputProcessor) -> None:
        deltas, abort_ids = output.process(step)
        if deltas.req_ids or deltas.started or deltas.prompt_logprobs:
            self._send(self.replies, deltas)
        if abort_ids:
            self._send(
                self.submit, AbortRequests(req_ids=abort_ids, reason=AbortReason.STOP_STRING)
            )
        for error in output.rejected(step):
            self._send(self.replies, error)

    # --- from the server --------------------------------------------------------------------------

    def _on_server_message(
        self, message: Generate | Abort | Tokenize | Detokenize | Control | Inspect
    ) -> None:
        assert self.pipeline is not None
        pipeline = self.pipeline
        if isinstance(message, Generate):
            self._start(
                choice_ids(message),
                lambda: pipeline.prepare(message),
                lambda result: self._on_prepared(message, result),
                self.grammar_pool if pipeline.may_be_slow(message) else self.pool,
            )
        elif isinstance(message, Abort):
            self._on_abort(message.req_ids)
        elif isinstance(message, Control | Inspect):
            self._send(self.submit, message)  # it is for the engine
        elif isinstance(message, Tokenize):
            self._start_call(message.call_id, lambda: tokenize(pipeline, message))
        else:
            self._start_call(message.call_id, lambda: detokenize(pipeline, message))

    def _on_abort(self, req_ids: list[int]) -> None:
        """No terminal message: the server forgot the requests before it asked."""
        assert self.pipeline is not None
        self.encoding.difference_update(req_ids)
        live = self.pipeline.output.forget(req_ids)
        if live:
            self._send(self.submit, AbortRequests(req_ids=live, reason=AbortReason.CLIENT))

    def _on_prepared(self, generate: Generate, result: PreparedRequest | PromptError) -> None:
        """Submit the choices that were not aborted while the prompt was being encoded."""
        wanted = self.encoding.intersection(choice_ids(generate))
        self.encoding -= wanted
        if not wanted:
            return
        if isinstance(result, PromptError):
            self._send(self.replies, refused(generate, result))
            return
        assert self.pipeline is not None
        self._send(self.replies, accepted(generate, result))
        for message in self.pipeline.submit(generate, result, wanted):
            self._send(self.submit, message)

    # --- work for the threads ---------------------------------------------------------------------

    def _start_call(
        self, call_id: int, work: Callable[[], TokenizeResult | DetokenizeResult]
    ) -> None:
        self._start(
            range(call_id, call_id + 1),
            work,
            lambda result: self._reply_to_call(call_id, result),
            self.pool,
        )

    def _reply_to_call(
        self, call_id: int, result: TokenizeResult | DetokenizeResult | PromptError
    ) -> None:
        if call_id not in self.encoding:
            return
        self.encoding.remove(call_id)
        if isinstance(result, PromptError):
            self._send(
                self.replies,
                CallError(
                    call_id=call_id,
                    status=result.status,
                    code=result.code,
                    message=result.message,
                    param=result.param,
                ),
            )
        else:
            self._send(self.replies, result)

    def _start(
        self,
        ids: range,
        work: Callable[[], T],
        done: Callable[[T | PromptError], None],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Run `work` in a thread of the pool, then `done` with its result in the loop's thread.

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

        pool.submit(job)

    def _finish_jobs(self) -> None:
        while True:
            try:
                finish = self.results.get_nowait()
            except Empty:
                return
            finish()


def tokenize(pipeline: TextPipeline, call: Tokenize) -> TokenizeResult:
    """Raises PromptError."""
    prompt, limits = pipeline.encoder.encode(call.prompt), pipeline.limits
    is_text = not isinstance(call.prompt, TokenPrompt)
    check_token_ids(prompt.token_ids, limits.vocab_size, prompt_param(call.prompt), is_text)
    names = None
    if call.return_token_strs:
        names = [pipeline.vocabulary.name(token_id) for token_id in prompt.token_ids.tolist()]
    return TokenizeResult(
        call_id=call.call_id,
        token_ids=prompt.token_ids.tobytes(),
        max_model_len=limits.max_model_len,
        token_strs=names,
    )


def detokenize(pipeline: TextPipeline, call: Detokenize) -> DetokenizeResult:
    """Raises PromptError."""
    token_ids = np.frombuffer(call.token_ids, dtype="<i4")
    check_token_ids(token_ids, pipeline.limits.vocab_size, "tokens")
    return DetokenizeResult(call_id=call.call_id, text=pipeline.encoder.decode(token_ids.tolist()))
