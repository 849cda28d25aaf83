"""The backbone: whatever happens, every request gets the tokens it would have got alone.

Random workloads on small pools, through the true scheduler and the toy engine. Overlapped, in
sequence, preempted, with prefix hits and in chunks: token for token the undisturbed completion.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.messages import FinishReason
from engine.api.sampling import SamplingParams
from tests.unit.toy_engine import (
    MODEL_LEN,
    STOP_TOKEN,
    VOCAB,
    ToyEngine,
    undisturbed,
    undisturbed_scores,
)


@dataclass
class Job:
    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: str


def random_job(rng: random.Random, shared: list[list[int]]) -> Job:
    """Most prompts begin like others; lengths, limits and stops vary."""
    start = rng.choice(shared)[: rng.randrange(1, 30)] if rng.random() < 0.6 else []
    prompt = start + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))]
    max_tokens = rng.choice([0, 1, 2, *(rng.randrange(1, 25) for _ in range(4))])
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.2 else 0,
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[STOP_TOKEN] if rng.random() < 0.3 else [],
        prompt_logprobs=0 if rng.random() < 0.3 else None,
    )
    return Job(prompt, params, rng.choice([0, 0, 0, 1, -1]), rng.choice(["", "", "tenant"]))


def random_engine(rng: random.Random, depth: int, check_invariants: bool = True) -> ToyEngine:
    """Small pools and budgets, yet each job fits when it is alone (17 blocks for 64 tokens)."""
    chunked = rng.random() < 0.85
    return ToyEngine(
        num_blocks=rng.choice([17, 18, 22, 40]),
        block_size=rng.choice([4, 4, 5]),
        budget=rng.choice([2, 7, 16, 64] if chunked else [42, 48, 64]),
        max_num_seqs=rng.choice([1, 3, 8]),
        admission=rng.choice(["greedy", "greedy", "peak"]),
        depth=depth,
        prefix_caching=rng.random() < 0.8,
        chunked=chunked,
        check_invariants=check_invariants,
    )


def expected(job: Job) -> list[int]:
    return undisturbed(job.prompt, job.params, MODEL_LEN)


def expected_scores(job: Job) -> list[float]:
    return [] if job.params.prompt_logprobs is None else undisturbed_scores(job.prompt)


def serve(engine: ToyEngine, jobs: list[Job], rng: random.Random) -> None:
    """Requests arrive at random moments; step until all have ended."""
    todo = list(enumerate(jobs))[::-1]
    while todo:
        for _ in range(rng.randrange(3)):
            if todo:
                req_id, job = todo.pop()
                engine.add(req_id, job.prompt, job.params, priority=job.priority, salt=job.salt)
        engine.step()
    engine.run()
    engine.assert_clean()


@pytest.mark.parametrize("batch", range(10))
def test_tokens_are_those_of_an_undisturbed_request(batch: int) -> None:
    """30 workloads x 20 requests, in sequence, overlapped and with two steps in flight."""
    preemptions = hits = wasted = 0
    for seed in range(batch * 30, batch * 30 + 30):
        rng = random.Random(seed)
        shared = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
        jobs = [random_job(rng, shared) for _ in range(20)]
        for depth in (0, 1, 2):
            engine = random_engine(rng, depth, check_invariants=seed % 5 == 0)
            serve(engine, jobs, rng)
            for req_id, job in enumerate(jobs):
                completion = engine.completions[req_id]
                assert completion.tokens == expected(job), f"seed {seed}, request {req_id}"
                assert completion.scores == expected_scores(job), f"seed {seed}, request {req_id}"
                assert completion.finish in (FinishReason.STOP, FinishReason.LENGTH)
            preemptions += engine.scheduler.preemptions
            hits += engine.scheduler.prefix_hit_tokens
            wasted += engine.num_wasted
    assert preemptions > 0, "the pools are too large to prove anything"
    assert hits > 0
    assert wasted > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_random_restarts_continue_with_the_same_tokens(depth: int) -> None:
    """An engine dies at a random step; another takes over from what was sent so far."""
    for seed in range(40):
        rng = random.Random(1000 + seed)
        shared = [[rng.randrange(VOCAB) for _ in range(30)]]
        jobs = [random_job(rng, shared) for _ in range(6)]
        first = random_engine(rng, depth, check_invariants=False)
        for req_id, job in enumerate(jobs):
            first.add(req_id, job.prompt, job.params, salt=job.salt)
        for _ in range(rng.randrange(25)):
            first.step()
        second = random_engine(rng, depth, check_invariants=False)
        for req_id, job in enumerate(jobs):
            if not first.completions[req_id].has_ended:
                prior = first.completions[req_id].tokens
                second.add(req_id, job.prompt, job.params, prior=prior, salt=job.salt)
        second.run()
        for req_id, job in enumerate(jobs):
            tokens = first.completions[req_id].tokens.copy()
            if req_id in second.completions:
                tokens += second.completions[req_id].tokens
            assert tokens == expected(job), f"seed {seed}, request {req_id}"


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("add"), st.integers(0, 10**6)),
        st.tuples(st.just("abort"), st.integers(0, 10**6)),
        st.tuples(st.just("impossible"), st.integers(0, 2)),
    ),
    min_size=30,
    max_size=120,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ops=OPS, seed=st.integers(0, 10**6), depth=st.integers(0, 2))
def test_random_operations_keep_all_promises(
    ops: list[tuple[str, int]], seed: int, depth: int
) -> None:
    """Invariants hold after every schedule and commit (the scheduler checks them itself), the toy
    checks budget, rows and KV, and at the end each request has ended exactly once, with a prefix of
    the right tokens if it was aborted."""
    rng = random.Random(seed)
    engine = random_engine(rng, depth)
    shared = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    jobs: dict[int, Job] = {}
    aborted = set()
    for op, value in ops:
        if op == "step":
            for _ in range(value):
                engine.step()
        elif op == "add":
            req_id = len(engine.completions)
            job = random_job(random.Random(value), shared)
            jobs[req_id] = job
            engine.add(req_id, job.prompt, job.params, priority=job.priority, salt=job.salt)
        elif op == "abort":
            req_id = value % (len(engine.completions) + 2)  # two of them unknown
            engine.abort(req_id, req_id)
            aborted.add(req_id)
        else:
            req_id = len(engine.completions)
            length, max_tokens = ((0, 5), (MODEL_LEN, 5), (MODEL_LEN + 40, None))[value]
            engine.add(req_id, [1] * length, SamplingParams(max_tokens=max_tokens))
    engine.run()
    engine.assert_clean()
    for req_id, completion in engine.completions.items():
        if req_id not in jobs:
            assert completion.rejected
            continue
        tokens = expected(jobs[req_id])
        if completion.finish is FinishReason.ABORT:
            assert req_id in aborted
            assert completion.tokens == tokens[: len(completion.tokens)]
        else:
            assert completion.tokens == tokens
            assert completion.scores == expected_scores(jobs[req_id])


@pytest.mark.parametrize("wrong_block", ["foreign", "stale"])
def test_the_toy_notices_wrong_kv(wrong_block: str) -> None:
    """The proof is worth what the toy sees: damage a block table, and it must complain."""
    engine = ToyEngine(num_blocks=40, budget=64, prefix_caching=False, check_invariants=False)
    for req_id in (1, 2):
        prompt = [req_id * 10 + i for i in range(5)]
        engine.add(req_id, prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    engine.step()
    first, second = engine.scheduler._running.values()
    row = engine.runner.block_table[first.row]
    row[0] = second.block_ids[0] if wrong_block == "foreign" else engine.kv.pool.free_list()[0]
    with pytest.raises(AssertionError, match="attends to foreign KV"):
        engine.run()
