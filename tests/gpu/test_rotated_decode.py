"""Rotation, cache writes and attention of decode steps in one kernel: bit for bit what rope_and_cache and
paged_decode give one after the other, also started early, in graphs and through the backend."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    KVCache,
    NewTokens,
    StepInputs,
)
from engine.attention.paged import PagedAttention
from engine.ops import jit, paged_decode, rope_and_cache
from engine.ops.plan_decode import plan_decode
from engine.ops.skinny_gemm import skinny_gemm
from tests.gpu.conftest import Record
from tests.kernels.paged_attention_cases import FP8, NEVER_SPLIT, Heads, limits_of
from tests.kernels.rotated_decode_cases import EPS, Step, make_step

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
# The newest token as the first and the last of a block, a tile and a part (chunks are multiples of 64).
LENS = [1, 15, 16, 17, 63, 64, 65, 129, 193, 0, 1000, 4096, 4097]

VARIANTS = [
    Heads(64, 7, 2, block_size=64),
    Heads(64, 1, 4, FP16),
    Heads(64, 3, 3, block_size=32),
    Heads(80, 4, 2, FP16),
    Heads(96, 1, 2),
    Heads(96, 3, 2, FP16, block_size=64),
    Heads(128, 7, 4, block_size=64),
    Heads(128, 4, 8),
    Heads(128, 16, 1, FP16, block_size=128),
    Heads(128, 20, 2),  # more query heads than a tile has rows: two blocks for a KV head
    Heads(192, 2, 2),
    Heads(256, 8, 1, FP16, block_size=64),
    Heads(32, 4, 2, block_size=64),
    Heads(128, 2, 2, block_size=64, softcap=5.0),
    Heads(64, 7, 2, BF16, E4M3, block_size=64),
    Heads(80, 4, 2, FP16, E4M3),
    Heads(96, 2, 1, BF16, E5M2),
    Heads(128, 7, 4, BF16, E4M3, block_size=64),
    Heads(128, 4, 2, FP16, E5M2, block_size=64),
    Heads(256, 4, 1, BF16, E4M3),
    Heads(64, 12, 1, FP16, E5M2, block_size=32),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_built_together() -> None:
    arch, specs = jit.device_arch(), []
    for h in VARIANTS:
        cache = (h.dtype, h.cache_dtype)
        for angles in (None, torch.float32):
            specs.append(
                paged_decode.variant(
                    *cache, h.head_dim, h.group, h.block_size, h.softcap > 0, arch, angles
                )
            )
        for has_norm in (False, True):
            specs.append(rope_and_cache.variant(h.head_dim, h.block_size, *cache, has_norm))
    jit.prebuild(specs, arch)


def take_fused(step: Step, window: int | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Result, caches after it, and caches before it."""
    plan_decode(step.plan, step.seq_lens, step.rows, window)
    caches, before = step.caches(), step.caches()
    step.out.fill_(torch.nan)
    step.fused(caches, step.out)
    return step.out, caches, before


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("heads", VARIANTS, ids=str)
def test_the_same_bits_as_by_two_kernels(heads: Heads, has_norm: bool) -> None:
    for item_tokens in (NEVER_SPLIT, 0):
        limits = limits_of(heads, 2000, item_tokens=item_tokens)
        step = make_step(heads, LENS, limits, has_norm, padding=2, device="cuda")
        step.check(*take_fused(step))
        parts = step.plan.items[: int(step.plan.num_items), 4]
        assert bool((parts >= 0).any()) == (item_tokens != NEVER_SPLIT)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 500])
@pytest.mark.parametrize("heads", [VARIANTS[0], VARIANTS[7], VARIANTS[17]], ids=str)
def test_in_a_window(heads: Heads, window: int) -> None:
    limits = limits_of(heads, 2000, item_tokens=0)
    step = make_step(heads, LENS, limits, True, padding=1, device="cuda")
    step.check(*take_fused(step, window))


