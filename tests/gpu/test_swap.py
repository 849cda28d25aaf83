"""KV blocks to pinned host memory and back, by themselves and in the whole engine."""

import gc

import pytest
import torch

from engine.attention.base import allocate_kv_cache
from engine.plan import StepPlan
from engine.runner import host_blocks
from engine.runner.host_blocks import HostBlocks
from tests.engine_cpu.harness import Harness
from tests.gpu.engine_cases import build, check_against_transformers, prompts
from tests.gpu.test_engine import tiny

__all__ = ["tiny"]  # a fixture


@pytest.fixture(autouse=True)
def free_memory():
    """Unpin now what a test has pinned, and not while the next one captures a graph."""
    yield
    gc.collect()


CACHE_DTYPES = [torch.bfloat16, torch.float8_e4m3fn]


def random_cache(dtype: torch.dtype, num_blocks: int = 70, num_layers: int = 5):
    kv = allocate_kv_cache(num_layers, num_blocks, 4, 64, 128, dtype, torch.device("cuda"))
    for one in (*kv.k, *kv.v):
        fill(one)
    return kv


def fill(cache: torch.Tensor) -> None:
    cache.view(torch.uint8).random_(0, 120)  # neither NaN nor infinity in any dtype


def as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies on the host, once the device is done."""
    torch.cuda.synchronize()
    return [one.contiguous().view(torch.uint8).cpu().clone() for one in tensors]


@pytest.mark.parametrize("pairs_per_copy", [4096, 7])  # one launch; several
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_blocks_survive_the_way_out_and_back(dtype, pairs_per_copy, monkeypatch):
    monkeypatch.setattr(host_blocks, "PAIRS_PER_COPY", pairs_per_copy)
    kv = random_cache(dtype)
    caches = [*kv.k, *kv.v]
    blocks = HostBlocks(kv, num_slots=50)
    before = as_bytes(caches)
    sources = (torch.randperm(69)[:40] + 1).tolist()
    slots = torch.randperm(50)[:40].tolist()
    blocks.copy_out(list(zip(sources, slots, strict=True)))
    torch.cuda.synchronize()
    for host, old in zip(blocks.arrays, before, strict=True):
        assert torch.equal(host.view(torch.uint8)[slots], old[sources])
    for one in caches:
        one.view(torch.uint8).zero_()
    targets = (torch.randperm(69)[:40] + 1).tolist()
    blocks.copy_in(list(zip(slots, targets, strict=True)))
    for now, old in zip(as_bytes(caches), before, strict=True):
        want = torch.zeros_like(old)
        want[targets] = old[sources]
        assert torch.equal(now, want)


@torch.inference_mode()
def test_copies_keep_their_place_among_kernels():
    """Nothing waits on the host: each copy sees what was launched before it and nothing later."""
    kv = random_cache(torch.bfloat16)
    caches = [*kv.k, *kv.v]
    blocks = HostBlocks(kv, num_slots=8)
    heavy = torch.randn(4096, 4096, device="cuda")
    for value in range(1, 7):
        for _ in range(5):
            heavy = (heavy @ heavy).clamp(-1, 1)  # keeps the device behind the host
        for one in caches:
            one[value].fill_(value)
        blocks.copy_out([(value, value)])
        for one in caches:
            one[value].fill_(-1)  # the block is used again at once
    blocks.copy_in([(value, 20 + value) for value in range(1, 7)])
    torch.cuda.synchronize()
    for one in caches:
        for value in range(1, 7):
            assert (one[value] == -1).all()
            assert (one[20 + value] == value).all()


def test_memory_is_given_back_and_can_be_pinned_again():
    kv = random_cache(torch.bfloat16)
    for _ in range(3):
        blocks = HostBlocks(kv, num_slots=200)
        blocks.copy_out([(1, 199)])
        torch.cuda.synchronize()
        assert torch.equal(blocks.arrays[0][199], kv.k[0][1].cpu())
        del blocks
        gc.collect()


def watch_copies(harness: Harness) -> list[int]:
    """Check at every step that what comes back is what went out. Returns a list of counts out and in."""
    blocks = harness.loop.runner.host_blocks
    assert blocks is not None
    copy, counts, saved = blocks.copy, [0, 0], {}

    def contents(block: int) -> list[torch.Tensor]:
        return [one[block].view(torch.uint8).clone() for one in blocks.caches]

    def checked(plan: StepPlan) -> None:
        for block, slot in plan.swap_out:
            saved[slot] = contents(block)
        copy(plan)
        for slot, block in plan.swap_in:
            for now, before in zip(contents(block), saved[slot], strict=True):
                assert torch.equal(now, before), f"slot {slot} came back to block {block} changed"
        counts[0] += len(plan.swap_out)
        counts[1] += len(plan.swap_in)

    blocks.copy = checked  # type: ignore[method-assign]
    return counts


SMALL = {"num_blocks": 16, "admission": "greedy", "block_size": 64, "swap_space": 0.05}


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_requests_follow_transformers(tiny, overlap, enforce_eager, caching):
    everyone = prompts(24, seed=4, low=50, high=200)
    harness = build(
        tiny("llama"),
        overlap=overlap,
        enforce_eager=enforce_eager,
        enable_prefix_caching=caching,
        preemption_mode="swap",
        **SMALL,
    )
    counts = watch_copies(harness)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=150, logprobs=1)
    results = harness.run()
    assert harness.scheduler.preemptions > 0
    assert min(counts) > 0, counts
    assert all(len(results[i].token_ids) == 150 for i in range(24))
    check_against_transformers(tiny("llama"), everyone, results)
    harness.assert_empty()
    assert harness.scheduler.kv.tier.num_used == 0


def test_swapping_without_a_look_at_it(tiny):
    """As above, but nothing synchronises: the host runs ahead of the device as it does when serving."""
    everyone = prompts(24, seed=4, low=50, high=200)
    harness = build(tiny("llama"), overlap="on", preemption_mode="swap", **SMALL)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=150, logprobs=1)
    results = harness.run()
    assert harness.scheduler.kv.tier.num_loaded > 0
    check_against_transformers(tiny("llama"), everyone, results)
    harness.assert_empty()


def test_a_prompt_that_the_device_has_lost_comes_from_the_host(tiny):
    harness = build(tiny("llama"), **SMALL)
    prompt, *others = prompts(4, seed=8, low=600, high=601)
    first = harness.generate(prompt, max_tokens=20, logprobs=1)
    for other in others:
        harness.generate(other, max_tokens=200)
    again = harness.generate(prompt, max_tokens=20, logprobs=1)
    assert again.cached_tokens == 576
    assert harness.scheduler.kv.tier.num_loaded > 0
    check_against_transformers(tiny("llama"), [prompt, prompt], [first, again])
