"""Answers questions about scheduler and KV cache, between two steps and only when asked.

Runs in the step loop's thread, so the tables agree with each other and nothing needs a lock. Each answer
is bounded: blocks once, a limited number of requests and steps.
"""

import logging
import time
from collections.abc import Callable

from engine.api.inspection import (
    AnyReport,
    HostReport,
    KvReport,
    RequestReport,
    RequestsReport,
    StepReport,
    StepsReport,
    TimelineReport,
)
from engine.api.messages import AddRequest, Inspect, Inspection, Subject
from engine.grammar_gate import GrammarGate
from engine.kv.manager import KVCacheManager
from engine.request import Request, RequestStatus
from engine.scheduler.decisions import DecisionLog, Reason
from engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

WAITS = (
    Reason.WAIT_SEATS,
    Reason.WAIT_BUDGET,
    Reason.WAIT_BLOCKS,
    Reason.WAIT_PEAK,
    Reason.WAIT_COMMIT,
)


class Inspector:
    """Answers each `Inspect` with one `Inspection`."""

    def __init__(
        self, scheduler: Scheduler, gate: GrammarGate, reply: Callable[[Inspection], None]
    ) -> None:
        self._scheduler = scheduler
        self._gate = gate
        self._reply = reply

    def answer(self, question: Inspect) -> None:
        """Never raises: curiosity must not end the engine. Who asked then gets no answer in time."""
        try:
            report = self.report(question)
        except Exception:
            logger.exception("no report on %s", question.subject.name.lower())
        else:
            self._reply(Inspection(call_id=question.call_id, report=report))

    def report(self, question: Inspect) -> AnyReport:
        scheduler = self._scheduler
        match question.subject:
            case Subject.KV:
                return kv_report(scheduler.kv)
            case Subject.REQUESTS:
                return requests_report(scheduler, self._gate, question.last, time.monotonic_ns())
            case Subject.STEPS:
                return steps_report(scheduler.log, question.last)
            case Subject.TIMELINE:
                lines = [(req_id, scheduler.log.timeline(req_id)) for req_id in question.req_ids]
                return TimelineReport(timelines=lines)


def kv_report(kv: KVCacheManager) -> KvReport:
    tier = kv.tier
    host = None
    if tier is not None:
        host = HostReport(
            num_slots=tier.num_slots,
            num_used=tier.num_used,
            num_saved=tier.num_saved,
            num_loaded=tier.num_loaded,
            num_swapped=tier.num_swapped,
        )
    states, lengths = kv.map()
    return KvReport(
        block_size=kv.block_size,
        enable_prefix_caching=kv.enable_prefix_caching,
        states=states.tobytes(),
        lengths=lengths.tobytes(),
        host=host,
    )


def requests_report(
    scheduler: Scheduler, gate: GrammarGate, limit: int, now_ns: int
) -> RequestsReport:
    running, waiting = scheduler.requests()
    held = list(gate.held.values())
    rows = [of_request(request, "") for request in running[:limit]]
    for place, request in enumerate(waiting[: limit - len(rows)]):
        rows.append(of_request(request, why_waiting(scheduler.log, request, place)))
    rows += [of_held(message) for message in held[: limit - len(rows)]]
    return RequestsReport(
        now_ns=now_ns,
        num_running=len(running),
        num_waiting=len(waiting) + len(held),
        requests=rows,
    )


def of_request(request: Request, reason: str) -> RequestReport:
    phase = "prefill" if request.is_prefilling else "decode"
    return RequestReport(
        req_id=request.req_id,
        state=request.status.name.lower(),
        phase=phase if request.status is RequestStatus.RUNNING else "queued",
        priority=request.priority,
        row=request.row,
        prompt_tokens=request.num_prompt_tokens,
        output_tokens=request.num_output_tokens,
        computed_tokens=request.num_computed,
        max_output_tokens=request.max_total_tokens - request.num_prompt_tokens,
        blocks=len(request.block_ids),
        shared_blocks=request.num_shared_blocks,
        preemptions=request.num_preemptions,
        arrival_ns=request.arrival_ns,
        reason=reason,
    )


def of_held(message: AddRequest) -> RequestReport:
    """A request in front of the scheduler."""
    num_tokens = len(message.token_ids) // 4
    return RequestReport(
        req_id=message.req_id,
        state="waiting",
        phase="grammar",
        priority=message.priority,
        row=0,
        prompt_tokens=num_tokens - message.num_prior_output,
        output_tokens=message.num_prior_output,
        computed_tokens=0,
        max_output_tokens=message.params.max_tokens or 0,
        blocks=0,
        shared_blocks=0,
        preemptions=0,
        arrival_ns=message.arrival_ns,
        reason="waits for its grammar to be compiled",
    )


def why_waiting(log: DecisionLog, request: Request, place: int) -> str:
    """The scheduler only looks at the first of the queue, and notes a reason for that one."""
    if place:
        others = "1 request is" if place == 1 else f"{place} requests are"
        reason = f"{others} before it in the queue"
    else:
        decision = log.latest(request.req_id)
        if decision is not None and decision.reason in WAITS:
            reason = decision.sentence()
        else:
            reason = "is the next to start"
    was = "preempted: " if request.status is RequestStatus.PREEMPTED else ""
    return was + reason


def steps_report(log: DecisionLog, last: int) -> StepsReport:
    return StepsReport(
        steps=[
            StepReport(
                step=record.step_id,
                time_ns=record.time_ns,
                decode_tokens=record.num_decodes,
                prefill_tokens=record.num_tokens - record.num_decodes,
                prefills=record.num_prefills,
                running=record.num_running,
                waiting=record.num_waiting,
                free_blocks=record.num_free_blocks,
                decisions=[(d.req_id, d.sentence()) for d in record.decisions],
            )
            for record in log.steps(last)
        ]
    )
