"""A toy in place of the model runner, to prove the true scheduler right.

The "KV" of a token is its id, stored by slot. In every step and for every attended position the toy
checks that the slot found through the block table holds exactly the request's own token, and the next
token is a hash of what it read. One block given to two requests, named too early, overwritten or freed
too soon therefore shows at once, and a wrong token changes all that follow. With a host tier, after every
launch each name that can be found, on the device or on the host, must lead to the tokens that it stands
for.

Steps run in the order of their launch, as on one compute stream. `depth` steps stay in flight: with 0
each is committed at once; with 1 (overlap) only after the next one was planned and launched.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from engine.api.hashing import block_names
from engine.api.messages import AbortReason, AddRequest, FinishReason, StepOutput
from engine.api.sampling import SamplingParams
from engine.kv.host_tier import HostTier
from engine.kv.manager import KVCacheManager
from engine.plan import SpanLogprobs, StepPlan, StepResult
from engine.request import Request
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler

VOCAB = 50
EOS = 7
STOP_TOKEN = 11
MODEL_LEN = 64


def next_token(tokens: np.ndarray) -> int:
    """The toy model: int32 [n] -> a token id that depends on all of them."""
    return crc32(tokens.tobytes()) % VOCAB


def undisturbed_scores(prompt: list[int]) -> list[float]:
    """The toy's log-probabilities of all prompt tokens but the first."""
    return [score(np.array(prompt[:end], np.int32), prompt[end]) for end in range(1, len(prompt))]


def score(before: np.ndarray, token: int) -> float:
    return -float(crc32(before.tobytes(), token) % 1000)


def undisturbed(prompt: list[int], params: SamplingParams, max_model_len: int) -> list[int]:
    """The completion by definition, without any engine."""
    tokens = list(prompt)
    output: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    limit = max_model_len - len(prompt)
    if params.max_tokens is not None:
        limit = min(limit, params.max_tokens)
    while len(output) < limit:
        token = next_token(np.array(tokens, np.int32))
        tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= params.min_tokens:
            break
    return output


