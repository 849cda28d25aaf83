"""Whatever is swapped, every request gets the tokens that it would have got alone.

Random workloads through the true scheduler with a host tier and the toy engine, which checks after each
step that every name leads to the tokens it stands for, on the device and on the host.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.messages import FinishReason
from engine.api.sampling import SamplingParams
from tests.unit.test_scheduler_properties import Job, expected, random_job, serve
from tests.unit.toy_engine import VOCAB, ToyEngine


def hungry_job(rng: random.Random, shared: list[list[int]]) -> Job:
    """As `random_job`, mostly with a long completion."""
    job = random_job(rng, shared)
    if rng.random() < 0.7:
        job.params.max_tokens = rng.randrange(15, 35)
        job.params.min_tokens = min(job.params.min_tokens, job.params.max_tokens)
        job.params.ignore_eos = True
    return job


def random_engine(rng: random.Random, depth: int, keeps_all: bool, caching: bool) -> ToyEngine:
    """Small pools, and tiers from hardly any slots to more than are ever needed."""
    chunked = rng.random() < 0.85
    return ToyEngine(
        num_blocks=rng.choice([17, 18, 22]),
        block_size=rng.choice([4, 4, 5]),
        budget=rng.choice([7, 16, 64] if chunked else [42, 64]),
        max_num_seqs=rng.choice([4, 8]),
        admission=rng.choice(["greedy", "greedy", "greedy", "peak"]),
        depth=depth,
        prefix_caching=caching,
        chunked=chunked,
        num_slots=rng.choice([1, 3, 10, 200]),
        keeps_all=keeps_all,
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(("keeps_all", "caching"), [(False, True), (False, False), (True, True)])
def test_tokens_are_those_of_an_undisturbed_request(
    keeps_all: bool, caching: bool, depth: int
) -> None:
    saved = loaded = preemptions = 0
    for seed in range(25):
        rng = random.Random(seed)
        shared = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
        jobs = [hungry_job(rng, shared) for _ in range(20)]
        engine = random_engine(rng, depth, keeps_all, caching)
        serve(engine, jobs, rng)
        for req_id, job in enumerate(jobs):
            completion = engine.completions[req_id]
            assert completion.tokens == expected(job), f"seed {seed}, request {req_id}"
            assert completion.finish in (FinishReason.STOP, FinishReason.LENGTH)
        assert engine.tier is not None
        saved += engine.tier.num_saved
        loaded += engine.tier.num_loaded
        preemptions += engine.scheduler.preemptions
    assert preemptions > 50, "the pools are too large to prove anything"
    assert saved > 50
    print(f"{preemptions} preemptions, {saved} saved, {loaded} loaded")
    assert loaded > 20


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("add"), st.integers(0, 10**6)),
        st.tuples(st.just("abort"), st.integers(0, 10**6)),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(OPS, st.integers(0, 10**6), st.sampled_from([(False, True), (False, False), (True, True)]))
def test_aborts_at_any_moment_leave_no_trace(
    ops: list[tuple[str, int]], seed: int, mode: tuple[bool, bool]
) -> None:
    rng = random.Random(seed)
    engine = random_engine(rng, rng.choice([0, 1, 2]), *mode)
    shared = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    jobs, aborted = [], set()
    for op, value in ops:
        if op == "step":
            for _ in range(value):
                engine.step()
        elif op == "add":
            job = hungry_job(random.Random(value), shared)
            engine.add(len(jobs), job.prompt, job.params, priority=job.priority, salt=job.salt)
            jobs.append(job)
        elif jobs:
            req_id = value % len(jobs)
            engine.abort(req_id, req_id)
            aborted.add(req_id)
    engine.run()
    engine.assert_clean()
    for req_id, job in enumerate(jobs):
        completion = engine.completions[req_id]
        if completion.finish is FinishReason.ABORT:
            assert req_id in aborted
            assert completion.tokens == expected(job)[: len(completion.tokens)]
        else:
            assert completion.tokens == expected(job)


def crowd(**settings: object) -> ToyEngine:
    """Six requests of 40 tokens in a pool for less than three of them; all have ended."""
    engine = ToyEngine(num_blocks=26, budget=64, **settings)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for req_id in range(6):
        engine.add(req_id, [req_id] * 20, params)
    engine.run()
    engine.assert_clean()
    assert engine.scheduler.preemptions > 0
    return engine


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_what_is_swapped_in_is_not_computed_again(caching: bool, depth: int) -> None:
    """Each preemption costs less than three blocks: the last partial one, one whose last token was not
    known yet, and the token that is sampled from."""
    needed = 6 * 39  # the KV of the last token is never computed
    swapped = crowd(num_slots=100, prefix_caching=caching, depth=depth)
    recomputed = crowd(prefix_caching=caching, depth=depth)
    extra = swapped.runner.num_computed - needed - swapped.num_wasted
    assert 0 <= extra <= swapped.scheduler.preemptions * 2 * swapped.kv.block_size
    assert swapped.runner.num_computed < recomputed.runner.num_computed
    assert swapped.tier is not None
    assert swapped.tier.num_loaded > 0


def test_a_full_tier_recomputes() -> None:
    engine = crowd(num_slots=1)
    assert engine.tier is not None
    assert engine.tier.num_saved > engine.tier.num_loaded


def test_a_second_level_serves_prompts_that_the_device_has_lost() -> None:
    engine = ToyEngine(num_blocks=18, budget=64, num_slots=64, keeps_all=True)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [7, 8, 9] * 12
    engine.add(0, prompt, params)
    engine.run()
    for req_id in range(1, 4):
        engine.add(req_id, [req_id] * 50, params)  # overwrites all that the first one left
        engine.run()
    assert engine.kv.pool.find(next(iter(engine.tokens_of))) is None
    engine.add(9, prompt, params)
    engine.run()
    engine.assert_clean()
    assert engine.completions[9].num_cached == 32
    assert engine.completions[9].tokens == engine.completions[0].tokens


def test_the_toy_notices_a_wrong_slot() -> None:
    """The proof is worth what the toy sees: damage the host's memory, and it must complain."""
    engine = ToyEngine(num_blocks=26, budget=64, num_slots=100)
    for req_id in range(6):
        engine.add(req_id, [req_id] * 20, SamplingParams(max_tokens=20, ignore_eos=True))
    assert engine.tier is not None
    while not engine.tier.num_used:
        engine.step()
    engine.runner.host += 1
    with pytest.raises(AssertionError, match="is misnamed"):
        engine.run()
