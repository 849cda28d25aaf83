"""THE step loop: the only place where time passes in the engine.

Overlapped (the device works on one step while the host finishes the one before and plans the next):

    CPU  | plan n | launch n | commit n-1 | send | plan n+1 | launch n+1 | commit n | ...
    GPU  | .. step n-1 ......| ........ step n .............|..... step n+1 ..........

In sequence (`overlap=False`; a CPU device computes inside launch, so there is nothing to hide):

    CPU  | plan n | send who starts | launch n (compute) | commit n | send | plan n+1 | ...

Both run the same calls. What makes overlap correct: the scheduler counts a token as computed when its
step is launched, decode rows read the last sampled token on the device, and a request found to have
ended wastes at most one row of one step.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine.api.messages import (
    AbortRequests,
    AddRequest,
    Control,
    Inspect,
    StepOutput,
    Submit,
    TokenPieces,
)
from engine.grammar_gate import GrammarGate
from engine.memory import is_out_of_memory
from engine.plan import StepPlan
from engine.runner.runner import ModelRunner, StepHandle
from engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Inbox(Protocol):
    """Where requests come from."""

    def drain(self, block: bool) -> list[Submit]:
        """All messages that have arrived; with `block`, wait a moment for the first."""


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    handle: StepHandle
    started: float  # time.monotonic()


class StepLoop:
    """Drives scheduler and runner. Counters are read by the heartbeat thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        send: Callable[[StepOutput], None],
        overlap: bool,
        epoch: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.send = send
        self.overlap = overlap
        self.epoch = epoch
        self.gate = GrammarGate(runner.constraints.grammars)
        self.in_flight: InFlight | None = None
        self.steps = 0
        self.step_seconds = 0.0  # wall time with a step in flight
        self.last_commit = 0.0
        self.loop_count = 0
        self.step_started = 0.0  # time.monotonic() of the running step; 0 between steps
        self.nan_events = 0  # steps with logits that are NaN or infinite
        self.failed_steps = 0  # not launched for lack of memory
        # what operators ask; offline nobody does
        self.on_control: Callable[[Control | Inspect], None] | None = None

    def run(
        self, inbox: Inbox, stopping: Callable[[], bool], after_step: Callable[[], None]
    ) -> None:
        """Serve until `stopping()`. `after_step` runs once an iteration, for statistics."""
        while not stopping():
            self.take(inbox.drain(block=not self.has_work()))
            self.step()
            after_step()

    def has_work(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_work() or bool(self.gate.held)

    def take(self, messages: list[Submit]) -> None:
        """Hand arrived messages to the scheduler."""
        for message in messages:
            if isinstance(message, AddRequest):
                if message.params.structured is not None:
                    self.gate.hold(message)
                else:
                    self.scheduler.add(message, time.monotonic_ns())
            elif isinstance(message, AbortRequests):
                for request in self.gate.release(message.req_ids):
                    self.scheduler.add(request, time.monotonic_ns())
                self.scheduler.abort(message.req_ids, message.reason)
            elif isinstance(message, TokenPieces):
                self.runner.constraints.learn(message.pieces, message.special_ids)
            elif self.on_control is not None:
                self.step_started = time.monotonic()  # it may take as long as a step
                self.on_control(message)

    def step(self) -> None:
        """One pass: plan, launch, finish a step, send what it produced."""
        self.loop_count += 1
        if self.gate.held:
            self.start_compiled()
        plan = self.scheduler.schedule(time.monotonic_ns())
        launched = None
        if plan is not None:
            if plan.new_rows and not self.overlap:
                self.send_output()  # who starts now: what computes inside `launch` would make it late
            self.step_started = time.monotonic()
            launched = self.attempt(plan, partial(self.launch, plan))
        if self.overlap and self.in_flight is not None:
            self.commit(self.in_flight)
        if launched is not None and launched.handle.held is not None:
            launched = self.attempt(launched.plan, partial(self.finish, launched))
        if launched is not None and not self.overlap:
            self.commit(launched)
        if self.overlap:
            self.in_flight = launched
        if self.in_flight is None:
            self.step_started = 0.0
        self.send_output()

    def send_output(self) -> None:
        output = self.scheduler.take_output(self.epoch, self.steps)
        if output is not None:
            self.send(output)

    def start_compiled(self) -> None:
        """Queue the requests whose grammar is ready. With nothing else to do, wait a moment for one."""
        if self.in_flight is None and not self.scheduler.has_work():
            self.gate.wait()
        for request, rejection in self.gate.take_ready():
            self.scheduler.add(request, time.monotonic_ns(), rejection)

    def launch(self, plan: StepPlan) -> InFlight:
        return InFlight(plan, self.runner.launch(plan), self.step_started)

    def finish(self, launched: InFlight) -> InFlight:
        """Sample, if that needed the tokens just committed."""
        self.runner.finish(launched.handle)
        return launched

    def attempt(self, plan: StepPlan, work: Callable[[], InFlight]) -> InFlight | None:
        """The result of `work` on the latest plan. None if memory ran out: the requests of the plan then
        end with an error, and others go on."""
        try:
            return work()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            logger.error(
                "out of memory in step %d, with %d requests and %d tokens; these requests fail. Restart "
                "with a lower --gpu-memory-utilization or --max-num-batched-tokens if this happens "
                "again: %s",
                *(plan.step_id, plan.batch_size, plan.total_tokens, error),
            )
            self.failed_steps += 1
        self.scheduler.fail(plan)
        self.runner.release_unused_memory()  # outside the handler: the traceback holds tensors
        return None

    def commit(self, launched: InFlight) -> None:
        plan, result = launched.plan, launched.handle.wait()
        if result.is_bad is not None and result.is_bad.any():
            rows = plan.rows[plan.samples][result.is_bad]
            self.nan_events += 1
            logger.error("logits are NaN or infinite: step=%d rows=%s", plan.step_id, rows)
            self.runner.scrub()
        if any(span.is_bad for span in result.prompt_logprobs):
            logger.error("logits of a prompt are NaN or infinite: step=%d", plan.step_id)
            self.runner.scrub()
        self.scheduler.commit(plan, result)
        self.steps += 1
        now = time.monotonic()
        self.step_seconds += now - max(launched.started, self.last_commit)
        self.last_commit = now
