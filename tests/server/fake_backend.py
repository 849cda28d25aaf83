"""tokenizer_proc and engine in one thread, over the real sockets, answering from a script.

A test says what each request gets; the server under test cannot tell the difference:

    backend.script = lambda g: Script(pieces=["Hel", "lo"])     # g: the Generate message
    ...
    assert backend.aborted == {3}
"""

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from engine.api.inspection import AnyReport
from engine.api.messages import (
    Abort,
    Accepted,
    CallError,
    Control,
    ControlResult,
    Deltas,
    Detokenize,
    DetokenizeResult,
    EngineFailed,
    EngineLimits,
    EngineState,
    EngineStats,
    FinishReason,
    Generate,
    Ingress,
    Inspect,
    Inspection,
    LogprobEntry,
    Phase,
    RequestError,
    Sockets,
    Subject,
    TextPrompt,
    Tokenize,
    TokenizeResult,
    TokenizerReady,
    TokenLogprobText,
    TokenPrompt,
    decoder,
    encoder,
)

LIMITS = EngineLimits(
    block_size=16,
    num_blocks=100,
    max_model_len=512,
    max_num_seqs=8,
    vocab_size=1000,
    enable_prefix_caching=True,
    eos_token_ids=[2],
    dtype="float32",
    device="cpu",
)


@dataclass
class Script:
    """What happens to one prompt. Each of its n choices gets the same pieces."""

    pieces: list[str] = field(default_factory=lambda: ["Hello", " world", "!"])
    finish: FinishReason = FinishReason.STOP
    stop_reason: str | int | None = None
    prompt_tokens: int = 5
    cached_tokens: int = 0
    prompt_text: str = "the prompt"
    error: RequestError | None = None  # instead of an answer
    error_after: int | None = None  # pieces before `error`; None: before anything
    hold: str = ""  # "encoding", "queued", "prefill" or "decode": stay there until aborted
    delay_s: float = 0.0  # before each piece
    paced: bool = False  # each piece after the first waits for `FakeBackend.go_on`
    tokens_per_piece: int = 1
    logprobs: list[TokenLogprobText] | None = None  # one for each piece
    prompt_end: str = ""  # of the rendered chat


