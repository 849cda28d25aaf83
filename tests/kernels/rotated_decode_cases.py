"""Decode steps that rotate on the way against rope_and_cache and then paged_decode, on a GPU and in the emulator.

Where a row's newest token goes, the cache holds NaN before the step.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.ops import paged_decode, rope_and_cache, rotated_decode
from engine.ops.paged_decode import DecodeScratch
from engine.ops.plan_decode import DecodePlan, PlanLimits
from tests.kernels.paged_attention_cases import NAN_BYTE, Context, Heads, make_context

EPS = 1e-5


@dataclass
class Step:
    """The inputs of a step over a context's rows, and the two ways to take it."""

    heads: Heads
    has_norm: bool
    context: Context
    limits: PlanLimits
    batch: int  # rows of the context, then padding
    angle_dtype: torch.dtype = torch.float32
    qkv: Tensor = field(init=False)
    angles: Tensor = field(init=False)  # [batch, 1, D]: cos, then sin
    norm: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        heads, device = self.heads, self.context.rows.device
        num_rotated = heads.num_heads + heads.num_kv_heads
        self.plan = DecodePlan.allocate(self.limits, self.batch, device)
        self.scratch = DecodeScratch.allocate(
            self.limits, self.batch, heads.num_heads, heads.head_dim, device
        )
        self.norm = (
            torch.randn(num_rotated, heads.head_dim, device=device).to(heads.dtype)
            if self.has_norm
            else None
        )
        width = (num_rotated + heads.num_kv_heads) * heads.head_dim
        self.qkv = torch.zeros(self.batch, width, dtype=heads.dtype, device=device)
        size = (self.batch, 1, heads.head_dim)
        self.angles = torch.zeros(size, dtype=self.angle_dtype, device=device)
        self.seq_lens = torch.ones(self.batch, dtype=torch.int32, device=device)
        self.rows = torch.zeros(self.batch, dtype=torch.int32, device=device)  # row 0: padding
        self.slots = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self.out = torch.zeros(
            (self.batch, heads.num_heads, heads.head_dim), dtype=heads.dtype, device=device
        )
        self.context.block_table[0] = 0
        for cache in (self.context.k_cache, self.context.v_cache):
            cache.view(torch.uint8)[0] = 0
        self.pristine = self.caches()
        self.draw(self.context.lens)

    def draw(self, lens: list[int]) -> None:
        """New numbers for the first len(lens) rows, none longer than the context's; in place, as a graph
        holds the tensors."""
        count = len(lens)
        self.lens = lens
        self.qkv.copy_(torch.randn(self.qkv.shape))
        theta = 10 * torch.randn(self.batch, 1, self.heads.head_dim // 2)
        self.angles.copy_(torch.cat((theta.cos(), theta.sin()), -1))
        self.seq_lens.fill_(1)
        self.seq_lens[:count] = torch.tensor(lens, dtype=torch.int32)
        self.rows.zero_()
        self.rows[:count] = self.context.rows[:count]
        newest = (self.seq_lens.long() - 1).clamp_min(0)
        size = self.heads.block_size
        blocks = self.context.block_table[self.rows.long(), newest // size]
        self.slots.copy_(torch.where(self.seq_lens > 0, blocks * size + newest % size, 0))
        block, offset = self.slots[:count] // size, self.slots[:count] % size
        caches = (self.context.k_cache, self.context.v_cache)
        for cache, pristine in zip(caches, self.pristine, strict=True):
            numbers = cache.view(torch.uint8).copy_(pristine.view(torch.uint8))
            numbers[block, :, offset] = NAN_BYTE[cache.dtype.itemsize]

    def caches(self) -> list[Tensor]:
        """Copies."""
        pair = (self.context.k_cache, self.context.v_cache)
        return [cache.view(torch.uint8).clone().view(cache.dtype) for cache in pair]

    def shared(self, caches: list[Tensor], out: Tensor) -> tuple[object, ...]:
        heads = self.heads
        table = self.context.block_table
        return (
            *caches, table, self.plan, self.scratch, heads.scale, out,
            heads.softcap, *heads.kv_scales,
        )  # fmt: skip

    def apart(self, caches: list[Tensor]) -> Tensor:
        """Two kernels. The plan is there already."""
        cos, sin = self.angles.chunk(2, -1)
        q = rope_and_cache.launch(
            self.qkv.clone(), cos, sin, self.slots, *caches, self.heads.num_heads,
            self.norm, EPS, *self.heads.kv_scales,
        )  # fmt: skip
        out = torch.full_like(self.out, torch.nan)
        paged_decode.launch(q, *self.shared(caches, out))
        return out

    def fused(self, caches: list[Tensor], out: Tensor) -> None:
        cos, sin = self.angles.chunk(2, -1)
        rotated_decode.launch(self.qkv, cos, sin, *self.shared(caches, out), self.norm, EPS)

    def check(self, out: Tensor, caches: list[Tensor], before: list[Tensor]) -> None:
        """What the fused kernel left against what two kernels make of the caches as they were before."""
        want = self.apart(before)
        count = len(self.lens)
        assert torch.isfinite(out).all(), "also of padding rows"
        different = (out[:count].view(torch.int16) != want[:count].view(torch.int16)).nonzero()
        assert not len(different), (
            f"{self.heads}, lens {self.lens}: {len(different)} numbers differ, the first at (row, head, "
            f"column) {different[:4].tolist()}: {[float(out[tuple(i)]) for i in different[:4]]} instead "
            f"of {[float(want[tuple(i)]) for i in different[:4]]}"
        )
        for name, got, expected in zip("kv", caches, before, strict=True):
            # all but the padding's block, where padding rows write on top of each other
            bytes_of = [cache.view(torch.uint8)[1:] for cache in (got, expected)]
            places = (bytes_of[0] != bytes_of[1]).any(-1).nonzero()
            assert not len(places), (
                f"{self.heads}, lens {self.lens}: the {name} cache differs at (block - 1, head, token) "
                f"{places[:6].tolist()}"
            )
        assert not self.scratch.arrivals.any(), "arrival counters must fall back to zero"


def make_step(
    heads: Heads,
    lens: list[int],
    limits: PlanLimits,
    has_norm: bool = False,
    padding: int = 0,
    device: str = "cpu",
    angle_dtype: torch.dtype = torch.float32,
) -> Step:
    context = make_context(heads, lens, device)
    return Step(heads, has_norm, context, limits, len(lens) + padding, angle_dtype)
