"""Rotation, cache writes and attention of decode steps in one kernel, in the emulator: bit for bit what
rope_and_cache and paged_decode give one after the other."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.ops import jit, paged_decode, plan_decode, rope_and_cache, rotated_decode
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.paged_attention_cases import FP8, Heads, assert_close, limits_of
from tests.kernels.rotated_decode_cases import EPS, make_step

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
# the newest token as the first of a block, a tile and a part (of 128 tokens), and as the last
LENS = [1, 16, 17, 65, 129, 257, 420, 0]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_90a")
    with emulated(paged_decode, plan_decode, rope_and_cache):
        yield


@pytest.mark.parametrize(
    ("heads", "has_norm", "window"),
    [
        (Heads(64, 7, 2), False, None),
        (Heads(64, 2, 1, FP16, E5M2, block_size=64), True, 40),
        (Heads(80, 1, 2, FP16), True, None),
        (Heads(96, 3, 1, BF16), False, 17),
        (Heads(96, 3, 1, BF16, E4M3), True, None),
        (Heads(128, 4, 2, block_size=64), True, None),
        (Heads(128, 20, 1, FP16), False, 1),  # two blocks for a KV head
        (Heads(128, 16, 1, BF16, E4M3), False, None),
        (Heads(256, 2, 1, softcap=5.0), True, None),
    ],
    ids=str,
)
def test_the_same_bits_as_by_two_kernels(heads: Heads, has_norm: bool, window: int | None) -> None:
    step = make_step(heads, LENS, limits_of(heads, 200, item_tokens=0), has_norm, padding=2)
    plan_decode.plan_decode(step.plan, step.seq_lens, step.rows, window)
    parts = step.plan.items[: int(step.plan.num_items), 4]
    assert (parts < 0).any(), "no row was left whole"
    assert window or (parts >= 0).any(), "no row was split"
    caches, before = step.caches(), step.caches()
    step.fused(caches, step.out)
    step.check(step.out, caches, before)


@pytest.mark.parametrize(
    "heads", [Heads(64, 7, 2, BF16, E4M3, block_size=64), Heads(128, 12, 1, FP16)], ids=str
)
def test_a_block_takes_several_items(heads: Heads) -> None:
    lens = [1, 300, 17, 0, 520, 64, 33, 270, 5]
    step = make_step(heads, lens, limits_of(heads, 4, is_fixed=True), True, padding=1)
    plan_decode.plan_decode(step.plan, step.seq_lens, step.rows, None)
    assert (step.plan.items[: int(step.plan.num_items), 4] >= 0).any(), "no row was split"
    for _ in range(2):
        caches, before = step.caches(), step.caches()
        step.out.fill_(torch.nan)
        step.fused(caches, step.out)
        step.check(step.out, caches, before)


@pytest.mark.parametrize(
    ("heads", "arch"),
    [
        (Heads(64, 7, 2, BF16, E4M3, block_size=64), "sm_90a"),
        (Heads(128, 12, 1, FP16), "sm_90a"),
        (Heads(256, 17, 1), "sm_80"),  # sums take the place of all stages
    ],
    ids=str,
)
def test_warps_and_copies_in_any_order(
    heads: Heads, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks take several items: slots of the rings and what surrounds them are used again."""
    variant = paged_decode.variant

    def shuffled(*args: object) -> jit.VariantSpec:
        spec = variant(*args)  # type: ignore[arg-type]
        return replace(spec, defines={**spec.defines, "EMU_SHUFFLED": 2})

    monkeypatch.setattr(paged_decode, "variant", shuffled)
    monkeypatch.setattr(jit, "device_arch", lambda device=None: arch)
    lens = [257, 1, 150, 0, 400, 64, 33]
    step = make_step(heads, lens, limits_of(heads, 4, is_fixed=True), True)
    plan_decode.plan_decode(step.plan, step.seq_lens, step.rows, None)
    caches, before = step.caches(), step.caches()
    step.fused(caches, step.out)
    step.check(step.out, caches, before)


def test_angles_of_the_models_type() -> None:
    heads = Heads(64, 3, 1, FP16)
    step = make_step(heads, [5, 40], limits_of(heads, 40), angle_dtype=FP16)
    plan_decode.plan_decode(step.plan, step.seq_lens, step.rows, None)
    caches, before = step.caches(), step.caches()
    step.fused(caches, step.out)
    step.check(step.out, caches, before)


@pytest.mark.parametrize("kv_dtype", [None, E4M3], ids=str)
def test_the_definition_in_torch(kv_dtype: torch.dtype | None) -> None:
    """`rotated_decode` of CPU tensors, over the caches as rounded there."""
    heads = Heads(64, 4, 2, FP16, kv_dtype)
    step = make_step(heads, [1, 17, 200], limits_of(heads, 40, item_tokens=0), True)
    plan_decode.plan_decode(step.plan, step.seq_lens, step.rows, None)
    by_kernel, in_torch, want = step.caches(), step.caches(), torch.empty_like(step.out)
    step.fused(by_kernel, step.out)
    cos, sin = step.angles.chunk(2, -1)
    rotated_decode.rotated_decode(step.qkv, cos, sin, *step.shared(in_torch, want), step.norm, EPS)
    assert_close(step.out, want.float(), "step")
    for got, expected in zip(by_kernel, in_torch, strict=True):
        rows = [c.float().transpose(1, 2).flatten(0, 1)[step.slots] for c in (got, expected)]
        torch.testing.assert_close(*rows, rtol=2 * torch.finfo(got.dtype).eps, atol=0.02)
