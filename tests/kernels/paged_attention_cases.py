"""Queries over a scattered KV cache, for the paged attention kernels on a GPU and in the emulator.

What no row may read is NaN: unused blocks, and what follows a row's last token in its last block.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops import paged_decode, paged_prefill
from engine.ops.paged_decode import DecodeScratch
from engine.ops.plan_decode import ITEM_FIELDS, DecodePlan, PlanLimits, plan_decode, reference

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN_BYTE = {4: 0xFF, 2: 0xFF, 1: 0x7F}  # by item size: a number of such bytes is NaN
TOLERANCE = {
    torch.bfloat16: 3e-3,
    torch.float16: 1e-3,
    torch.float32: 2e-5,
}  # of the whole; a head of a token may have 3 times that


@dataclass(frozen=True)
class Heads:
    """Everything that selects a kernel variant."""

    head_dim: int
    group: int
    num_kv_heads: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: dtype
    block_size: int = 16
    softcap: float = 0.0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def num_heads(self) -> int:
        return self.group * self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def kv_scales(self) -> tuple[float, float]:
        return (0.5, 0.25) if self.cache_dtype in FP8 else (1.0, 1.0)

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        if self.kv_dtype:
            kind += "-" + str(self.kv_dtype).removeprefix("torch.float8_")
        cap = f"-cap{self.softcap:g}" if self.softcap else ""
        return f"d{self.head_dim}-g{self.group}x{self.num_kv_heads}-{kind}-b{self.block_size}{cap}"


@dataclass
class Context:
    """A cache with rows of given lengths. Rows of the table are in no order, and not all are used."""

    heads: Heads
    lens: list[int]
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    rows: Tensor  # int32 [B]

    def keys_and_values(self, row: int) -> tuple[Tensor, Tensor]:
        """float32 [num_heads, len, D] each, scaled."""
        count = -(-self.lens[row] // self.heads.block_size)
        blocks = self.block_table[int(self.rows[row]), :count].long()
        keys, values = (
            cache.view(torch.uint8)[blocks].view(cache.dtype).float()
            for cache in (self.k_cache, self.v_cache)
        )
        k, v = (
            x.transpose(0, 1).flatten(1, 2)[:, : self.lens[row]] * scale
            for x, scale in zip((keys, values), self.heads.kv_scales, strict=True)
        )
        return tuple(x.repeat_interleave(self.heads.group, 0) for x in (k, v))  # type: ignore[return-value]

    def expected(self, row: int, q: Tensor, window: int | None) -> Tensor:
        """The last len(q) tokens of a row, by the definition: float32 [len(q), num_heads, D]."""
        if self.lens[row] == 0:
            return torch.zeros(q.shape, device=q.device)
        keys, values = self.keys_and_values(row)
        scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * self.heads.scale
        if self.heads.softcap:
            scores = self.heads.softcap * torch.tanh(scores / self.heads.softcap)
        key = torch.arange(self.lens[row], device=q.device)
        distance = key[self.lens[row] - len(q) :, None] - key
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return (weights @ values).transpose(0, 1)


def make_context(heads: Heads, lens: list[int], device: torch.device | str = "cpu") -> Context:
    """Random keys and values for rows of `lens` tokens, on blocks placed at random."""
    counts = [-(-n // heads.block_size) for n in lens]
    num_blocks = sum(counts) + 4
    shape = (num_blocks, heads.num_kv_heads, heads.block_size, heads.head_dim)
    caches = [torch.randn(shape, device=device).to(heads.cache_dtype) for _ in range(2)]
    columns = max(counts) + 2
    table = torch.full((len(lens) + 3, columns), num_blocks - 1, dtype=torch.int32, device=device)
    rows = 1 + torch.randperm(len(lens) + 2)[: len(lens)].int()
    # block 0 is reserved, the last one stands where no row of the table may be read
    placement = (1 + torch.randperm(num_blocks - 2)).to(device)
    nan = NAN_BYTE[heads.cache_dtype.itemsize]
    used = 0
    for row, count, n in zip(rows.tolist(), counts, lens, strict=True):
        blocks = placement[used : used + count]
        used += count
        table[row, :count] = blocks
        if n % heads.block_size:
            for cache in caches:
                cache.view(torch.uint8)[blocks[-1], :, n % heads.block_size :] = nan
    for cache in caches:
        cache.view(torch.uint8)[placement[used:]] = nan
        cache.view(torch.uint8)[-1] = nan
    return Context(heads, lens, caches[0], caches[1], table, rows.to(device))


def make_queries(heads: Heads, num_tokens: int, device: torch.device | str) -> Tensor:
    """[num_tokens, num_heads, D], a slice of a wider buffer, as of a fused projection."""
    width = heads.num_heads + 2 * heads.num_kv_heads
    wide = torch.randn(num_tokens, width, heads.head_dim).to(heads.dtype)
    return wide.to(device)[:, : heads.num_heads]


def nan_output(q: Tensor) -> Tensor:
    return torch.full(q.shape, float("nan"), dtype=q.dtype, device=q.device)


def garbage(like: Tensor) -> Tensor:
    """Any int32 numbers."""
    return torch.randint(-(1 << 31), 1 << 31, like.shape, dtype=torch.int32).to(like.device)


NEVER_SPLIT = 1 << 20  # an item costs more than any row


def limits_of(
    heads: Heads, slots: int, is_fixed: bool = False, item_tokens: int = 96
) -> PlanLimits:
    blocks = paged_decode.blocks_per_item(heads.num_heads, heads.num_kv_heads)
    return PlanLimits(blocks, slots, is_fixed, max_tokens=8192, item_tokens=item_tokens)


class Decoder:
    """Buffers for decode steps of one batch size, and the step itself."""

    def __init__(self, context: Context, limits: PlanLimits, batch: int = 0) -> None:
        self.context, heads = context, context.heads
        device, batch = context.rows.device, batch or len(context.lens)
        self.plan = DecodePlan.allocate(limits, batch, device)
        self.scratch = DecodeScratch.allocate(
            limits, batch, heads.num_heads, heads.head_dim, device
        )
        self.scratch.part_o.fill_(float("nan"))
        self.scratch.part_lse.fill_(float("nan"))
        self.q = make_queries(heads, batch, device)
        self.out = nan_output(self.q)
        self.seq_lens = torch.tensor(context.lens, dtype=torch.int32, device=device)
        self.rows = context.rows

    def attend(self, window: int | None = None) -> None:
        self.plan_work(window)
        self.attend_planned()

    def plan_work(self, window: int | None) -> None:
        plan_decode(self.plan, self.seq_lens, self.rows, window)

    def plan_first(self, count: int) -> None:
        """The list of the first `count` rows alone, from a launch for all; what lies behind it is garbage."""
        self.plan.batch = len(self.context.lens)
        self.plan.items.copy_(garbage(self.plan.items))
        items = np.zeros((0, len(ITEM_FIELDS)), np.int32)
        if count:
            lens, rows = np.array(self.context.lens[:count], np.int32), self.rows[:count].cpu()
            items = reference(lens, rows.numpy(), None, self.plan.limits)
        self.plan.items[: len(items)] = torch.from_numpy(items).to(self.rows.device)
        self.plan.num_items.fill_(len(items))

    def attend_planned(self) -> None:
        heads, context = self.context.heads, self.context
        run = paged_decode.launch if not self.q.is_cuda else paged_decode.paged_decode
        run(
            self.q,
            context.k_cache,
            context.v_cache,
            context.block_table,
            self.plan,
            self.scratch,
            heads.scale,
            self.out,
            heads.softcap,
            *heads.kv_scales,
        )

    def check(self, window: int | None = None) -> None:
        context = self.context
        want = [context.expected(i, self.q[i : i + 1], window) for i in range(len(context.lens))]
        assert_close(self.out[: len(want)], torch.cat(want), f"lens {context.lens}")
        assert not self.scratch.arrivals.any(), "arrival counters must fall back to zero"


def prefill(
    context: Context,
    q: Tensor,
    q_lens: list[int],
    out: Tensor,
    arch: str,
    window: int | None,
    is_counted: bool = False,
) -> None:
    """Run the prefill kernel on chunks that end the context's rows; q may have more tokens. Behind the work
    items lie two without queries, or garbage if the kernel is told their number."""
    heads, device = context.heads, q.device
    size = paged_prefill.queries_per_item(heads.head_dim, heads.group, arch)
    items = paged_prefill.work_items(q_lens, context.lens, size)
    spare = torch.zeros((2, 4), dtype=torch.int32)
    work = torch.cat([torch.from_numpy(items), garbage(spare) if is_counted else spare]).to(device)
    num_items = torch.tensor([len(items)], dtype=torch.int32, device=device)
    starts = np.cumsum([0, *q_lens])[:-1].astype(np.int32)
    paged_prefill.launch(
        q,
        context.k_cache,
        context.v_cache,
        context.block_table,
        context.rows,
        work,
        torch.from_numpy(starts).to(device),
        heads.scale,
        out,
        window,
        heads.softcap,
        *heads.kv_scales,
        num_items if is_counted else None,
    )


def check_prefill(
    context: Context, q: Tensor, q_lens: list[int], out: Tensor, window: int | None
) -> None:
    """`out` must hold the chunks' results, and NaN as before behind them."""
    ends = np.cumsum([0, *q_lens]).tolist()
    want = [context.expected(i, q[ends[i] : ends[i + 1]], window) for i in range(len(context.lens))]
    assert_close(
        out[: ends[-1]], torch.cat(want), f"chunks {list(zip(q_lens, context.lens, strict=True))}"
    )
    assert out[ends[-1] :].isnan().all(), "tokens of no chunk were written"


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    """Within the rounding of the dtype, over all and for each head of each token [T, num_heads, D]."""
    tolerance = TOLERANCE[got.dtype]
    bad = (~torch.isfinite(got)).nonzero()
    assert not len(bad), f"{what}: not finite at (token, head, column) {bad[:8].tolist()}"
    difference = got.float() - want
    overall = float(difference.norm() / want.norm())
    size = want.norm(dim=-1)
    each = difference.norm(dim=-1) / size.clamp_min(1e-3 * float(size.max()))
    token, head = divmod(int(each.argmax()), each.shape[1])
    worst = float(each.max())
    assert overall <= tolerance, (
        f"{what}: relative error {overall:.2e}; worst {worst:.2e} at token {token}, head {head}: "
        f"{got[token, head, :6].tolist()} instead of {want[token, head, :6].tolist()}"
    )
    assert worst <= 3 * tolerance, (
        f"{what}: relative error {worst:.2e} at token {token}, head {head} (overall {overall:.2e})"
    )
