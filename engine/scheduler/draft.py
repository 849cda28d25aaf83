"""A step while it is being put together, and what remains of it until its results arrive."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.plan import Int32Array, PromptSpan, RowInit, StepPlan
from engine.request import Request, RequestStatus
from engine.scheduler.decode_batch import DecodeBatch, joined

NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True)
class NewTokens:
    """Samples of a step that somebody gets, in columns."""

    requests: list[Request]
    req_ids: list[int]
    ids: list[int]
    num_known: Int32Array  # tokens of the request, this one included
    max_tokens: Int32Array  # prompt and output
    samples: Sequence[int]  # places among the samples of the step


@dataclass(slots=True)
class Launched:
    """A plan handed out whose results are not committed: who gets its samples, in plan order.

    Requests are held as objects: an id may be dead, or in use again, when the results arrive.
    """

    step_id: int
    sampling: list[Request]
    req_ids: list[int]  # of `sampling`
    num_known: Int32Array  # of `sampling`: known tokens once this step is committed
    max_tokens: Int32Array  # of `sampling`: prompt and output
    unwanted: list[int]  # places in `sampling` of requests for the prompt alone
    scoring: list[tuple[Request, int]]  # (request, place of the first prompt token), by span
    has_wasted: bool = False  # a request may have ended before its sample of this step arrived

    def tokens(self, token_ids: Int32Array) -> NewTokens:
        """The step's samples (int32 [samples]), but for those of requests that have ended."""
        requests, req_ids, ids = self.sampling, self.req_ids, token_ids.tolist()
        if not self.has_wasted:
            samples = range(len(ids))
            return NewTokens(requests, req_ids, ids, self.num_known, self.max_tokens, samples)
        wanted = [i for i, r in enumerate(requests) if r.status is not RequestStatus.FINISHED]
        return NewTokens(
            [requests[i] for i in wanted],
            [req_ids[i] for i in wanted],
            [ids[i] for i in wanted],
            self.num_known[wanted],
            self.max_tokens[wanted],
            wanted,
        )


@dataclass(slots=True)
class StepDraft:
    """Tokens granted so far. Preemption withdraws grants; `build` makes the plan of what is left."""

    budget: int  # max_num_batched_tokens
    decodes: DecodeBatch  # each decodes, as far as the budget reaches
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    grown: list[tuple[Request, int]] = field(default_factory=list)  # (request, blocks before)
    num_prefill_tokens: int = 0
    has_preempted: bool = False

    @property
    def num_decodes(self) -> int:
        return min(len(self.decodes), self.budget)

    @property
    def budget_left(self) -> int:
        return self.budget - self.num_decodes - self.num_prefill_tokens

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        self.prefills.append((request, num_tokens))
        self.num_prefill_tokens += num_tokens

    def withdraw(self, request: Request) -> None:
        """Forget what a preempted request was granted in this step, if anything."""
        self.has_preempted = True
        self.grown = [entry for entry in self.grown if entry[0] is not request]
        for index, (other, num_tokens) in enumerate(self.prefills):
            if other is request:
                del self.prefills[index]
                self.num_prefill_tokens -= num_tokens
                break

    def build(self, step_id: int, freed_rows: list[int]) -> tuple[StepPlan, Launched]:
        """The plan. Tokens of prefills are counted in `num_computed` already, those of decodes are now;
        requests whose prefill is complete join the decodes."""
        decodes = self.decodes.advance(self.budget)
        num_decodes = len(decodes)
        plan = StepPlan(
            step_id=step_id,
            num_decodes=num_decodes,
            rows=decodes.rows,
            num_tokens=np.ones(num_decodes, np.int32),
            num_computed=decodes.num_computed,
            samples=np.ones(num_decodes, np.bool_),
            prompt_tokens=NO_TOKENS,
            new_rows=self.new_rows,
            appended=[(r.row, before, r.block_ids[before:]) for r, before in self.grown],
            freed_rows=freed_rows,
            req_ids=decodes.req_ids,
        )
        launched = Launched(
            step_id=step_id,
            sampling=decodes.requests,
            req_ids=decodes.req_ids,
            num_known=decodes.num_computed + 2,
            max_tokens=decodes.max_tokens,
            unwanted=[],
            scoring=[],
        )
        if self.prefills:
            self._add_prefills(plan, launched)
        return plan, launched

    def _add_prefills(self, plan: StepPlan, launched: Launched) -> None:
        """Append the prefill rows. Columns are shared with other steps: they are replaced."""
        prompt_tokens = array("i")
        for request, count in self.prefills:
            end = request.num_computed
            if not request.is_scored:
                first_token, first = plan.num_decodes + len(prompt_tokens), request.num_scored
                span = next_span(request, end - count, end, first_token)
                if span is not None:
                    plan.prompt_spans.append(span)
                    launched.scoring.append((request, first))
            prompt_tokens.extend(request.token_ids[end - count : end])
        requests = [request for request, _ in self.prefills]
        counts = [count for _, count in self.prefills]
        starts = [request.num_computed - count for request, count in self.prefills]
        samples = [not request.is_prefilling for request in requests]
        plan.rows = joined(plan.rows, [r.row for r in requests])
        plan.num_tokens = joined(plan.num_tokens, counts)
        plan.num_computed = joined(plan.num_computed, starts)
        plan.samples = np.concatenate([plan.samples, np.array(samples, np.bool_)])
        plan.prompt_tokens = np.array(prompt_tokens, np.int32)
        plan.req_ids = [*plan.req_ids, *(r.req_id for r in requests)]

        complete = [request for request in requests if not request.is_prefilling]
        for place, request in enumerate(complete, len(launched.sampling)):
            if request.max_total_tokens == request.num_prompt_tokens:
                launched.unwanted.append(place)
        launched.sampling = [*launched.sampling, *complete]
        launched.req_ids = [*launched.req_ids, *(r.req_id for r in complete)]
        launched.num_known = joined(launched.num_known, [r.num_computed + 1 for r in complete])
        launched.max_tokens = joined(launched.max_tokens, [r.max_total_tokens for r in complete])
        if complete:
            self.decodes.join(complete)


def next_span(request: Request, start: int, end: int, first_token: int) -> PromptSpan | None:
    """The unscored prompt tokens that computing tokens start .. end - 1 tells of: scored from now on.

    `first_token`: place of token `start` in the step. A resumed request may compute only tokens that
    were scored before it was preempted: then there are none.
    """
    first, past = request.num_scored, min(end + 1, request.num_prompt_tokens)
    num_top = request.params.prompt_logprobs
    assert start < first, "a prompt to be scored took too much from the cache"
    if first >= past or num_top is None:
        return None
    request.num_scored = past
    return PromptSpan(
        first_token=first_token + first - 1 - start,
        token_ids=np.array(request.token_ids[first:past], np.int32),
        num_top=num_top,
    )