class FakeBackend(threading.Thread):
    """Binds `ingress`, connects `replies` and `state`."""

    def __init__(self, run_dir: str) -> None:
        super().__init__(daemon=True, name="fake-backend")
        self.script: Callable[[Generate], Script] = lambda generate: Script()
        self.generates: list[Generate] = []
        self.aborted: set[int] = set()
        self.finished: set[int] = set()
        self.call_error: tuple[int, str, str] | None = None  # status, code, message for calls
        self.tokenizes: list[Tokenize] = []
        self.chat_template = ""  # what `ready` tells of it
        self.hold_calls = False  # never answer Tokenize
        self.controls: list[Control] = []
        self.control_answer: tuple[bool, str] = (True, "done")
        self.inspects: list[Inspect] = []
        self.reports: dict[Subject, AnyReport] = {}  # without an entry: no answer
        self._due: list[tuple[float, int, Any]] = []  # (time, order, message)
        self._paced: list[tuple[int, Any]] = []  # (value of `_num_steps` that lets it go, message)
        self._num_steps = 0
        self._order = 0
        self._stop_requested = threading.Event()
        self._outbox: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        addresses = Sockets.in_directory(run_dir)
        self._context = zmq.Context()
        self._ingress = self._context.socket(zmq.PULL)
        self._ingress.bind(addresses.ingress)
        self._replies = self._context.socket(zmq.PUSH)
        self._replies.connect(addresses.replies)
        self._state = self._context.socket(zmq.PUSH)
        self._state.connect(addresses.state)
        self._encode = encoder().encode
        self._decode = decoder(Ingress).decode

    # --- called by tests ------------------------------------------------------------------------

    def ready(self) -> None:
        self.send(
            "replies",
            TokenizerReady(limits=LIMITS, chat_template=self.chat_template),
        )
        self.state(Phase.SERVING, 1.0)

    def state(self, phase: Phase, progress: float, loop_count: int = 1, detail: str = "") -> None:
        self.send(
            "state",
            EngineState(
                epoch=0,
                phase=phase,
                progress=progress,
                detail=detail,
                loop_count=loop_count,
                step_in_flight_ms=0.0,
                rss_bytes=123456,
            ),
        )

    def stats(self, **values: Any) -> None:
        zero = dict.fromkeys((f for f in EngineStats.__struct_fields__), 0)
        self.send("state", EngineStats(**{**zero, "num_blocks": 100, **values}))

    def failed(self, message: str, exit_code: int) -> None:
        self.send("state", EngineFailed(epoch=0, message=message, exit_code=exit_code))

    def answer_inspect(self, question: Inspect, report: AnyReport) -> None:
        self.send("state", Inspection(call_id=question.call_id, report=report))

    def send(self, socket: str, message: Any) -> None:
        """From any thread: ZeroMQ sockets belong to the backend's own."""
        with self._lock:
            self._outbox.append((socket, message))

    def go_on(self) -> None:
        """Send the next piece of each `paced` script."""
        with self._lock:
            self._num_steps += 1

    def stop(self) -> None:
        self._stop_requested.set()
        self.join(5)

    # --- the thread ---------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stop_requested.is_set():
            with self._lock:
                outbox, self._outbox = self._outbox, []
                num_steps = self._num_steps
            for socket, message in outbox:
                (self._replies if socket == "replies" else self._state).send(self._encode(message))
            self._release(num_steps)
            self._send_due()
            if self._ingress.poll(2):
                while True:
                    try:
                        self._handle(self._decode(self._ingress.recv(zmq.NOBLOCK)))
                    except zmq.Again:
                        break
        self._context.destroy(linger=0)

    def _send_due(self) -> None:
        now = time.monotonic()
        self._due.sort(key=lambda entry: entry[:2])
        while self._due and self._due[0][0] <= now:
            _, _, message = self._due.pop(0)
            if isinstance(message, Deltas):
                live = [r for r in message.req_ids if r not in self.aborted]
                if message.req_ids and not live:
                    continue
                self.finished.update(message.req_ids[i] for i, _, _ in message.finished)
            self._replies.send(self._encode(message))

    def _release(self, num_steps: int) -> None:
        held, self._paced = self._paced, []
        for step, message in held:
            if step <= num_steps:
                self._later(message, 0.0)
            else:
                self._paced.append((step, message))

    def _later(self, message: Any, at: float) -> None:
        self._order += 1
        self._due.append((at, self._order, message))

    def _handle(self, message: Any) -> None:
        if isinstance(message, Generate):
            self.generates.append(message)
            self._play(message, self.script(message))
        elif isinstance(message, Abort):
            self.aborted.update(message.req_ids)
        elif isinstance(message, Control):
            self.controls.append(message)
            is_done, text = self.control_answer
            self.send(
                "state", ControlResult(call_id=message.call_id, is_done=is_done, message=text)
            )
        elif isinstance(message, Inspect):
            self.inspects.append(message)
            if message.subject in self.reports:
                self.answer_inspect(message, self.reports[message.subject])
        elif self.call_error is not None:
            status, code, text = self.call_error
            self._later(
                CallError(call_id=message.call_id, status=status, code=code, message=text), 0.0
            )
        elif isinstance(message, Tokenize):
            self.tokenizes.append(message)
            if self.hold_calls:
                return
            text = message.prompt.text if isinstance(message.prompt, TextPrompt) else "chat"
            result = TokenizeResult(
                call_id=message.call_id,
                token_ids=array("i", range(len(text))).tobytes(),
                max_model_len=LIMITS.max_model_len,
                token_strs=list(text) if message.return_token_strs else None,
            )
            self._later(result, 0.0)
        elif isinstance(message, Detokenize):
            ids = array("i", message.token_ids)
            text = "".join(chr(97 + i % 26) for i in ids)
            self._later(DetokenizeResult(call_id=message.call_id, text=text), 0.0)

    def _play(self, generate: Generate, script: Script) -> None:
        at = time.monotonic()
        if script.error is not None and script.error_after is None:
            self._later(script.error, at)
            return
        if script.hold == "encoding":
            return
        prompt_tokens = script.prompt_tokens
        if isinstance(generate.prompt, TokenPrompt):
            prompt_tokens = len(generate.prompt.token_ids) // 4
        self._later(
            Accepted(
                req_id=generate.req_id,
                num_prompt_tokens=prompt_tokens,
                prompt_text=script.prompt_text if generate.want_prompt_text else None,
                prompt_end=script.prompt_end,
            ),
            at,
        )
        if script.hold == "queued":
            return
        ids = list(range(generate.req_id, generate.req_id + generate.params.n))
        started = [(i, script.cached_tokens, 1500) for i in ids]
        self._later(Deltas(req_ids=[], texts=[], counts=[], finished=[], started=started), at)
        if script.hold == "prefill":
            return
        first_step = self._num_steps
        for position, text in enumerate(script.pieces):
            if script.error_after == position:
                self._later(script.error, at)
                return
            at += script.delay_s
            is_last = position == len(script.pieces) - 1 and script.hold != "decode"
            finished = [(i, script.finish, script.stop_reason) for i in range(len(ids))]
            logprobs = []
            if script.logprobs is not None:
                logprobs = [(i, [script.logprobs[position]]) for i in range(len(ids))]
            deltas = Deltas(
                req_ids=ids,
                texts=[text] * len(ids),
                counts=[script.tokens_per_piece] * len(ids),
                finished=finished if is_last else [],
                logprobs=logprobs,
            )
            if script.paced and position:
                self._paced.append((first_step + position, deltas))
            else:
                self._later(deltas, at)


def logprob(token: str, value: float, top: list[tuple[str, float]]) -> TokenLogprobText:
    def entry(text: str, lp: float) -> LogprobEntry:
        return LogprobEntry(token_id=1, token=text, logprob=lp, bytes=text.encode())

    return TokenLogprobText(
        chosen=entry(token, value), top=[entry(t, lp) for t, lp in top], rank=1, text=token
    )