@pytest.mark.parametrize("heads", [VARIANTS[0], VARIANTS[6], VARIANTS[14]], ids=str)
@pytest.mark.parametrize("lens", [[1], [4097], [1000] * 256, list(range(1, 130))], ids=len)
def test_other_batches(heads: Heads, lens: list[int]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    limits = paged_decode.plan_limits(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.cache_dtype, 8192, False, device
    )
    step = make_step(heads, lens, limits, device="cuda")
    for _ in range(3):
        step.check(*take_fused(step))


@pytest.mark.parametrize("slots", [1, 8, 20])
@pytest.mark.parametrize(
    "heads", [VARIANTS[0], VARIANTS[6], VARIANTS[9], VARIANTS[11], VARIANTS[14]], ids=str
)
def test_a_block_takes_many_items(heads: Heads, slots: int) -> None:
    """Whole and split rows on a grid of a few blocks: each has rotated queries and a newest token of its own."""
    lens = [*np.random.default_rng(0).integers(1, 400, 60).tolist(), 2049, 0, 700, 4097, 300]
    step = make_step(heads, lens, limits_of(heads, slots, is_fixed=True), True, 2, "cuda")
    for _ in range(2):
        step.check(*take_fused(step))
        assert (step.plan.items[: int(step.plan.num_items), 4] >= 0).any(), "no row was split"


@pytest.mark.parametrize("heads", [VARIANTS[1], VARIANTS[3]], ids=str)
def test_angles_of_the_models_type(heads: Heads) -> None:
    limits = limits_of(heads, 264)
    step = make_step(heads, [5, 700], limits, True, device="cuda", angle_dtype=heads.dtype)
    step.check(*take_fused(step))


@pytest.mark.parametrize("heads", [VARIANTS[6], VARIANTS[0], VARIANTS[17]], ids=str)
def test_a_graph_follows_new_lengths(heads: Heads, graph_replay: Record) -> None:
    """Plan and attention in one graph, replayed for fewer rows, other lengths and numbers. The padded
    batch has rows of one token in block 0."""
    longest = [4097, 1000, 65, 3000, 17, 1, 2049, 500]
    step = make_step(heads, longest, limits_of(heads, 264), True, device="cuda")
    caches = step.caches()

    def work() -> None:
        plan_decode(step.plan, step.seq_lens, step.rows, None)
        step.fused(caches, step.out)

    replay = graph_replay(work)
    generator = np.random.default_rng(0)
    for _ in range(6):
        count = int(generator.integers(1, len(longest) + 1))
        step.draw([int(generator.integers(1, n + 1)) for n in longest[:count]])
        before = step.caches()
        for cache, now in zip(caches, before, strict=True):
            cache.view(torch.uint8).copy_(now.view(torch.uint8))
        step.out.fill_(torch.nan)
        replay()
        step.check(step.out, caches, before)


@pytest.mark.parametrize("slots", [8, 264], ids=["few blocks", "many blocks"])
@pytest.mark.parametrize("early", [False, True], ids=["after the product", "early"])
@pytest.mark.parametrize("heads", [Heads(64, 7, 2, block_size=64), Heads(128, 4, 4)], ids=str)
def test_layers_whose_kernels_start_early(
    heads: Heads, early: bool, slots: int, graph_replay: Record
) -> None:
    """Product, attention, product, and so on through layers: each kernel needs the one before. With and
    without an early start, the bits of two kernels in place of the fused one."""
    size, num_layers = heads.num_heads * heads.head_dim, 4
    width = size + 2 * heads.num_kv_heads * heads.head_dim
    lens = [1, 700, 64, 2049, 17, 333, 1000, 5]
    step = make_step(heads, lens, limits_of(heads, slots), True, device="cuda")
    plan_decode(step.plan, step.seq_lens, step.rows, None)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").mul_(shape[-1] ** -0.5).to(heads.dtype)

    layers = [(numbers(width, size), numbers(size, size), step.caches()) for _ in range(num_layers)]
    start = torch.randn(len(lens), size, device="cuda").to(heads.dtype)
    hidden = torch.empty_like(start)
    cos, sin = step.angles.chunk(2, -1)
    attended = torch.empty_like(step.out)

    def forward(fused: bool) -> None:
        torch.mul(start, 1, out=hidden)
        for qkv_weight, o_weight, caches in layers:
            qkv = skinny_gemm(hidden, qkv_weight)
            if fused:
                step.qkv = qkv
                step.fused(caches, attended)
            else:
                q = rope_and_cache.launch(
                    qkv, cos, sin, step.slots, *caches, heads.num_heads, step.norm, EPS
                )
                paged_decode.launch(q, *step.shared(caches, attended))
            skinny_gemm(attended.flatten(1), o_weight, out=hidden, residual=hidden)

    forward(fused=True)  # loads the kernels
    with jit.dependent_launches() if early else nullcontext():
        replay = graph_replay(lambda: forward(fused=True))
    for _ in range(3):
        start.copy_(torch.randn(len(lens), size))
        forward(fused=False)
        torch.cuda.synchronize()
        want = hidden.clone()
        stored = [[c.view(torch.uint8).clone() for c in caches] for *_, caches in layers]
        assert torch.isfinite(want).all()
        for _ in range(20):
            for *_, caches in layers:  # the newest tokens must come from this replay
                for cache in caches:
                    blocks, offsets = step.slots // heads.block_size, step.slots % heads.block_size
                    cache[blocks, :, offsets] = torch.nan
            replay()
            differs = (hidden != want).nonzero()
            assert not len(differs), f"{len(differs)} differ, first at {differs[:5].tolist()}"
        for (*_, caches), expected in zip(layers, stored, strict=True):
            for cache, bytes_ in zip(caches, expected, strict=True):
                assert torch.equal(cache.view(torch.uint8), bytes_)


# --- backend ---


def backend_of(step: Step, window: int | None) -> tuple[PagedAttention, AttentionSpec]:
    heads = step.heads
    spec = AttentionSpec(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.scale,
        window,
        heads.softcap,
        qk_norm_eps=EPS,
    )
    caches = [step.context.k_cache], [step.context.v_cache]
    kv = KVCache(*caches, heads.block_size, [heads.kv_scales])
    device = torch.device("cuda", torch.cuda.current_device())
    return PagedAttention(kv, [spec], 32, 8192, device), spec


def inputs_of(step: Step, num_padding: int) -> StepInputs:
    """Of the step's rows but the last `num_padding`, which belong to no row of the plan."""
    count = step.batch - num_padding
    none = torch.zeros(step.batch, dtype=torch.int64, device="cuda")
    slots = step.slots.clone()
    slots[count:] = 0
    return StepInputs(
        input_ids=none,
        positions=none,
        slot_mapping=slots,
        logits_indices=none[:0],
        block_table=step.context.block_table,
        rows=step.rows[:count].cpu().numpy(),
        num_decodes=count,
        query_start=list(range(count + 1)),
        seq_lens=step.seq_lens[:count].tolist(),
        block_ids=np.zeros((0, 0), np.int32),
        rows_device=step.rows[:count].clone(),
        seq_lens_device=step.seq_lens[:count].clone(),
    )


def check_backend(step: Step, num_padding: int, window: int | None) -> None:
    """`attend_new` of PagedAttention against the one that rotates and stores ahead."""
    backend, spec = backend_of(step, window)
    inputs = inputs_of(step, num_padding)
    backend.plan(inputs, [spec])
    cos, sin = step.angles.chunk(2, -1)
    caches = (step.context.k_cache, step.context.v_cache)
    before = [cache.view(torch.uint8).clone() for cache in caches]
    new = NewTokens(step.qkv, (cos, sin), step.norm)
    out = backend.attend_new(0, new, spec, inputs)
    after = [cache.view(torch.uint8).clone() for cache in caches]
    for cache, numbers in zip(caches, before, strict=True):
        cache.view(torch.uint8).copy_(numbers)
    want = AttentionBackend.attend_new(backend, 0, replace(new, qkv=step.qkv.clone()), spec, inputs)
    count = step.batch - num_padding
    assert torch.isfinite(out).all(), "padding tokens must be finite"
    assert torch.equal(out[:count].view(torch.int16), want[:count].view(torch.int16))
    for got, cache in zip(after, caches, strict=True):
        assert torch.equal(got[1:], cache.view(torch.uint8)[1:])


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [VARIANTS[6], VARIANTS[0], VARIANTS[11], VARIANTS[17]], ids=str)
def test_backend(heads: Heads, window: int | None) -> None:
    for num_padding in (0, 2):
        lens = [1, 700, 65, 4097, 16]
        step = make_step(heads, lens, limits_of(heads, 264), True, num_padding, "cuda")
        check_backend(step, num_padding, window)
