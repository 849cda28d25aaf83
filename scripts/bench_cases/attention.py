"""Paged attention: decode over batches and contexts that bind differently, and prefill on any GPU.

Decode reads every cached key and value once: its bytes. A case includes no planning, which is once a
step and not once a layer; plan_decode has cases of its own. "rotated_decode early" is what decode graphs launch,
started before the one in front has ended; a "copy" of as many bytes, read and written, is what torch does in the
same kind of graph. A "decode chain" is what a layer launches from
its qkv product to attention, each kernel started early, as in decode graphs: with rotation in a kernel of
its own, or within attention.
"""

from dataclasses import dataclass
from functools import partial

import torch

from engine.ops import jit, paged_decode, paged_prefill
from engine.ops.linear import fused_linear
from engine.ops.plan_decode import DecodePlan, PlanLimits, plan_decode
from engine.ops.rope_and_cache import rope_and_cache
from engine.ops.rotated_decode import rotated_decode
from scripts.bench_cases import Case, Launch

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Heads:
    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


B8 = Heads("8B", 32, 8, 128)
B7 = Heads("7B", 28, 4, 128)
HALF_B = Heads("0.5B", 14, 2, 64)

DECODES = [  # (batch, context)
    *((1, 512), (1, 8192), (1, 32768), (4, 4096), (8, 2048), (16, 8192), (32, 2048), (48, 4096)),
    *((64, 1024), (128, 2048), (256, 512), (256, 2048)),
]
STEP_DECODES = [(batch, 1024) for batch in (1, 8, 32, 64, 128, 256)]  # of docs/performance.md
ROTATED = [  # (heads, fp8 cache?, batch, context)
    *((HALF_B, False, batch, 1024) for batch in (64, 128, 256)),
    *((HALF_B, True, 256, 1024), (B8, True, 64, 1024), (B8, True, 32, 2048)),
    *((B8, False, 64, 1024), (B7, False, 64, 1024)),
]
COPIES = (64, 128)  # MB
CHAINS = [(batch, 1000) for batch in (1, 8, 64, 256)]
RAGGED = (200, 1500)  # batch, mean context; lengths from a fifth of it to nine fifths
PREFILLS = [(1, 2048, 2048), (1, 8192, 8192), (1, 16384, 16384), (1, 2048, 32768), (16, 512, 512)]


def bench_cases() -> list[Case]:
    cases = []
    for block_size in (16, 64):
        cases += [decode(B8, batch, context, block_size) for batch, context in DECODES]
    cases += [decode(B8, batch, context, 64, E4M3) for batch, context in DECODES]
    for heads in (B7, HALF_B):
        cases += [decode(heads, batch, context, 64) for batch, context in STEP_DECODES]
        cases += [decode(heads, *RAGGED, 64, is_ragged=True)]
    for heads, is_fp8, batch, context in ROTATED:
        kv_dtype = E4M3 if is_fp8 else BF16
        cases += [decode(heads, batch, context, 64, kv_dtype, is_rotated=True)]
    cases += [copy(size) for size in COPIES]
    for heads in (B7, HALF_B):
        cases += [chain(heads, *size, fused) for size in CHAINS for fused in (True, False)]
    cases += [decode(B8, *RAGGED, 64, is_ragged=True)]
    cases += [decode(B8, batch, context, 64, is_fixed=True) for batch, context in DECODES]
    cases += [plan(batch) for batch in (1, 64, 256, 1024)]
    cases += [prefill(B8, *shape, 64) for shape in PREFILLS]
    cases += [prefill(heads, 1, 8192, 8192, 64) for heads in (B7, HALF_B)]
    cases += [prefill(B8, 1, 8192, 8192, 64, E4M3), prefill(B7, 32, 16, 1040, 64)]
    return cases


