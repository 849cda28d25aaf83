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

    A client whose own limit (`is_own`) has passed gets 408, started or not: there is no time left to try
    again. At the server's limits what has not started gets 503: the server was full, another may not be.
    Where both pass at the same moment the client's own counts.
    """

    stream: RequestStream
    queue_s: float
    total_s: float
    is_own: bool = False  # `total_s` is the request's `timeout`, not --request-timeout
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def __enter__(self) -> "Deadline":
        loop = asyncio.get_running_loop()
        spent = (time.monotonic_ns() - self.stream.arrival_ns) * 1e-9
        for seconds, action in ((self.total_s, self._on_total), (self.queue_s, self._on_queue)):
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
        has_started = self.stream.has_started
        if not has_started and not self.is_own:
            self.stream.fail(queue_timeout(self.total_s))
            return
        done = "finished" if has_started else "even started"
        limit = "its timeout" if self.is_own else "--request-timeout"
        remedy = "ask for fewer tokens" if has_started else "give it longer"
        if has_started and self.is_own:  # beyond --request-timeout nobody can ask for
            remedy += ", or for a longer time"
        self.stream.fail(
            ApiError(
                408,
                "request_timeout",
                f"The request was not {done} within {self.total_s:g} s ({limit}); {remedy}.",
            )
        )


def queue_timeout(seconds: float) -> ApiError:
    return ApiError(
        503,
        "queue_timeout",
        f"The server is busy: the request was not started within {seconds:g} s.",
        retry_after=RETRY_QUEUE_S,
    )
