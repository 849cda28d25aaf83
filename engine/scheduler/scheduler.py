"""The one brain: decides in every step which requests compute how many tokens.

One rule: computed tokens catch up with known tokens under the token budget. A decode lags by one
token, a prefill by many; there are no other kinds, and a preempted request is a prefill again.

    add ──► waiting ──start──► running ──┬── decodes  1 token each, first
               ▲                 │       └── prefills  as many as the budget still allows
               └──── preempt ────┘                 then waiting ones start, in order

`schedule()` counts what it plans as done, so the next plan can be made before the results of this one
arrive; `commit()` brings the values. Between the two a request has uncommitted samples. Three rules
keep this simple:

  * A request whose length limit is reached by launched tokens is not planned again.
  * A request that ended (stop token, abort) while a token of it was launched has wasted one row: its
    result is ignored at commit. Rows and blocks are free at once, since everything that touches them
    runs in order on one stream.
  * A preempted request starts again only when none of its tokens is uncommitted.

No clock, no sockets, no torch: `schedule` is told the time.
"""

import logging
from collections import deque

import numpy as np

from engine.api.messages import AbortReason, AddRequest, FinishReason, StepOutput
from engine.kv.manager import KVCacheManager
from engine.plan import RowEnd, RowInit, SpanLogprobs, StepPlan, StepResult
from engine.request import Request, RequestStatus, make_request
from engine.scheduler.admission import (
    Admission,
    GreedyAdmission,
    OutputLengths,
    PeakAdmission,
    Rejection,
    why_never,
)
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import DecisionLog, Reason, StepRecord
from engine.scheduler.decode_batch import DecodeBatch, places
from engine.scheduler.draft import Launched, NewTokens, StepDraft
from engine.scheduler.output import OutputBuffer
from engine.scheduler.policy import WaitingQueue, choose_victim
from engine.scheduler.sharing import kept_for

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns all requests of the engine. Not thread-safe: the step loop is its only caller."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.log = DecisionLog()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.preemptions = 0
        self.aborts = 0
        self._requests: dict[int, Request] = {}  # all live ones
        self._running: dict[int, Request] = {}  # in the order of their start
        self._decodes = DecodeBatch(config.block_size)  # those of `_running` behind their prefill
        self._waiting = WaitingQueue()
        self._launched: deque[Launched] = deque()
        self._output = OutputBuffer()
        self._lengths = OutputLengths()
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self._idle_rows = list(range(config.num_rows - 1, 0, -1))
        self._freed_rows: list[int] = []  # since the last plan
        self._num_added = 0
        self._num_steps = 0

    # --- requests come and go ---------------------------------------------------------------------

    def add(self, msg: AddRequest, now_ns: int, rejection: Rejection | None = None) -> None:
        """Queue a request. One that could never run ends at once, as `rejected`, with advice."""
        if msg.req_id in self._requests:
            logger.warning("request id is alive already, ignored: req_id=%d", msg.req_id)
            self.log.note(msg.req_id, Reason.DUPLICATE)
            return
        config = self.config
        self._num_added += 1
        request = make_request(
            msg, self._num_added, config.max_model_len, config.block_size, self._eos_token_ids
        )
        rejection = rejection or self._never_runs(request)
        if rejection is not None:
            self.log.note(msg.req_id, Reason.REJECTED, rejection.size, rejection.limit)
            self._output.rejected.append((msg.req_id, rejection.code, rejection.message))
            return
        self.log.note(msg.req_id, Reason.ARRIVED, len(request.token_ids), len(self._waiting))
        if not self.kv.enable_prefix_caching:
            request.block_names.clear()  # names of content are for sharing
        self._requests[msg.req_id] = request
        self._waiting.add(request)
        is_complete = len(request.token_ids) >= request.max_total_tokens
        if is_complete and request.num_output_tokens:  # it was before a restart
            self._finish(request, FinishReason.LENGTH)

    def _never_runs(self, request: Request) -> Rejection | None:
        config = self.config
        max_prompt_tokens = None if config.enable_chunked_prefill else config.max_num_batched_tokens
        return why_never(request, self.kv, config.max_model_len, max_prompt_tokens)

    def abort(self, req_ids: list[int], reason: AbortReason = AbortReason.CLIENT) -> None:
        """End requests now, with FinishReason.ABORT. Unknown ids are normal: they ended before."""
        for req_id in req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                logger.debug("aborted: reason=%s req_id=%d", reason.name.lower(), req_id)
                self.aborts += 1
                self._finish(request, FinishReason.ABORT)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        stop: int | None = None,
        entry: int | None = None,
        why: str = "",
    ) -> None:
        """The only way out: exactly once per request, from any state. `entry`, `why`: see OutputBuffer."""
        if request.status is RequestStatus.RUNNING:
            self._leave_batch(request)
        else:
            self._waiting.remove(request)
        # NaN may sit in the KV of a request that failed: nobody else shall find it
        self.kv.retire(request, is_bad=reason is FinishReason.ERROR)
        request.status = RequestStatus.FINISHED
        if request.num_uncommitted:
            for launched in self._launched:
                launched.has_wasted = True
        del self._requests[request.req_id]
        self._lengths.record(request, reason)
        self._output.finish(request.req_id, reason, stop, entry, why)
        self.log.note(request.req_id, Reason.FINISHED, reason, request.num_output_tokens)

    def _leave_batch(self, request: Request) -> None:
        self.kv.release(request)
        del self._running[request.req_id]
        self._decodes.leave(request)
        self._idle_rows.append(request.row)
        self._freed_rows.append(request.row)
        request.row = 0

    # --- planning ---------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan | None:
        """Plan the next step; None when nothing can run. A plan must be launched and committed."""
        draft = StepDraft(self.config.max_num_batched_tokens, self._decodes)
        self._schedule_decodes(draft)
        if len(self._running) > len(self._decodes):
            self._schedule_prefills(draft)
        if self._waiting and not draft.has_preempted:
            self._schedule_waiting(draft, now_ns)

        plan = None
        num_decodes = draft.num_decodes
        if num_decodes or draft.prefills:
            self._num_steps += 1
            plan, launched = draft.build(self._num_steps, self._freed_rows)
            self._freed_rows = []
            self._launched.append(launched)
            if self.kv.tier is not None:
                plan.swap_out, plan.swap_in = self.kv.tier.take_copies()
        self._record(draft, num_decodes, now_ns)
        if self.config.check_invariants:
            self.check_invariants()
        return plan

    def _schedule_decodes(self, draft: StepDraft) -> None:
        """See to the blocks of requests that decode; those within the budget get one token each."""
        decodes = self._decodes
        while due := decodes.due(draft.budget):
            for place, request in due:
                if request.status is not RequestStatus.RUNNING:
                    continue  # preempted by a request before it
                if request.num_computed >= request.max_kv_tokens:
                    decodes.leave(request)  # its last token is launched
                elif self._grow(request, 1, draft):
                    decodes.renew_pause(place)

    def _schedule_prefills(self, draft: StepDraft) -> None:
        """The rest of the budget for unfinished prefills, less what a short one may start with."""
        kept = 0
        can_cut = self.config.enable_chunked_prefill  # else a long one might starve
        if can_cut and self._waiting and len(self._running) < self.config.max_num_seqs:
            head, admission = self._waiting.first(), self._make_admission()
            kept = kept_for(head, self.kv, admission, draft.budget_left)
        for request in [r for r in self._running.values() if r.is_prefilling]:
            want = request.num_prefill_tokens - request.num_computed
            num_tokens = self._chunk(want, draft.budget_left - kept)
            if num_tokens == 0 or request.status is not RequestStatus.RUNNING:
                continue
            if self._grow(request, num_tokens, draft):
                draft.add_prefill(request, num_tokens)
        for request, num_tokens in draft.prefills:  # nothing is withdrawn any more
            self._advance_prefill(request, num_tokens)

    def _chunk(self, want: int, budget_left: int) -> int:
        """How many of `want` prefill tokens to compute now; 0: wait.

        Without chunked prefill it is all or nothing. Only a resumed request that has outgrown a whole
        step's budget is split then: it could not go on otherwise.
        """
        if want <= budget_left:
            return want
        if self.config.enable_chunked_prefill or want > self.config.max_num_batched_tokens:
            return budget_left
        return 0

    def _grow(self, request: Request, num_tokens: int, draft: StepDraft) -> bool:
        """Get blocks for `num_tokens` more, preempting others; False if the request itself had to go."""
        num_blocks = len(request.block_ids)
        while not self.kv.extend(request, num_tokens):
            victim = choose_victim(self._running.values())
            self._preempt(victim, request, draft)
            if victim is request:
                return False
        if len(request.block_ids) > num_blocks:
            draft.grown.append((request, num_blocks))
        return True

    def _preempt(self, victim: Request, beneficiary: Request, draft: StepDraft) -> None:
        """Back to the queue without blocks; what is named stays cached until it is reused."""
        self.log.note(
            victim.req_id, Reason.PREEMPTED_FOR, beneficiary.req_id, len(victim.block_ids)
        )
        draft.withdraw(victim)
        self.kv.want_back(victim)
        self._leave_batch(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.num_prefill_tokens = 0
        self.preemptions += 1
        self._waiting.add(victim)

    def _schedule_waiting(self, draft: StepDraft, now_ns: int) -> None:
        """Start requests in order until one has to wait: nobody overtakes it, so nobody starves."""
        admission: Admission | None = None
        while self._waiting:
            request = self._waiting.first()
            if len(self._running) >= self.config.max_num_seqs:
                seats = (len(self._running), self.config.max_num_seqs)
                self.log.note(request.req_id, Reason.WAIT_SEATS, *seats)
                return
            if draft.budget_left == 0:
                want = len(request.token_ids)
                self.log.note(request.req_id, Reason.WAIT_BUDGET, want, 0)
                return
            if admission is None:
                admission = self._make_admission()
            if not self._try_start(request, admission, draft, now_ns):
                return

    def _make_admission(self) -> Admission:
        if self.config.admission == "greedy":
            return GreedyAdmission(self.kv)
        return PeakAdmission(self.kv, self._lengths, self._running.values())

    def _try_start(
        self, request: Request, admission: Admission, draft: StepDraft, now_ns: int
    ) -> bool:
        """Start or resume a waiting request, or note why not."""
        if request.num_uncommitted:
            self.log.note(request.req_id, Reason.WAIT_COMMIT, request.num_uncommitted)
            return False
        kv = self.kv
        cached = kv.find_prefix(request)
        want = len(request.token_ids) - len(cached) * kv.block_size
        num_tokens = self._chunk(want, draft.budget_left)
        if num_tokens == 0:
            self.log.note(request.req_id, Reason.WAIT_BUDGET, want, draft.budget_left)
            return False
        num_shared = sum(kv.pool.refs(block) > 0 for block in cached)
        verdict = admission.check(request, num_shared)
        if not verdict.fits and self._running:
            is_peak = self.config.admission == "peak"
            reason = Reason.WAIT_PEAK if is_peak else Reason.WAIT_BLOCKS
            self.log.note(request.req_id, reason, verdict.need, verdict.have)
            return False
        if not kv.start(request, cached, num_tokens):
            need = kv.blocks_for(len(request.token_ids)) - num_shared
            self.log.note(request.req_id, Reason.WAIT_BLOCKS, need, kv.num_free_blocks)
            return False
        self._start(request, num_tokens, draft, now_ns)
        admission.admit(request)
        return True

    def _start(self, request: Request, num_tokens: int, draft: StepDraft, now_ns: int) -> None:
        """The request takes a row; its first tokens are part of this step."""
        num_cached = request.num_computed
        self._waiting.remove(request)
        reason = Reason.RESUMED if request.has_started else Reason.STARTED
        self.log.note(request.req_id, reason, num_cached, num_tokens)
        if not request.has_started:
            self._count_start(request, num_cached, now_ns)
        request.status = RequestStatus.RUNNING
        request.num_prefill_tokens = len(request.token_ids)
        request.row = self._idle_rows.pop()
        self._running[request.req_id] = request
        draft.new_rows.append(
            RowInit(
                row=request.row,
                params=request.params,
                token_ids=np.array(request.token_ids, np.int32),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=num_cached,
                block_ids=request.block_ids.copy(),
            )
        )
        draft.add_prefill(request, num_tokens)
        self._advance_prefill(request, num_tokens)

    def _count_start(self, request: Request, num_cached: int, now_ns: int) -> None:
        request.has_started = True
        num_prompt, num_hit = request.num_prompt_tokens, min(num_cached, request.num_prompt_tokens)
        if self.kv.enable_prefix_caching:
            self.prefix_query_tokens += num_prompt
            self.prefix_hit_tokens += num_hit
        queue_us = max(0, now_ns - request.arrival_ns) // 1000
        self._output.started.append((request.req_id, num_hit, queue_us))

    def _advance_prefill(self, request: Request, num_tokens: int) -> None:
        """Count tokens as computed: their step is certain to be launched."""
        request.num_computed += num_tokens
        done = min(request.num_computed, request.num_prompt_tokens)
        if done > request.num_prompt_counted:  # not when a resumed request computes it again
            self.prompt_tokens += done - request.num_prompt_counted
            request.num_prompt_counted = done
        left = request.num_prefill_tokens - request.num_computed
        if left == 0:
            request.num_uncommitted += 1
        else:
            self.log.note(request.req_id, Reason.CHUNKED, num_tokens, left)
        self.kv.name_full_blocks(request)

    def _record(self, draft: StepDraft, num_decodes: int, now_ns: int) -> None:
        decisions = self.log.take_pending()
        num_prefills = len(draft.prefills)
        if decisions or num_decodes or num_prefills:
            self.log.append(
                StepRecord(
                    step_id=self._num_steps,
                    time_ns=now_ns,
                    num_decodes=num_decodes,
                    num_prefills=num_prefills,
                    num_tokens=num_decodes + draft.num_prefill_tokens,
                    num_running=len(self._running),
                    num_waiting=len(self._waiting),
                    num_free_blocks=self.kv.num_free_blocks,
                    decisions=decisions,
                )
            )

    # --- results ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take in the samples of a plan. Plans are committed in the order of their making."""
        launched = self._launched[0]
        assert launched.step_id == plan.step_id, (
            f"step {plan.step_id} committed before step {launched.step_id}"
        )
        assert len(result.token_ids) == len(launched.sampling), "one token per sampling row"
        for (request, first), span in zip(launched.scoring, result.prompt_logprobs, strict=True):
            self._commit_span(request, first, span)
        if launched.unwanted or result.is_bad is not None or result.ends:
            self._end_without_token(launched, result)
        self._launched.popleft()
        tokens = launched.tokens(result.token_ids)
        self._commit_tokens(tokens, result)
        self.generation_tokens += len(tokens.ids)
        if self.config.check_invariants:
            self.check_invariants()

    def _end_without_token(self, launched: Launched, result: StepResult) -> None:
        """End the requests of a step whose sample means nothing, or is wanted by nobody."""
        unwanted, is_bad = set(launched.unwanted), result.is_bad
        for index, request in enumerate(launched.sampling):
            if request.status is RequestStatus.FINISHED:
                continue
            end = result.ends.get(index)
            if (is_bad is not None and is_bad[index]) or end is RowEnd.FAILED:
                self._finish(request, FinishReason.ERROR, why=result.reasons.get(index, ""))
            elif end is RowEnd.STUCK:
                self._finish(request, FinishReason.STOP)
            elif index in unwanted:
                self._finish(request, FinishReason.LENGTH)

    def _commit_tokens(self, tokens: NewTokens, result: StepResult) -> None:
        """Make tokens known, name the blocks that they fill, end the requests that they end."""
        output = self._output
        if result.logprobs:
            output.add_logprobs(
                (place, result.logprobs[index])
                for place, index in enumerate(tokens.samples)
                if index in result.logprobs
            )
        entry = output.add_tokens(tokens.req_ids, tokens.ids)
        ending = set(places(tokens.num_known >= tokens.max_tokens))
        if result.ends:
            ending.update(p for p, index in enumerate(tokens.samples) if index in result.ends)
        for place, (request, token) in enumerate(zip(tokens.requests, tokens.ids, strict=True)):
            request.num_uncommitted -= 1
            request.token_ids.append(token)
            if token in request.stop_token_ids:
                ending.add(place)
        # a block is full now; or it was before, and the KV of its last token was missing
        for place in places(tokens.num_known % self.config.block_size <= 1):
            self.kv.name_full_blocks(tokens.requests[place])
        for place in sorted(ending):
            request, token = tokens.requests[place], tokens.ids[place]
            if token in request.stop_token_ids and self._may_stop(request):
                stop = None if token in request.eos_token_ids else token
                self._finish(request, FinishReason.STOP, stop, entry + place)
            elif tokens.samples[place] in result.ends:
                self._finish(request, FinishReason.STOP)
            elif len(request.token_ids) >= request.max_total_tokens:
                self._finish(request, FinishReason.LENGTH, None, entry + place)

    def fail(self, plan: StepPlan) -> None:
        """The latest plan could not be launched: its requests end with an error, and what they hold is
        not to be trusted. Others go on."""
        launched = self._launched.pop()
        assert launched.step_id == plan.step_id, "only the latest plan can fail to be launched"
        for req_id in plan.req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                self._finish(request, FinishReason.ERROR)
        if self.config.check_invariants:
            self.check_invariants()

    def _commit_span(self, request: Request, first: int, span: SpanLogprobs) -> None:
        if request.status is RequestStatus.FINISHED:
            return
        if span.is_bad:
            self._finish(request, FinishReason.ERROR)
        else:
            self._output.add_prompt_logprobs(request.req_id, first, span)

    @staticmethod
    def _may_stop(request: Request) -> bool:
        return request.num_output_tokens >= request.params.min_tokens

    def take_output(self, epoch: int, step_id: int) -> StepOutput | None:
        """Tokens, starts and endings since the last call, or None if there are none."""
        return self._output.take(epoch, step_id)

    # --- state ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Is any request alive? (`take_output` may have something to say even if not.)"""
        return bool(self._requests)

    def requests(self) -> tuple[list[Request], list[Request]]:
        """Running and waiting ones, in order."""
        return list(self._running.values()), list(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_invariants(self) -> None:
        """Raise AssertionError, in words, unless all tables agree. O(requests + blocks)."""
        running, waiting = self._running, list(self._waiting)
        states = [r.status for r in running.values()]
        assert all(s is RequestStatus.RUNNING for s in states), "not running, but in the batch"
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting), (
            "a request waits that does not have to"
        )
        alive = sorted([*running, *(r.req_id for r in waiting)])
        assert alive == sorted(self._requests), "a request is neither running nor waiting, or both"
        assert len(running) <= self.config.max_num_seqs, "more requests run than may"
        rows = sorted([*self._idle_rows, *(r.row for r in running.values())])
        assert rows == list(range(1, self.config.num_rows)), "a row is lost or given twice"

        uncommitted: dict[int, int] = {}
        for launched in self._launched:
            for request in launched.sampling:
                uncommitted[id(request)] = uncommitted.get(id(request), 0) + 1
        for request in self._requests.values():
            count = uncommitted.get(id(request), 0)
            assert request.num_uncommitted == count, "uncommitted samples miscounted"
            num_launched = len(request.token_ids) + count
            most = max(request.max_total_tokens, request.num_prompt_tokens + 1)  # one is unwanted
            assert num_launched <= most, "planned beyond its length limit"
            if not request.is_prefilling and request.status is RequestStatus.RUNNING:
                assert request.num_computed == num_launched - 1, "a decode lags by one token"
        assert not any(r.block_ids for r in waiting), "a waiting request holds blocks"
        self._decodes.check_invariants()
        self.kv.check_invariants(running.values())
