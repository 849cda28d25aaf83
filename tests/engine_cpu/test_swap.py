"""Preempted requests whose KV blocks went to host memory and back: the same tokens, computed once."""

import numpy as np
import pytest
import torch

from engine.api.config import ConfigError
from engine.attention.base import allocate_kv_cache
from engine.main import stats_of
from engine.plan import StepPlan
from engine.runner import host_blocks
from engine.runner.host_blocks import HostBlocks
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.test_equalities import prompts, run_workload
from tests.engine_cpu.tiny_models import make_tiny

SWAP = {"preemption_mode": "swap", "swap_space": 0.05}
SMALL = {"num_blocks": 16, "admission": "greedy"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def undisturbed(tiny):
    """Every kind of sampling, penalties, seeds and stops, in a pool with room for all."""
    outcome, harness = run_workload(tiny, num_blocks=512)
    assert harness.scheduler.preemptions == 0
    return outcome


def count_computed(harness: Harness) -> list[StepPlan]:
    """Collects the plans from now on."""
    plans: list[StepPlan] = []
    launch = harness.loop.runner.launch

    def noted(plan: StepPlan):
        plans.append(plan)
        return launch(plan)

    harness.loop.runner.launch = noted
    return plans


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_swapped_equals_undisturbed(tiny, undisturbed, overlap, caching):
    outcome, harness = run_workload(
        tiny, overlap=overlap, enable_prefix_caching=caching, **SMALL, **SWAP
    )
    assert outcome == undisturbed
    tier = harness.scheduler.kv.tier
    assert harness.scheduler.preemptions > 5
    assert tier.num_saved > 10
    assert tier.num_loaded > 10
    assert tier.num_used == 0, "host blocks are kept for requests that have ended"


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_full_tier_falls_back_to_computing_again(tiny, undisturbed, overlap):
    block_gib = 2 * 2 * 2 * 16 * 16 * 4 / 2**30
    settings = {"preemption_mode": "swap", "swap_space": 3.5 * block_gib}
    outcome, harness = run_workload(tiny, overlap=overlap, **SMALL, **settings)
    assert outcome == undisturbed
    tier = harness.scheduler.kv.tier
    assert tier.num_slots < 20
    assert tier.num_saved > tier.num_loaded > 0


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_overwritten_prefixes_come_back_from_the_host(tiny, undisturbed, overlap):
    outcome, harness = run_workload(tiny, overlap=overlap, swap_space=0.05, **SMALL)
    assert outcome == undisturbed
    assert harness.scheduler.kv.tier.num_loaded > 0
    assert harness.scheduler.kv.tier.num_swapped == 0


def test_a_prompt_that_the_device_has_lost_is_a_hit(tiny):
    harness = Harness(tiny, num_blocks=20, swap_space=0.05)
    prompt, *others = prompts(5, seed=1, low=100, high=101)
    first = harness.generate(prompt, max_tokens=10)
    for other in others:
        harness.generate(other, max_tokens=60)
    assert harness.scheduler.kv.tier.num_saved >= 6
    again = harness.generate(prompt, max_tokens=10)
    assert again.cached_tokens == 96
    assert again.token_ids == first.token_ids
    harness.assert_empty()


def test_what_is_swapped_in_is_not_computed_again(tiny):
    """Two requests grow until one gives way; it comes back and computes less than two blocks again."""
    everyone = prompts(2, seed=2, low=60, high=61)
    computed = {}
    for mode in ("recompute", "swap"):
        swap = SWAP if mode == "swap" else {}
        harness = Harness(tiny, num_blocks=12, admission="greedy", **swap)
        plans = count_computed(harness)
        for i, prompt in enumerate(everyone):
            harness.add(i, prompt, max_tokens=100)
        harness.run()
        harness.assert_empty()
        assert harness.scheduler.preemptions > 0
        computed[mode] = sum(plan.total_tokens for plan in plans)
        if mode == "swap":
            again = computed[mode] - 2 * 159
            assert 0 <= again <= 2 * harness.block_size * harness.scheduler.preemptions
            assert sum(len(plan.swap_in) for plan in plans) == harness.scheduler.kv.tier.num_loaded
            assert all(plan.new_rows for plan in plans if plan.swap_in)
    assert computed["swap"] < computed["recompute"]


def test_the_engine_counts_what_is_swapped_out(tiny):
    harness = Harness(tiny, num_blocks=12, admission="greedy", **SWAP)
    for i, prompt in enumerate(prompts(3, seed=3, low=60, high=61)):
        harness.add(i, prompt, max_tokens=80)
    seen = []
    while harness.loop.has_work():
        harness.step()
        seen.append(stats_of(harness.loop, 0))
    assert max(stats.num_swapped for stats in seen) >= 1
    assert max(stats.num_used_host_blocks for stats in seen) >= 2
    assert seen[-1].num_swapped == seen[-1].num_used_host_blocks == 0
    assert seen[-1].num_host_blocks == harness.engine.resolved.num_host_blocks > 100


def test_an_abort_while_swapped_out_frees_the_host(tiny):
    harness = Harness(tiny, num_blocks=12, admission="greedy", **SWAP)
    for i, prompt in enumerate(prompts(3, seed=3, low=60, high=61)):
        harness.add(i, prompt, max_tokens=80)
    tier = harness.scheduler.kv.tier
    while not tier.num_used:
        harness.step()
    harness.abort(*tier._swapped)
    assert tier.num_used == 0
    harness.run()
    harness.assert_empty()


@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        ({"preemption_mode": "swap"}, ["--preemption-mode swap", "--swap-space"], 2),
        ({"preemption_mode": "drop"}, ["--preemption-mode drop", "recompute or swap"], 2),
        ({"swap_space": -1.0}, ["--swap-space -1", "0 (none)"], 2),
        ({"swap_space": float("nan")}, ["--swap-space nan"], 2),
        ({"swap_space": 1e-9}, ["--swap-space 1e-09", "none fits"], 2),
        ({"swap_space": 2.0**20}, ["--swap-space 1.04858e+06", "free memory"], 75),
    ],
)
def test_what_cannot_work_is_refused_by_name(tiny, settings, words, code):
    with pytest.raises(ConfigError) as caught:
        Harness(tiny, **settings)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.exit_code == code


