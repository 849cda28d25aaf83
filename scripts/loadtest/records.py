"""What one request left behind, and what one level of load is."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request. Times in seconds of `time.perf_counter`, which all processes of a host share."""

    start: float  # sent
    asked_tokens: int  # max_tokens
    end: float = 0.0  # end of the stream, or of the attempt
    pieces: "array[float]" = field(default_factory=lambda: array("d"))  # arrival of each text
    prompt_tokens: int | None = None  # as the server counted; None: it did not
    completion_tokens: int | None = None
    error: str | None = None  # kind; None: the answer is complete
    detail: str = ""  # of the error, for people
    status: int = 0  # of HTTP; 0: none came
    retry_after: float | None = None  # seconds, from a Retry-After header
    retries: int = 0
    late: float = 0.0  # open loop: seconds between the planned time and `start`

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None if none came."""
        return self.pieces[0] - self.start if self.pieces else None

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Completion tokens as the server counted them, else pieces of text."""
        return len(self.pieces) if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None with fewer than two."""
        if len(self.pieces) < 2 or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces; pieces that arrived in one read have gap 0."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True)
class Level:
    """A load: `value` clients that never pause (closed), or requests a second (open)."""

    mode: str  # "closed" or "open"
    value: float

    @property
    def name(self) -> str:
        return f"{'concurrency' if self.mode == 'closed' else 'rate'} {self.value:g}"
