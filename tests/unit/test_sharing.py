"""A short prompt does not wait for the end of a long one; whoever gains nothing from it waits in order."""

import pytest

from tests.unit.test_scheduler import IN_FLIGHT, free_run, prompt_of
from tests.unit.toy_engine import ToyEngine


def long_prefill(**options: object) -> ToyEngine:
    """An engine in which a prompt of 40 tokens has had its first chunk."""
    engine = ToyEngine(**{"budget": 8, "num_blocks": 60, **options})
    engine.add(1, prompt_of(40), free_run(2))
    engine.step()
    return engine


@IN_FLIGHT
def test_a_short_prompt_starts_beside_a_long_one(depth: int) -> None:
    engine = long_prefill(depth=depth, budget=12)
    engine.add(2, prompt_of(2, 9), free_run(3))
    engine.add(3, prompt_of(2, 11), free_run(3))
    plan = engine.step()
    assert (plan.req_ids, plan.num_tokens.tolist()) == ([1, 2], [10, 2])
    assert plan.samples.tolist() == [False, True]
    plan = engine.step()  # one more in each step: decode, long prompt, newcomer
    assert sorted(plan.req_ids) == [1, 2, 3]
    assert plan.total_tokens == 12
    engine.run()
    engine.assert_clean()


def test_a_prompt_that_takes_more_than_its_share_waits() -> None:
    engine = long_prefill()
    engine.add(2, prompt_of(3, 9), free_run(2))
    assert engine.step().num_tokens.tolist() == [8]


def test_what_counts_is_what_the_cache_does_not_have() -> None:
    engine = ToyEngine(budget=8, num_blocks=60)
    engine.add(9, prompt_of(12, 9), free_run(1))
    engine.run()
    engine.add(1, prompt_of(40), free_run(2))
    engine.step()
    engine.add(2, prompt_of(14, 9), free_run(2))  # 12 of them are cached
    plan = engine.step()
    assert (plan.req_ids, plan.num_tokens.tolist()) == ([1, 2], [6, 2])


@pytest.mark.parametrize("options", [{"max_num_seqs": 1}, {"num_blocks": 12}])
def test_nothing_is_kept_for_one_that_cannot_start(options: dict[str, int]) -> None:
    """No seat, or no blocks at the future peak: the whole budget is the long prompt's."""
    engine = long_prefill(admission="peak", **options)
    engine.add(2, prompt_of(2, 9), free_run(40))
    assert engine.step().num_tokens.tolist() == [8]
    engine.run()
    engine.assert_clean()


def test_a_stream_of_short_prompts_leaves_a_long_one_most_of_the_budget() -> None:
    engine = long_prefill()
    steps = 1
    while len(engine.completions[1].tokens) == 0:
        engine.add(100 + steps, prompt_of(2, steps), free_run(1))
        engine.step()
        steps += 1
    assert steps <= 1 + -(-32 // 6)
    engine.run()
    engine.assert_clean()
