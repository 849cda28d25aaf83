"""What has arrived for one HTTP request and has not been written to its client yet.

One HTTP request has P prompts with n choices each; all of them share one `RequestStream` and one
handler task. Whatever arrives while the handler is busy (or blocked by a slow reader) is merged
into the pending text of its choice, so that a slow client gets fewer, larger chunks and never
delays others:

    socket callback:   choice.texts += [...]; stream.mark(choice)      (any number of times)
    handler task:      for choice in await stream.next(): piece = choice.take(); write(piece)

Most text is written without a switch to the task: while it waits in `next`, `write_now` takes what came
in a turn of the event loop. It declines where the task is needed: at the beginning, at the end, and as
long as the client is behind.

The engine cannot be slowed down for one reader. What is merged for one is bounded by time (the write
timeout) and by size: with more than MAX_PENDING_CHARS the write that blocks is given up at once.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.api.messages import FinishReason, TokenLogprobText
from server.errors import ApiError

MAX_PENDING_CHARS = 1024 * 1024  # of one stream whose reader is behind
FINISH_NAMES = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Piece:
    """New text of one choice; with `finish_reason`, its last."""

    text: str
    logprobs: list[TokenLogprobText]
    finish_reason: str | None
    stop_reason: str | int | None
    texts: list[str]  # `text` as it arrived,
    ends: list[int]  # and how many tokens were generated until then
    token_ids: bytes = b""  # int32: those generated since the last piece, if wanted

    @property
    def parts(self) -> Iterable[tuple[str, int]]:
        return zip(self.texts, self.ends, strict=True)


@dataclass(slots=True, eq=False)
class Choice:
    """One completion. Times are `time.monotonic_ns()`, 0 until known."""

    stream: "RequestStream"
    req_id: int
    index: int
    prompt_index: int
    texts: list[str] = field(default_factory=list)  # pending
    logprobs: list[TokenLogprobText] = field(default_factory=list)  # pending
    ends: list[int] = field(default_factory=list)  # num_tokens at the end of each of `texts`
    num_tokens: int = 0  # generated so far, as billed
    reasoning_tokens: int = 0  # of these, as far as they were read
    is_marked: bool = False  # waits in stream._marked
    is_opened: bool = False  # the handler has written the first chunk
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    queue_us: int = 0  # from the request's arrival to its start in the engine
    token_ids: bytes = b""  # pending
    logprob_sum: float = 0.0  # over all tokens, known at the end of one with log-probabilities

    def add_text(self, text: str) -> None:
        self.texts.append(text)
        self.ends.append(self.num_tokens)
        self.stream.mark(self)
        self.stream.on_pending(len(text))

    def take(self) -> Piece | None:
        """Everything pending; None if there is nothing worth a chunk (then log-probabilities wait)."""
        texts = self.texts
        text = texts[0] if len(texts) == 1 else "".join(texts)
        if not text and self.finish_reason is None:
            return None
        piece = Piece(
            text,
            self.logprobs,
            self.finish_reason,
            self.stop_reason,
            texts,
            self.ends,
            self.token_ids,
        )
        self.stream.num_pending_chars -= len(text)
        self.texts = []
        self.ends = []
        if self.logprobs:
            self.logprobs = []
        self.token_ids = b""
        return piece

    @property
    def mean_logprob(self) -> float:
        return self.logprob_sum / max(1, self.num_tokens)

    @property
    def phase(self) -> str:
        if not self.started_ns:
            return "queued"
        return "decode" if self.first_token_ns else "prefill"


class Turn:
    """Streams that got something in this turn of the event loop: flushed together, at its end."""

    def __init__(self) -> None:
        self._streams: list[RequestStream] = []

    def add(self, stream: "RequestStream") -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class RequestStream:
    """The choices of one HTTP request, and the one task that waits for them.

    `incremental=False` (a response sent as a whole) wakes the task once, at the end.
    """

    def __init__(
        self,
        turn: Turn,
        num_prompts: int,
        arrival_ns: int,
        incremental: bool,
        is_batch: bool = False,
        wants_prompt_logprobs: bool = False,
    ) -> None:
        self.arrival_ns = arrival_ns
        self.choices: list[Choice] = []
        self.num_prompts = num_prompts
        self.is_batch = is_batch  # the request wrote its prompts as a list
        self.num_prompt_tokens = [0] * num_prompts
        self.num_cached_tokens = [0] * num_prompts
        self.prompt_texts: list[str] = [""] * num_prompts
        self.prompt_token_ids: list[bytes] = [b""] * num_prompts  # int32, if wanted
        self.wants_prompt_logprobs = wants_prompt_logprobs
        self.prompt_logprobs: list[list[TokenLogprobText]] = [[] for _ in range(num_prompts)]
        self.prompt_ends: list[str] = [""] * num_prompts  # of chats
        self.error: ApiError | None = None
        self.num_pending_chars = 0
        self.write_limit: asyncio.Timeout | None = None  # of the write under way
        # Writes what these choices have and returns True, or does nothing and returns False.
        self.write_now: Callable[[list[Choice]], bool] | None = None
        self._incremental = incremental
        self._num_accepted = 0
        self._num_unfinished = 0
        self._marked: list[Choice] = []
        self._turn = turn
        self._is_in_turn = False
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting_since = 0.0
        self._quiet_s = 0.0
        self._is_quiet = False
        self._timer: asyncio.TimerHandle | None = None

    # --- filled by the client -----------------------------------------------------------------

    def add_choice(self, req_id: int, prompt_index: int) -> Choice:
        choice = Choice(self, req_id, len(self.choices), prompt_index)
        self.choices.append(choice)
        self._num_unfinished += 1
        return choice

    def add_prompt_logprobs(self, prompt_index: int, entries: list[TokenLogprobText]) -> None:
        """The next tokens of a prompt; with its last one, its choices may be written."""
        self.prompt_logprobs[prompt_index] += entries
        if self._is_scored(prompt_index):
            for choice in self.choices:
                if choice.prompt_index == prompt_index and choice.started_ns:
                    self.mark(choice)

    def _is_scored(self, prompt_index: int) -> bool:
        known = len(self.prompt_logprobs[prompt_index])
        return known >= self.num_prompt_tokens[prompt_index] > 0

    def accept(
        self,
        prompt_index: int,
        num_prompt_tokens: int,
        text: str | None,
        prompt_end: str = "",
        token_ids: bytes | None = None,
    ) -> None:
        self.num_prompt_tokens[prompt_index] = num_prompt_tokens
        self.prompt_texts[prompt_index] = text or ""
        self.prompt_ends[prompt_index] = prompt_end
        self.prompt_token_ids[prompt_index] = token_ids or b""
        self._num_accepted += 1
        if self._marked:
            self._wake()

    def mark(self, choice: Choice) -> None:
        """`choice` has something new (started, text, or its end).

        A choice that begins with its prompt's log-probabilities waits until all have come.
        """
        if self.wants_prompt_logprobs and not self._is_scored(choice.prompt_index):
            return
        if self._incremental:
            if not choice.is_marked:
                choice.is_marked = True
                self._marked.append(choice)
            if not self._is_in_turn:
                self._is_in_turn = True
                self._turn.add(self)

    def on_pending(self, num_chars: int) -> None:
        """More text waits; too much of it ends the write that its reader blocks."""
        self.num_pending_chars += num_chars
        limit = self.write_limit
        if limit is not None and self.num_pending_chars > MAX_PENDING_CHARS:
            self.write_limit = None
            if not limit.expired():
                limit.reschedule(self._loop.time())

    def finish(self, choice: Choice, reason: str, stop_reason: str | int | None) -> None:
        choice.finish_reason = reason
        choice.stop_reason = stop_reason
        self._num_unfinished -= 1
        self.mark(choice)
        if self._num_unfinished == 0:
            self._wake()

    def fail(self, error: ApiError) -> None:
        """End the whole request. The first error wins."""
        if self.error is None and self._num_unfinished:
            self.error = error
            self._wake()

    # --- read by the handler ----------------------------------------------------------------------

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    @property
    def has_started(self) -> bool:
        """The engine has started one of the choices."""
        return any(choice.started_ns for choice in self.choices)

    @property
    def is_accepted(self) -> bool:
        """All prompts are encoded; until then an error can still be a plain status."""
        return self._num_accepted == self.num_prompts

    async def next(self, quiet_s: float = 0.0) -> list[Choice]:
        """Choices with something new, each once; [] after `quiet_s` seconds of silence (0: never).

        Raises ApiError when the request has failed, after what was pending has been returned.
        """
        while not (self._marked and self.is_accepted):
            if self.error is not None:
                raise self.error
            self._arm(quiet_s)
            await self._wait()
            if self._is_quiet:
                self._is_quiet = False
                return []
        marked, self._marked = self._marked, []
        for choice in marked:
            choice.is_marked = False
        return marked

    async def wait_finished(self) -> None:
        """Wait for all choices. Raises ApiError when the request fails."""
        while not self.is_finished:
            if self.error is not None:
                raise self.error
            await self._wait()

    def close(self) -> None:
        self.write_now = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def flush(self) -> None:
        """After all that came in this turn of the loop: write it, or wake the task to do so."""
        self._is_in_turn = False
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._marked:
            return  # the task is at work, and takes what is marked before it waits again
        try:
            if self.write_now is None or not self.write_now(self._marked):
                waiter.set_result(None)
                return
        except Exception as error:  # as if the task had met it
            waiter.set_exception(error)
            return
        for choice in self._marked:
            choice.is_marked = False
        self._marked = []
        self._waiting_since = self._loop.time()

    def _arm(self, quiet_s: float) -> None:
        # One timer that re-arms itself when it fires early: a timer per token would cost more
        # than the token.
        self._quiet_s = quiet_s
        self._waiting_since = self._loop.time()
        if quiet_s > 0 and self._timer is None:
            self._timer = self._loop.call_later(quiet_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the handler is writing; the next wait arms again
        remaining = self._waiting_since + self._quiet_s - self._loop.time()
        if remaining <= 0.001:
            self._is_quiet = True
            self._wake()
        else:
            self._timer = self._loop.call_later(remaining, self._on_timer)