class ToyRunner:
    """Executes plans on arrays indexed by row, block and slot."""

    def __init__(
        self, num_rows: int, num_blocks: int, block_size: int, budget: int, num_slots: int = 0
    ) -> None:
        self.block_size = block_size
        self.budget = budget
        self.num_computed = 0  # tokens since the start
        self.kv = np.full(num_blocks * block_size, -1, np.int32)
        self.host = np.full((num_slots, block_size), -2, np.int32)
        self.block_table = np.zeros((num_rows, MODEL_LEN // block_size + 2), np.int64)
        self.history: list[list[int] | None] = [None] * num_rows  # the row's true tokens

    def launch(self, plan: StepPlan) -> StepResult:
        assert plan.total_tokens <= self.budget, "the token budget was exceeded"
        assert 0 not in plan.rows, "row 0 is reserved"
        assert len(set(plan.rows.tolist())) == plan.batch_size, "a row appears twice"
        assert (plan.num_tokens > 0).all(), "a row computes nothing"
        self._swap(plan)
        self._apply_changes(plan)
        spans = self._write(plan)
        self.num_computed += plan.total_tokens
        sampled = []
        for row, end, samples in spans:
            history = self.history[row]
            assert history is not None
            read = self.kv[self._slots(row, 0, end)]
            assert read.tolist() == history[:end], f"row {row} attends to foreign KV"
            if samples:
                assert end == len(history), "sampled before the last known token"
                sampled.append((row, next_token(read)))
        scores = self._score(plan, spans)
        for row, token in sampled:
            history = self.history[row]
            assert history is not None
            history.append(token)
        tokens = np.array([token for _, token in sampled], np.int32)
        return StepResult(tokens, prompt_logprobs=scores)

    def _score(self, plan: StepPlan, rows: list[tuple[int, int, bool]]) -> list[SpanLogprobs]:
        """Prompt tokens, each from all before it, which the step has to have computed last."""
        step = [  # (row, position) of each token of the step
            (row, position)
            for (row, end, _), count in zip(rows, plan.num_tokens.tolist(), strict=True)
            for position in range(end - count, end)
        ]
        results = []
        for span in plan.prompt_spans:
            assert span.token_ids.size, "a span without tokens"
            values = []
            for (row, position), token in zip(
                step[span.first_token :], span.token_ids.tolist(), strict=False
            ):
                history = self.history[row]
                assert history is not None
                assert history[position + 1] == token, "a span tells of a token not in its place"
                values.append(score(self.kv[self._slots(row, 0, position + 1)], token))
            n = len(values)
            assert n == span.token_ids.size, "a span reaches beyond the step"
            results.append(
                SpanLogprobs(
                    np.array(values, np.float32),
                    np.ones(n, np.int32),
                    np.zeros((n, 0), np.int32),
                    np.zeros((n, 0), np.float32),
                )
            )
        return results

    def _swap(self, plan: StepPlan) -> None:
        blocks = self.kv.reshape(-1, self.block_size)
        written = [slot for _, slot in plan.swap_out]
        assert len(set(written)) == len(written), "a slot is written twice"
        targets = [block for _, block in plan.swap_in]
        assert len(set(targets)) == len(targets), "a block is copied in twice"
        assert 0 not in [*targets, *(block for block, _ in plan.swap_out)], "block 0 is reserved"
        for block, slot in plan.swap_out:
            self.host[slot] = blocks[block]
        for slot, block in plan.swap_in:
            blocks[block] = self.host[slot]

    def _apply_changes(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            assert self.history[row] is not None, f"row {row} freed twice"
            self.history[row] = None
        for init in plan.new_rows:
            assert self.history[init.row] is None, f"row {init.row} has an owner"
            assert 0 not in init.block_ids, "block 0 is reserved"
            self.history[init.row] = init.token_ids.tolist()
            self.block_table[init.row] = 0
            self.block_table[init.row, : len(init.block_ids)] = init.block_ids
        for row, index, block_ids in plan.appended:
            assert self.history[row] is not None, "blocks for a row without owner"
            assert self.block_table[row, index - 1] != 0, "a gap in the block table"
            assert self.block_table[row, index] == 0, "a block table entry was replaced"
            self.block_table[row, index : index + len(block_ids)] = block_ids

    def _write(self, plan: StepPlan) -> list[tuple[int, int, bool]]:
        """Store the step's own tokens; returns (row, tokens with KV, samples)."""
        taken = 0
        spans = []
        for index, row in enumerate(plan.rows.tolist()):
            start, count = int(plan.num_computed[index]), int(plan.num_tokens[index])
            history = self.history[row]
            assert history is not None, f"row {row} runs without owner"
            if index < plan.num_decodes:
                assert count == 1
                assert start == len(history) - 1, "a decode consumes the last sampled token"
                tokens = history[start:]
            else:
                tokens = plan.prompt_tokens[taken : taken + count].tolist()
                taken += count
            slots = self._slots(row, start, start + count)
            assert slots.min() >= self.block_size, "a token is written to the reserved block"
            self.kv[slots] = tokens
            spans.append((row, start + count, bool(plan.samples[index])))
        assert taken == len(plan.prompt_tokens), "prompt tokens without a row"
        return spans

    def _slots(self, row: int, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        blocks = self.block_table[row, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size


@dataclass
class Completion:
    """All that a client would have received for one request."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    rejected: str | None = None
    num_cached: int = 0
    scores: list[float] = field(default_factory=list)  # of prompt tokens from the second on

    @property
    def has_ended(self) -> bool:
        return self.finish is not None or self.rejected is not None


class ToyEngine:
    """Scheduler and toy runner, driven as engine.loop drives the real ones."""

    def __init__(
        self,
        num_blocks: int = 24,
        block_size: int = 4,
        budget: int = 16,
        max_num_seqs: int = 8,
        admission: str = "greedy",
        depth: int = 0,
        prefix_caching: bool = True,
        chunked: bool = True,
        check_invariants: bool = True,
        num_slots: int = 0,
        keeps_all: bool = False,
    ) -> None:
        """`num_slots`: blocks of the host tier; 0: none."""
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MODEL_LEN,
            block_size=block_size,
            enable_chunked_prefill=chunked,
            admission=admission,
            eos_token_ids=(EOS,),
            check_invariants=check_invariants,
            num_rows=max_num_seqs + 2,
        )
        self.tier = HostTier(num_slots, keeps_all) if num_slots else None
        self.kv = KVCacheManager(num_blocks, block_size, prefix_caching, self.tier)
        self.scheduler = Scheduler(config, self.kv)
        self.runner = ToyRunner(config.num_rows, num_blocks, block_size, budget, num_slots)
        self.tokens_of: dict[bytes, list[int]] = {}  # by name; with a tier
        if self.tier is not None:
            self._learn_names()
        self.depth = depth
        self.completions: dict[int, Completion] = {}
        self.num_wasted = 0  # samples that nobody wanted
        self._in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self._now_ns = 0

    def add(
        self,
        req_id: int,
        prompt: list[int],
        params: SamplingParams | None = None,
        prior: list[int] | None = None,
        priority: int = 0,
        salt: str = "",
    ) -> None:
        """`prior`: output generated before a restart."""
        token_ids = array("i", prompt + (prior or [])).tobytes()
        self.completions[req_id] = Completion()
        self._now_ns += 1
        self.scheduler.add(
            AddRequest(
                req_id=req_id,
                token_ids=token_ids,
                block_names=block_names(token_ids, self.kv.block_size, salt),
                params=params or SamplingParams(),
                arrival_ns=self._now_ns,
                num_prior_output=len(prior or []),
                priority=priority,
                cache_salt=salt,
            ),
            self._now_ns,
        )

    def abort(self, *req_ids: int) -> None:
        self.scheduler.abort(list(req_ids), AbortReason.CLIENT)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> StepPlan | None:
        """One pass of the loop. Returns the plan that was launched."""
        self._now_ns += 1000
        plan = self.scheduler.schedule(self._now_ns)
        assert plan or self._in_flight or not self.scheduler.num_running, "running, yet no plan"
        if plan is not None:
            self._in_flight.append((plan, self.runner.launch(plan)))
            if self.tier is not None:
                self._check_names(plan, self.tier)
        if self._in_flight and (plan is None or len(self._in_flight) > self.depth):
            self._commit(*self._in_flight.popleft())
        self.receive(self.scheduler.take_output(0, self._now_ns))
        return plan

    def _learn_names(self) -> None:
        """Take down the tokens of each block as it is named."""
        name_full_blocks, size = self.kv.name_full_blocks, self.kv.block_size

        def name_and_learn(request: Request) -> None:
            first = request.num_named_blocks
            name_full_blocks(request)
            for index in range(first, request.num_named_blocks):
                tokens = request.token_ids[index * size : (index + 1) * size].tolist()
                self.tokens_of[request.block_names[index]] = tokens

        self.kv.name_full_blocks = name_and_learn  # type: ignore[method-assign]

    def _check_names(self, plan: StepPlan, tier: HostTier) -> None:
        """What can be found by name is what the name says."""
        pool = self.kv.pool
        blocks = self.runner.kv.reshape(-1, self.kv.block_size)
        for block in range(1, pool.num_blocks):
            name = pool.name_of(block)
            if name is not None:
                assert blocks[block].tolist() == self.tokens_of[name], f"block {block} is misnamed"
        for name, slot in tier._slots.items():
            assert self.runner.host[slot].tolist() == self.tokens_of[name], (
                f"slot {slot} is misnamed"
            )
        for _, block in plan.swap_in:
            assert pool.name_of(block) is not None, "a block is copied in and not named"

    def run(self, max_steps: int = 5000) -> None:
        """Step until everything has ended."""
        idle = 0
        for _ in range(max_steps):
            if not self.has_work:
                break
            idle = 0 if self.step() is not None else idle + 1
            assert idle < 3 + self.depth, "requests wait, and nothing runs"
        assert not self.has_work, "the engine did not come to an end"
        self.receive(self.scheduler.take_output(0, self._now_ns))

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        before = self.scheduler.generation_tokens
        self.scheduler.commit(plan, result)
        self.num_wasted += len(result.token_ids) - (self.scheduler.generation_tokens - before)

    def receive(self, output: StepOutput | None) -> None:
        """Take an output apart as the tokenizer process does."""
        if output is None:
            return
        assert sum(output.counts) == len(output.token_ids)
        for req_id, code, message in output.rejected:
            completion = self.completions[req_id]
            assert not completion.has_ended, f"request {req_id} ended twice"
            assert message
            completion.rejected = code
        for req_id, num_cached, _ in output.started:
            self.completions[req_id].num_cached = num_cached
        for span in output.prompt_logprobs:
            completion = self.completions[span.req_id]
            assert not completion.tokens, "a prompt's log-probabilities come before tokens"
            assert not completion.has_ended, f"request {span.req_id} spoke after its end"
            assert span.first == 1 + len(completion.scores), "a prompt token left out or twice"
            completion.scores += np.frombuffer(span.logprobs, np.float32).tolist()
        finished = {index: (reason, token) for index, reason, token in output.finished}
        assert len(finished) == len(output.finished)
        position = 0
        for index, (req_id, count) in enumerate(zip(output.req_ids, output.counts, strict=True)):
            completion = self.completions[req_id]
            assert not completion.has_ended, f"request {req_id} spoke after its end"
            completion.tokens += output.token_ids[position : position + count]
            position += count
            if index in finished:
                completion.finish, completion.stop_token = finished[index]

    def assert_clean(self) -> None:
        """Everything has ended, all tables are empty, all blocks are back."""
        assert all(c.has_ended for c in self.completions.values())
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        assert self.kv.num_free_blocks == self.kv.num_usable_blocks
        if self.tier is not None:
            assert self.tier.num_swapped == 0
            assert self.tier.keeps_all or self.tier.num_used == 0
        if not self.kv.enable_prefix_caching:
            assert all(self.kv.pool.name_of(block) is None for block in self.kv.pool.free_list())
            assert all(c.num_cached == 0 for c in self.completions.values())
        self.scheduler.check_invariants()
