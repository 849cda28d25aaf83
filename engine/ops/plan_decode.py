"""Cut the rows of a decode batch into work items for paged_decode, once per step and on the device.

Contract
    seq_lens  int32 [B], device: tokens of each row; 0 gives an item without tokens. B <= 1024
    rows      int32 [B], device: rows of the block table
    window    a row sees its last `window` tokens; None: all
    plan      buffers for the result, and the limits of the device: overwritten. The list is read by any
              number of layers. Nothing is read back, so that it may be captured in a CUDA graph
    Items (ITEM_FIELDS) cover each row's visible tokens once. begin and end of neighbours meet, at
    multiples of 64 from the row's first tile of 16 tokens. Long items come first.

Two ways to choose the chunk, the tokens of an item:
    by batch   of 64 sizes, the one with the least estimated time. With n items of T tokens in all, of which
               a device works on `items_at_once`,
                   waves * (T / n + item_tokens) + (longest item - T / n) + merge + parts of the longest row,
               where waves = ceil(n / items_at_once), item_tokens stands for an item's fixed cost, and merge, of
               split rows, is three quarters of that. If no row is split,
                   max(T / items_at_once, longest row / ALONE) + waves * item_tokens,
               as a thread block can read ALONE times its share while others are missing. Within
               2%, the fewest parts.
    fixed      by the row's own length, so that its result does not depend on the batch: at most 32 parts,
               of 256 tokens or more.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import jit

Int32Array = npt.NDArray[np.int32]

# cuda/common/work_item.cuh
ITEM_FIELDS = ("row", "table_row", "begin", "end", "part", "first_part", "num_parts", "split")
MAX_PARTS = 288
# cuda/plan_decode.cu
THREADS = MAX_BATCH = 1024
TILE, STEP, MIN_CHUNK, BUCKETS = 16, 64, 128, 32
FIXED_MIN_CHUNK, FIXED_MAX_PARTS = 256, 32
ALONE = 3  # 5 were measured for a single block on an H200
INT_MAX = (1 << 31) - 1
CANDIDATE_PARTS = [*range(1, 33), *range(40, MAX_PARTS + 1, 8)]


@dataclass(frozen=True)
class PlanLimits:
    """What bounds a plan. The same for the device and its twin here."""

    blocks_per_item: int  # thread blocks that share one: one for each KV head (and 16 query heads)
    slots: int  # thread blocks that the device runs at a time
    is_fixed: bool = False  # chunks by length alone
    max_tokens: int = 1 << 20  # of a row
    item_tokens: int = 96  # what an item costs before its first token and after its last, in tokens

    @property
    def items_at_once(self) -> int:
        return max(1, self.slots // self.blocks_per_item)

    def max_parts(self, batch: int) -> int:
        """Parts of split rows in a plan of `batch` rows: what the buffers for partial results hold."""
        if self.is_fixed:
            return batch * min(FIXED_MAX_PARTS, -(-self.max_tokens // FIXED_MIN_CHUNK))
        per_wave = -(-self.slots // self.blocks_per_item)
        wanted = min(8 * per_wave, max(2 * per_wave, 8 * batch))
        return min(wanted, batch * MAX_PARTS)

    def max_items(self, batch: int) -> int:
        return batch + self.max_parts(batch)


@dataclass(slots=True)
class DecodePlan:
    """A work list on the device. `batch` is that of the last plan_decode."""

    limits: PlanLimits
    items: Tensor  # int32 [max_items, 8], of which num_items are valid
    num_items: Tensor  # int32 [1]
    batch: int = 0

    @classmethod
    def allocate(cls, limits: PlanLimits, max_batch: int, device: torch.device) -> "DecodePlan":
        """Raises ValueError beyond MAX_BATCH rows."""
        if max_batch > MAX_BATCH:
            raise ValueError(f"decode plans have up to {MAX_BATCH} rows, not {max_batch}")
        size = (limits.max_items(max_batch), len(ITEM_FIELDS))
        items = torch.zeros(size, dtype=torch.int32, device=device)
        return cls(limits, items, torch.zeros(1, dtype=torch.int32, device=device))

    @property
    def max_items(self) -> int:
        """Upper bound of num_items that the host knows."""
        return self.limits.max_items(self.batch)


def plan_decode(plan: DecodePlan, seq_lens: Tensor, rows: Tensor, window: int | None) -> None:
    """See the module's contract."""
    plan.batch = len(seq_lens)
    assert 0 < plan.batch <= MAX_BATCH
    assert plan.max_items <= len(plan.items), "the plan was allocated for fewer rows"
    assert seq_lens.dtype is rows.dtype is torch.int32
    assert seq_lens.is_contiguous()
    assert rows.is_contiguous()
    if not seq_lens.is_cuda:
        items = reference(seq_lens.numpy(), rows.numpy(), window, plan.limits)
        plan.items[: len(items)] = torch.from_numpy(items)
        plan.num_items.fill_(len(items))
        return
    launch(plan, seq_lens, rows, window)


