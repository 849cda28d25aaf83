"""A step while it is being put together, and what remains of it until its results arrive."""

from array import array
from dataclasses import dataclass, field

import numpy as np

from engine.plan import PromptSpan, RowInit, StepPlan
from engine.request import Request


@dataclass(slots=True)
class Launched:
    """A plan handed out whose results are not committed: who gets its samples, in plan order.

    Requests are held as objects: an id may be dead, or in use again, when the results arrive.
    """

    step_id: int
    sampling: list[Request]
    unwanted: list[int]  # places in `sampling` of requests for the prompt alone
    scoring: list[tuple[Request, int]]  # (request, place of the first prompt token), by span


@dataclass(slots=True)
class StepDraft:
    """Tokens granted so far. Preemption withdraws grants; `build` makes the plan of what is left."""

    budget: int  # max_num_batched_tokens
    decodes: list[Request] = field(default_factory=list)
    prefills: list[tuple[Request, int]] = field(default_factory=list)
    new_rows: list[RowInit] = field(default_factory=list)
    grown: list[tuple[Request, int]] = field(default_factory=list)  # (request, blocks before)
    num_prefill_tokens: int = 0
    has_preempted: bool = False

    @property
    def budget_left(self) -> int:
        return self.budget - len(self.decodes) - self.num_prefill_tokens

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        self.prefills.append((request, num_tokens))
        self.num_prefill_tokens += num_tokens

    def withdraw(self, request: Request) -> None:
        """Forget what a preempted request was granted in this step, if anything."""
        self.has_preempted = True
        self.grown = [entry for entry in self.grown if entry[0] is not request]
        if request in self.decodes:
            self.decodes.remove(request)
            request.num_uncommitted -= 1
        for index, (other, num_tokens) in enumerate(self.prefills):
            if other is request:
                del self.prefills[index]
                self.num_prefill_tokens -= num_tokens
                break

    def build(self, step_id: int, freed_rows: list[int]) -> tuple[StepPlan, Launched]:
        """The plan. All grants are counted in `num_computed` already."""
        decodes, prefills = self.decodes, self.prefills
        num_decodes = len(decodes)
        size = num_decodes + len(prefills)
        rows = [r.row for r in decodes]
        num_computed = [r.num_computed - 1 for r in decodes]
        num_tokens = np.ones(size, np.int32)
        samples = np.ones(size, np.bool_)
        req_ids = [r.req_id for r in decodes]
        sampling = list(decodes)
        prompt_tokens = array("i")
        unwanted: list[int] = []
        prompt_spans: list[PromptSpan] = []
        scoring: list[tuple[Request, int]] = []
        for index, (request, count) in enumerate(prefills, num_decodes):
            end = request.num_computed
            rows.append(request.row)
            num_computed.append(end - count)
            num_tokens[index] = count
            req_ids.append(request.req_id)
            if not request.is_scored:
                first_token = num_decodes + len(prompt_tokens)
                score(request, end - count, end, first_token, prompt_spans, scoring)
            prompt_tokens.extend(request.token_ids[end - count : end])
            samples[index] = end == request.num_prefill_tokens
            if samples[index]:
                if request.max_total_tokens == request.num_prompt_tokens:
                    unwanted.append(len(sampling))
                sampling.append(request)
        plan = StepPlan(
            step_id=step_id,
            num_decodes=num_decodes,
            rows=np.array(rows, np.int32),
            num_tokens=num_tokens,
            num_computed=np.array(num_computed, np.int32),
            samples=samples,
            prompt_tokens=np.array(prompt_tokens, np.int32),
            new_rows=self.new_rows,
            appended=[(r.row, before, r.block_ids[before:]) for r, before in self.grown],
            freed_rows=freed_rows,
            req_ids=req_ids,
            prompt_spans=prompt_spans,
        )
        return plan, Launched(step_id, sampling, unwanted, scoring)


def score(
    request: Request,
    start: int,
    end: int,
    first_token: int,
    spans: list[PromptSpan],
    scoring: list[tuple[Request, int]],
) -> None:
    """Report the unscored prompt tokens that computing tokens start .. end - 1 tells of.

    `first_token`: place of token `start` in the step. A resumed request may compute only tokens that
    were scored before it was preempted: then there are none.
    """
    first, past = request.num_scored, min(end + 1, request.num_prompt_tokens)
    num_top = request.params.prompt_logprobs
    assert start < first, "a prompt to be scored took too much from the cache"
    if first >= past or num_top is None:
        return
    span = PromptSpan(
        first_token=first_token + first - 1 - start,
        token_ids=np.array(request.token_ids[first:past], np.int32),
        num_top=num_top,
    )
    spans.append(span)
    scoring.append((request, first))
    request.num_scored = past