def test_memory_without_a_use_is_not_taken(tiny):
    harness = Harness(tiny, swap_space=0.05, enable_prefix_caching=False)
    assert harness.scheduler.kv.tier is None
    assert harness.loop.runner.host_blocks is None
    assert "without prefix caching" in harness.engine.resolved.reasons["num_host_blocks"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_host_blocks_move_whole_blocks_in_all_layers(dtype, monkeypatch):
    monkeypatch.setattr(host_blocks, "PAIRS_PER_COPY", 2)  # several copies in a row
    kv = allocate_kv_cache(3, 10, 2, 4, 8, dtype, torch.device("cpu"))
    rng = np.random.default_rng(0)
    for one in (*kv.k, *kv.v):
        one.copy_(torch.from_numpy(rng.integers(-8, 8, one.shape)).to(dtype))
    before = [one.float().clone() for one in (*kv.k, *kv.v)]
    blocks = HostBlocks(kv, 5)
    blocks.copy_out([(1, 4), (9, 0), (3, 2)])
    blocks.copy_in([(4, 9), (0, 1), (4, 5)])
    for one, old in zip((*kv.k, *kv.v), before, strict=True):
        want = old.clone()
        want[[9, 1, 5]] = old[[1, 9, 1]]
        assert torch.equal(one.float(), want)
    assert all(one.is_contiguous() for one in blocks.arrays)
    assert blocks.arrays[0].data_ptr() % host_blocks.PAGE_BYTES == 0
