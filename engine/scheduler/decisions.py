"""Why did the scheduler do what it did? A ring of step records with reasons, kept for every step.

Each decision is a reason and two numbers; sentences are made only when someone asks. A steady decode
step costs one record without decisions.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine.api.messages import FinishReason

RING_STEPS = 4096


class Reason(IntEnum):
    ARRIVED = 0
    STARTED = 1
    RESUMED = 2
    CHUNKED = 3
    WAIT_SEATS = 4
    WAIT_BUDGET = 5
    WAIT_BLOCKS = 6
    WAIT_PEAK = 7
    WAIT_COMMIT = 8
    PREEMPTED_FOR = 9
    FINISHED = 10
    REJECTED = 11
    DUPLICATE = 12


# {a} and {b} are the decision's two numbers
SENTENCES = {
    Reason.ARRIVED: "arrived with {a} tokens, {b} requests waiting before it",
    Reason.STARTED: "started: {a} tokens found in the cache, {b} computed in this step",
    Reason.RESUMED: "resumed: {a} tokens found in the cache, {b} computed in this step",
    Reason.CHUNKED: "prefill was cut to {a} tokens by the token budget, {b} are left",
    Reason.WAIT_SEATS: "waits for a seat: {a} requests are running, {b} may",
    Reason.WAIT_BUDGET: "waits for the token budget: needs {a} tokens, {b} left in this step",
    Reason.WAIT_BLOCKS: "waits for KV blocks: needs {a}, {b} are free",
    Reason.WAIT_PEAK: "waits for KV blocks: with it, demand would peak at {a} of {b}",
    Reason.WAIT_COMMIT: "waits for {a} sampled tokens of its own to arrive",
    Reason.PREEMPTED_FOR: "preempted to give its {b} blocks to request {a}",
    Reason.FINISHED: "finished ({reason}) after {b} output tokens",
    Reason.REJECTED: "rejected: it could never run (limit {b}, needs {a})",
    Reason.DUPLICATE: "arrived again while alive: ignored",
}


class Decision(NamedTuple):
    req_id: int
    reason: Reason
    a: int = 0
    b: int = 0

    def sentence(self) -> str:
        finish = FinishReason(self.a).name.lower() if self.reason is Reason.FINISHED else ""
        return SENTENCES[self.reason].format(a=self.a, b=self.b, reason=finish)


@dataclass(slots=True)
class StepRecord:
    """One call of `schedule()` that ran something or decided something."""

    step_id: int
    time_ns: int
    num_decodes: int
    num_prefills: int
    num_tokens: int  # 0: nothing could run
    num_running: int
    num_waiting: int
    num_free_blocks: int
    decisions: list[Decision]


class DecisionLog:
    """The last RING_STEPS records. Decisions made between two steps belong to the later one."""

    def __init__(self, size: int = RING_STEPS) -> None:
        self._ring: deque[StepRecord] = deque(maxlen=size)
        self._pending: list[Decision] = []

    def note(self, req_id: int, reason: Reason, a: int = 0, b: int = 0) -> None:
        self._pending.append(Decision(req_id, reason, a, b))

    def take_pending(self) -> list[Decision]:
        """What was decided since the last record; the caller makes it part of the next."""
        pending, self._pending = self._pending, []
        return pending

    def append(self, record: StepRecord) -> None:
        self._ring.append(record)

    def steps(self, last: int = RING_STEPS) -> list[StepRecord]:
        """The newest `last` records, oldest first."""
        return list(self._ring)[-last:]

    def latest(self, req_id: int) -> Decision | None:
        """The last decision about a request: a walk back through the ring, mostly a short one."""
        for record in (self._pending, *(r.decisions for r in reversed(self._ring))):
            for decision in reversed(record):
                if decision.req_id == req_id:
                    return decision
        return None

    def timeline(self, req_id: int) -> list[tuple[int, str]]:
        """What happened to one request: (time in ns, sentence), a repeated reason only once.

        Goes through the whole ring: for people, not for the step path.
        """
        lines: list[tuple[int, str]] = []
        previous = None
        for time_ns, decision in self._decisions():
            if decision.req_id == req_id and decision.reason is not previous:
                lines.append((time_ns, decision.sentence()))
                previous = decision.reason
        return lines

    def _decisions(self) -> Iterator[tuple[int, Decision]]:
        time_ns = 0
        for record in self._ring:
            time_ns = record.time_ns
            for decision in record.decisions:
                yield time_ns, decision
        for decision in self._pending:
            yield time_ns, decision