def launch(plan: DecodePlan, seq_lens: Tensor, rows: Tensor, window: int | None) -> None:
    limits = plan.limits
    jit.kernel("plan_decode.cu", "plan_decode")(
        (1,),
        (THREADS,),
        (
            plan.items.data_ptr(),
            plan.num_items.data_ptr(),
            seq_lens.data_ptr(),
            rows.data_ptr(),
            np.int32(plan.batch),
            np.int32(window or 0),
            np.int32(limits.items_at_once),
            np.int32(limits.item_tokens),
            np.int32(limits.max_items(plan.batch)),
            np.int32(limits.max_parts(plan.batch)),
            np.int32(limits.is_fixed),
        ),
    )


def reference(
    seq_lens: Int32Array, rows: Int32Array, window: int | None, limits: PlanLimits
) -> Int32Array:
    """The items in numpy, int32 [num_items, 8], in the device's order."""
    lens = np.maximum(seq_lens.astype(np.int64), 0)
    begin = np.maximum(lens - window, 0) if window else np.zeros_like(lens)
    base = begin // TILE * TILE
    spans = lens - base
    chunk = fixed_chunk(spans) if limits.is_fixed else best_chunk(spans, limits)

    parts = np.maximum(1, -(-spans // chunk))
    is_split = parts > 1
    first_part = np.cumsum(parts * is_split) - parts * is_split
    split = np.cumsum(is_split) - is_split
    last_span = spans - (parts - 1) * chunk
    largest = max(1, min(int(spans.max()), int(chunk.max())))
    bucket = BUCKETS - 1 - last_span * (BUCKETS - 1) // largest
    whole: list[tuple[int, ...]] = []
    last: list[tuple[int, ...]] = []
    for i in range(len(lens)):
        start = base[i] + np.arange(parts[i]) * chunk[i]
        ends = np.append(start[1:], lens[i])
        start[0] = begin[i]
        for p in range(parts[i]):
            part = first_part[i] + p if is_split[i] else -1
            shared = (first_part[i], parts[i], split[i]) if is_split[i] else (0, 1, 0)
            item = (i, rows[i], start[p], ends[p], part, *shared)
            (last if p == parts[i] - 1 else whole).append(item)
    ordered = whole + [last[i] for i in np.argsort(bucket, kind="stable")]
    return np.array(ordered, np.int32).reshape(-1, len(ITEM_FIELDS))


def fixed_chunk(spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Chunk of each row by its own length."""
    size = -(-spans // FIXED_MAX_PARTS)
    return np.maximum(FIXED_MIN_CHUNK, -(-size // STEP) * STEP)


def best_chunk(spans: npt.NDArray[np.int64], limits: PlanLimits) -> npt.NDArray[np.int64]:
    """The chunk, the same for all rows, with the least estimated time."""
    batch, tokens, longest = len(spans), int(spans.sum()), int(spans.max())
    sizes, costs = [], []
    for num_parts in CANDIDATE_PARTS:
        even = -(-longest // num_parts)
        size = max(MIN_CHUNK, -(-even // STEP) * STEP)
        parts = np.maximum(1, -(-spans // size))
        items, partial = int(parts.sum()), int(parts[parts > 1].sum())
        waves = -(-items // limits.items_at_once)
        mean = tokens // items
        longest_parts = -(-longest // size)
        if longest_parts > 1:
            merge = limits.item_tokens * 3 // 4
            cost = waves * (mean + limits.item_tokens) + size - mean + merge + longest_parts
        else:
            share = tokens // limits.items_at_once
            cost = max(share, longest // ALONE) + waves * limits.item_tokens
        fits = items <= limits.max_items(batch) and partial <= limits.max_parts(batch)
        sizes.append(size)
        costs.append(cost if fits else INT_MAX)
    best = min(costs)
    chosen = next(s for s, cost in zip(sizes, costs, strict=True) if cost * 50 <= best * 51)
    return np.full(batch, chosen)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    return [jit.VariantSpec("plan_decode.cu", "plan_decode")]