def random_cache(
    heads: Heads, num_blocks: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    shape = (num_blocks, heads.num_kv_heads, block_size, heads.head_dim)
    cache = torch.empty(shape, device="cuda", dtype=BF16).normal_()
    return cache.to(dtype)


def decode(
    heads: Heads,
    batch: int,
    context: int,
    block_size: int,
    kv_dtype: torch.dtype = BF16,
    is_fixed: bool = False,
    is_ragged: bool = False,
    is_rotated: bool = False,
) -> Case:
    lens = torch.full((batch,), context)
    if is_ragged:
        spread = torch.linspace(0.2, 1.8, batch)
        order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
        lens = (context * spread[order]).long()

    def setup(copies: int) -> list[Launch]:
        limits = limits_of(heads, kv_dtype, int(lens.max()), is_fixed)
        work = DecodePlan.allocate(limits, batch, torch.device("cuda"))
        rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        plan_decode(work, lens.int().cuda(), rows, None)
        scratch = paged_decode.DecodeScratch.allocate(
            limits, batch, heads.num_heads, heads.head_dim, torch.device("cuda")
        )
        blocks = -(-lens // block_size)
        return [one(work, scratch, blocks) for _ in range(copies)]

    def one(work: DecodePlan, scratch: paged_decode.DecodeScratch, blocks: torch.Tensor) -> Launch:
        """A cache of its own, blocks placed at random."""
        total = int(blocks.sum())
        caches = [random_cache(heads, total + 1, block_size, kv_dtype) for _ in range(2)]
        placement = 1 + torch.randperm(total, device="cuda", dtype=torch.int32)
        table = torch.zeros((batch, int(blocks.max())), device="cuda", dtype=torch.int32)
        for row, part in enumerate(placement.split(blocks.tolist())):
            table[row, : len(part)] = part
        q = torch.randn((batch, heads.num_heads, heads.head_dim), device="cuda", dtype=BF16)
        out = torch.empty_like(q)
        arguments = (*caches, table, work, scratch, heads.head_dim**-0.5, out)
        if not is_rotated:
            return partial(paged_decode.paged_decode, q, *arguments)
        qkv = torch.randn((batch, heads.qkv_size), device="cuda", dtype=BF16)
        theta = torch.rand((batch, heads.head_dim // 2), device="cuda")
        return partial(rotate_early, qkv, theta.cos(), theta.sin(), *arguments)

    kinds = ["early"] if is_rotated else []
    kinds += [kind for kind, on in (("fp8", kv_dtype is E4M3), ("fixed", is_fixed)) if on]
    kinds += ["ragged"] if is_ragged else []
    operation = "rotated_decode" if is_rotated else "paged_decode"
    name = " ".join([operation, *kinds, f"{heads.name} B={batch} ctx={context} b{block_size}"])
    per_token = 2 * heads.num_kv_heads * heads.head_dim * kv_dtype.itemsize
    return Case(name, setup, num_bytes=float(lens.sum()) * per_token)


def rotate_early(*arguments: object) -> None:
    with jit.dependent_launches():
        rotated_decode(*arguments)


def copy(megabytes: int) -> Case:
    def setup(copies: int) -> list[Launch]:
        shape = (2, megabytes << 19)
        buffers = [torch.ones(shape, device="cuda", dtype=torch.uint8) for _ in range(copies)]
        return [partial(target.copy_, source) for source, target in buffers]

    return Case(f"copy {megabytes} MB", setup, num_bytes=float(megabytes << 20))


@dataclass
class Chain:
    """A layer's weights and cache, and the buffers of a step that all layers share."""

    weight: torch.Tensor
    caches: list[torch.Tensor]
    table: torch.Tensor
    slots: torch.Tensor
    x: torch.Tensor
    angles: torch.Tensor
    work: DecodePlan
    scratch: paged_decode.DecodeScratch

    def __call__(self, heads: Heads, fused: bool) -> torch.Tensor:
        out = self.x.new_empty((len(self.x), heads.num_heads, heads.head_dim))
        attention = (self.table, self.work, self.scratch, heads.head_dim**-0.5, out)
        cos, sin = self.angles.chunk(2, -1)
        with jit.dependent_launches():
            qkv = fused_linear(self.x, self.weight, norm_eps=1e-6)
            if fused:
                rotated_decode(qkv, cos, sin, *self.caches, *attention)
            else:
                q = rope_and_cache(qkv, cos, sin, self.slots, *self.caches, heads.num_heads)
                paged_decode.paged_decode(q, *self.caches, *attention)
        return out


def chain(heads: Heads, batch: int, context: int, fused: bool) -> Case:
    block_size = 64

    def setup(copies: int) -> list[Launch]:
        device = torch.device("cuda")
        limits = limits_of(heads, BF16, context)
        work = DecodePlan.allocate(limits, batch, device)
        rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        plan_decode(work, torch.full_like(rows, context), rows, None)
        scratch = paged_decode.DecodeScratch.allocate(
            limits, batch, heads.num_heads, heads.head_dim, device
        )
        per_row = -(-context // block_size)
        theta = torch.rand(batch, 1, heads.head_dim // 2, device="cuda")
        angles = torch.cat((theta.cos(), theta.sin()), -1)
        x = torch.randn(batch, heads.hidden_size, device="cuda", dtype=BF16)
        launches: list[Launch] = []
        for _ in range(copies):
            placement = 1 + torch.randperm(batch * per_row, device="cuda", dtype=torch.int32)
            table = placement.view(batch, per_row)
            slots = table[:, (context - 1) // block_size] * block_size + (context - 1) % block_size
            weight = torch.randn(heads.qkv_size, heads.hidden_size, device="cuda", dtype=BF16)
            caches = [random_cache(heads, batch * per_row + 1, block_size, BF16) for _ in range(2)]
            layer = Chain(weight, caches, table, slots.long(), x, angles, work, scratch)
            launches.append(partial(layer, heads, fused))
        return launches

    kind = "fused" if fused else "apart"
    cached = 2 * heads.num_kv_heads * heads.head_dim * batch * context
    num_bytes = 2.0 * (cached + heads.qkv_size * heads.hidden_size)
    return Case(f"decode chain {kind} {heads.name} B={batch} ctx={context}", setup, num_bytes)


def limits_of(
    heads: Heads, kv_dtype: torch.dtype, max_tokens: int, is_fixed: bool = False
) -> PlanLimits:
    return paged_decode.plan_limits(
        heads.num_heads,
        heads.num_kv_heads,
        heads.head_dim,
        kv_dtype,
        max_tokens,
        is_fixed,
        torch.device("cuda", torch.cuda.current_device()),
    )


def plan(batch: int) -> Case:
    def setup(copies: int) -> list[Launch]:
        limits = limits_of(B8, BF16, 32768)
        rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        lens = torch.randint(1, 4096, (batch,), device="cuda", dtype=torch.int32)
        work = DecodePlan.allocate(limits, batch, torch.device("cuda"))
        return [partial(plan_decode, work, lens, rows, None)] * copies

    return Case(f"plan_decode B={batch}", setup, num_bytes=8.0 * batch)


def prefill(
    heads: Heads,
    sequences: int,
    q_len: int,
    kv_len: int,
    block_size: int,
    kv_dtype: torch.dtype = BF16,
) -> Case:
    """Buffers are shared by all launches: attention is bound by arithmetic here."""

    def setup(copies: int) -> list[Launch]:
        per_sequence = -(-kv_len // block_size)
        num_blocks = 1 + sequences * per_sequence
        caches = [random_cache(heads, num_blocks, block_size, kv_dtype) for _ in range(2)]
        placement = 1 + torch.randperm(num_blocks - 1, device="cuda", dtype=torch.int32)
        rows = torch.arange(sequences, device="cuda", dtype=torch.int32)
        group = heads.num_heads // heads.num_kv_heads
        size = paged_prefill.queries_per_item(heads.head_dim, group, jit.device_arch())
        items = paged_prefill.work_items([q_len] * sequences, [kv_len] * sequences, size)
        shape = (sequences * q_len, heads.num_heads, heads.head_dim)
        q = torch.randn(shape, device="cuda", dtype=BF16)
        launch = partial(
            paged_prefill.paged_prefill,
            q,
            *caches,
            placement.view(sequences, per_sequence),
            rows,
            torch.from_numpy(items).cuda(),
            rows * q_len,
            heads.head_dim**-0.5,
            torch.empty_like(q),
        )
        return [launch] * copies

    kind = " fp8" if kv_dtype is E4M3 else ""
    flops = 4.0 * sequences * q_len * (kv_len - q_len / 2) * heads.num_heads * heads.head_dim
    per_row = 4.0 * heads.head_dim * (q_len * heads.num_heads + kv_len * heads.num_kv_heads)
    name = f"paged_prefill{kind} {heads.name} {sequences} x {q_len} of {kv_len} b{block_size}"
    return Case(name, setup, num_bytes=sequences * per_row, flops=flops)
