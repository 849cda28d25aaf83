"""How long a request may wait and take; what is late ends with an error, never with half an answer."""

import asyncio
import time
from dataclasses import dataclass, field

from server.errors import RETRY_QUEUE_S, ApiError
from server.stream import RequestStream


@dataclass
class Deadline:
    """Ends `stream` when its time is up: `with Deadline(...)` while it lives.

    `queue_s`: until its first completion starts. `total_s`: from arrival to its last token. 0: no limit.
    Two timers for each request, none for each token.
    """

    stream: RequestStream
    queue_s: float
    total_s: float
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __enter__(self) -> "Deadline":
        loop = asyncio.get_running_loop()
        spent = (time.monotonic_ns() - self.stream.arrival_ns) * 1e-9
        for seconds, action in ((self.queue_s, self._on_queue), (self.total_s, self._on_total)):
            if seconds > 0:
                self._timers.append(loop.call_later(max(0.0, seconds - spent), action))
        return self

    def __exit__(self, *exc: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def _on_queue(self) -> None:
        if not self.stream.has_started:
            self.stream.fail(queue_timeout(self.queue_s))

    def _on_total(self) -> None:
        if not self.stream.has_started:
            self.stream.fail(queue_timeout(self.total_s))
            return
        self.stream.fail(
            ApiError(
                408,
                "request_timeout",
                f"The request was not finished within {self.total_s:g} s (timeout, or "
                "--request-timeout); ask for fewer tokens, or for a longer time.",
            )
        )


def queue_timeout(seconds: float) -> ApiError:
    return ApiError(
        503,
        "queue_timeout",
        f"The server is busy: the request was not started within {seconds:g} s.",
        retry_after=RETRY_QUEUE_S,
    )
