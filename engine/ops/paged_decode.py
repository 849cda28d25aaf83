"""Attention of one query per row over a paged KV cache.

Contract
    q            [T, num_heads, D] bfloat16 or float16; heads contiguous, tokens a multiple of 8 numbers apart
    k_cache      [num_blocks, num_kv_heads, block_size, D], contiguous, of q's dtype or float8_e4m3fn or
    v_cache      float8_e5m2. Query head h reads KV head h // (num_heads // num_kv_heads)
    block_table  int32 [table rows, max_blocks]; what lies behind a row's tokens is not read
    plan         work items of ops.plan_decode: for each batch row, its row in the table and which tokens it
                 sees, in one or several parts. Rows without tokens give zeros; rows without an item are not
                 read or written. T has nothing to do with the plan's batch, which bounds the number of items
                 and of parts: in steps with prompt chunks q and out are those of all tokens
    scratch      of the same limits as the plan; contents are arbitrary, but `arrivals` are zero before and
                 after. Calls that may run at the same time need scratch of their own
    softcap      0: none; else scores become softcap * tanh(score / softcap)
    k_scale      what the caches' numbers are to be multiplied by
    v_scale
    out          [T, num_heads, D] contiguous, of q's dtype; rows with items are overwritten

    out = softmax(q K^T * scale) V in float32, with weights rounded to the dtype for the second product.

D is 64, 80, 96, 128, 256 or any other multiple of 16 up to 256; block_size a multiple of 16. Within a CUDA
graph all tensors stay and their contents change, the plan's among them: it may have no items at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.plan_decode import ITEM_FIELDS, MAX_PARTS, DecodePlan, PlanLimits
from engine.ops.rope_and_cache import FP8_DEFINES

LOG2_E = 1.4426950408889634
HEADS = 16  # query heads that a thread block takes
QUERY_IN_SMEM_ABOVE = 128  # head sizes; as in the kernel


@dataclass(slots=True)
class DecodeScratch:
    """Parts of rows that are split, until they are merged."""

    part_o: Tensor  # float32 [parts, num_heads, D]
    part_lse: Tensor  # float32 [parts, num_heads] log2 of the softmax denominator
    arrivals: Tensor  # int32 [split rows, blocks_per_item]

    @classmethod
    def allocate(
        cls, limits: PlanLimits, max_batch: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "DecodeScratch":
        parts = max(1, limits.max_parts(max_batch))
        splits = max(1, min(max_batch, parts // 2))
        return cls(
            torch.zeros((parts, num_heads, head_dim), dtype=torch.float32, device=device),
            torch.zeros((parts, num_heads), dtype=torch.float32, device=device),
            torch.zeros((splits, limits.blocks_per_item), dtype=torch.int32, device=device),
        )


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See the module's contract."""
    if q.is_cuda:
        launch(
            q, k_cache, v_cache, block_table, plan, scratch, scale, out, softcap, k_scale, v_scale
        )
    else:
        result = reference(q, k_cache, v_cache, block_table, plan, scale, softcap, k_scale, v_scale)
        rows = plan.items[: int(plan.num_items), 0].long()
        out[rows] = result[rows].to(out.dtype)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scale: float,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Item by item in float32, then the parts of each row: [B, num_heads, D]."""
    num_heads, group = q.shape[1], q.shape[1] // k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    parts: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for values in plan.items[: int(plan.num_items)].tolist():
        item = dict(zip(ITEM_FIELDS, values, strict=True))
        if item["begin"] == item["end"]:
            continue
        table_row = block_table[item["table_row"]]
        keys = gather(k_cache, table_row, item["begin"], item["end"]) * k_scale  # [Hkv, tokens, D]
        values_ = gather(v_cache, table_row, item["begin"], item["end"]) * v_scale
        query = q[item["row"]].float().view(-1, group, q.shape[2])
        scores = query @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        o = torch.softmax(scores, -1) @ values_
        lse = torch.logsumexp(scores, -1)
        parts.setdefault(item["row"], []).append((o.view(num_heads, -1), lse.view(num_heads, 1)))
    for row, found in parts.items():
        o, lse = torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])
        out[row] = (torch.softmax(lse, 0) * o).sum(0)
    return out


def gather(cache: Tensor, table_row: Tensor, begin: int, end: int) -> Tensor:
    """The tokens begin .. end - 1 of a row, float32 [num_kv_heads, end - begin, D]."""
    block_size = cache.shape[2]
    first = begin // block_size
    blocks = table_row[first : -(-end // block_size)].long()
    tokens = cache[blocks].float().transpose(0, 1).flatten(1, 2)
    return tokens[:, begin - first * block_size : end - first * block_size]


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> None:
    """Raises ValueError for layouts outside the contract."""
    check_layout(q, k_cache, v_cache, out)
    run(
        q,
        q.stride(0),
        k_cache,
        v_cache,
        block_table,
        plan,
        scratch,
        scale,
        out,
        softcap,
        k_scale,
        v_scale,
    )


def run(
    q: Tensor,
    q_stride: int,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor,
    softcap: float,
    k_scale: float,
    v_scale: float,
    angle_dtype: torch.dtype | None = None,
    rotation: Sequence[object] = (),
) -> None:
    """Either variant. `rotation`: what the one that rotates takes besides, with angles of `angle_dtype`."""
    num_heads, head_dim = out.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    variant = load(
        out.dtype,
        k_cache.dtype,
        head_dim,
        num_heads // num_kv_heads,
        block_size,
        softcap > 0,
        angle_dtype,
    )
    limits = plan.limits
    assert limits.blocks_per_item == blocks_per_item(num_heads, num_kv_heads)
    assert len(scratch.part_o) >= limits.max_parts(plan.batch)
    variant.kernel(
        (limits.blocks_per_item, num_blocks(plan)),
        (variant.num_warps * 32,),
        (
            out.data_ptr(),
            scratch.part_o.data_ptr(),
            scratch.part_lse.data_ptr(),
            scratch.arrivals.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.data_ptr(),
            plan.items.data_ptr(),
            plan.num_items.data_ptr(),
            np.int64(q_stride),
            np.int32(block_table.stride(0)),
            np.int32(num_kv_heads),
            *score_scalars(scale * k_scale, softcap),
            np.float32(v_scale),
            *rotation,
        ),
    )


def num_blocks(plan: DecodePlan) -> int:
    """Extent of the grid in items: as many blocks as the device runs at a time, for any number of items. While
    blocks wait for a place, the next kernel cannot start early, even if they would find no item."""
    return min(plan.max_items, plan.limits.items_at_once)


@cache
def score_scalars(scale: float, softcap: float) -> tuple[np.float32, np.float32]:
    """`scale` and `cap` as kv_tile.cuh wants them: it computes exponents of two."""
    if softcap:
        return np.float32(2 * LOG2_E * scale / softcap), np.float32(LOG2_E * softcap)
    return np.float32(LOG2_E * scale), np.float32(0)


def check_layout(q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> None:
    num_heads, head_dim = q.shape[1:]
    token_stride, head_stride, stride = q.stride()
    if stride != 1 or head_stride != head_dim or token_stride % 8:
        raise ValueError(
            f"attention: q has strides {q.stride()}; heads must be contiguous and tokens a multiple of "
            "8 numbers apart: pass q.contiguous()"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous()):
        raise ValueError("attention: caches and out must be contiguous")
    if num_heads % k_cache.shape[1] or head_dim % 16 or head_dim > 256 or k_cache.shape[2] % 16:
        raise ValueError(
            f"attention: {num_heads} query heads of {head_dim} over a cache {tuple(k_cache.shape)}; "
            "KV heads must divide query heads, head sizes be multiples of 16 up to 256, and blocks "
            "multiples of 16 tokens"
        )


def blocks_per_item(num_heads: int, num_kv_heads: int) -> int:
    """Thread blocks for one work item: one for each KV head and 16 of its query heads."""
    return num_kv_heads * -(-(num_heads // num_kv_heads) // HEADS)


def plan_limits(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: torch.dtype,
    max_tokens: int,
    is_fixed: bool,
    device: torch.device,
) -> PlanLimits:
    """Limits of plans for this device: how many thread blocks it runs at a time, and how long an item's
    start and end take. That was the time of 96 tokens of 512 bytes, at two blocks for each
    multiprocessor of an H200."""
    properties = torch.cuda.get_device_properties(device)
    arch = jit.device_arch(device.index)
    shape = Shape.choose(head_dim, kv_dtype, num_heads // num_kv_heads, arch, rotates=True)
    resident = properties.shared_memory_per_multiprocessor // (shape.smem_bytes + 1024)
    resident = max(1, min(resident, shape.blocks_per_sm))
    return PlanLimits(
        blocks_per_item(num_heads, num_kv_heads),
        properties.multi_processor_count * resident,
        is_fixed,
        max_tokens,
        item_tokens=96 * 1024 // (2 * head_dim * kv_dtype.itemsize * resident),
    )


@dataclass(frozen=True)
class Shape:
    """How a kernel variant uses a multiprocessor."""

    num_warps: int
    stages: int  # tiles of 16 tokens that each warp has under way or in use
    blocks_per_sm: int
    smem_bytes: int

    @classmethod
    def choose(
        cls,
        head_dim: int,
        kv_dtype: torch.dtype,
        group: int,
        arch: str,
        rotates: bool = False,
    ) -> "Shape":
        """Bytes in flight count: some 30 KB for each multiprocessor cover the latency of any memory, and
        100 KB make up for uneven arrival on Hopper. More warps help with small tiles. Rows of at most 64
        bytes wait for arithmetic, tile by tile; there Hopper does best with more blocks, which stand at
        different places."""
        row_bytes = head_dim * kv_dtype.itemsize
        token_bytes = 2 * row_stride(row_bytes)
        query_bytes = head_dim // 16 * 512 if head_dim > QUERY_IN_SMEM_ABOVE else 0
        if rotates:  # queries, then one key and value
            query_bytes += HEADS * row_stride(2 * head_dim) + 2 * row_bytes
        if arch == "sm_90a":
            blocks = 4 if row_bytes <= 64 else 2 if row_bytes <= 256 else 1
            budget = 228 * 1024 // blocks - 1024
        else:  # 82 KB fit twice into an A100, once into the others
            blocks, budget = 2 if row_bytes <= 256 else 1, 81 * 1024
        tile_bytes = 16 * token_bytes
        num_warps = 4 if 4 * 2 * tile_bytes + query_bytes <= budget else 2
        # eight warps' registers hold sums of 64 columns for 16 heads, or of 128 for 8
        fits_eight = head_dim <= 64 or group <= 8
        if arch == "sm_90a" and row_bytes > 64 and tile_bytes <= 4096 and fits_eight:
            num_warps = 8
        stage_bytes = num_warps * tile_bytes
        stages = min(6, (budget - query_bytes) // stage_bytes)
        # at the end: the warps' sums or the weights of a row's parts, maxima, denominators, a flag
        sums = max(num_warps * HEADS * (head_dim + 4), HEADS * MAX_PARTS) + 2 * num_warps * HEADS
        smem_bytes = max(stages * stage_bytes + query_bytes, 4 * sums + 16)
        return cls(num_warps, stages, blocks, smem_bytes)


def row_stride(row_bytes: int) -> int:
    """Bytes between rows of a tile in shared memory (TileLayout in kv_tile.cuh)."""
    chunks = row_bytes // 16
    return (chunks if chunks % 4 == 0 else chunks | 1) * 16


@dataclass(frozen=True)
class Variant:
    kernel: jit.Kernel
    num_warps: int


@cache
def load(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    has_softcap: bool,
    angle_dtype: torch.dtype | None = None,
) -> Variant:
    """The kernel for the current device."""
    arch = jit.device_arch()
    spec = variant(dtype, kv_dtype, head_dim, group, block_size, has_softcap, arch, angle_dtype)
    kernel = jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)
    return Variant(kernel, int(spec.defines["NUM_WARPS"]))


def variant(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    has_softcap: bool,
    arch: str,
    angle_dtype: torch.dtype | None = None,
) -> jit.VariantSpec:
    """With `angle_dtype` the one of ops.rotated_decode, whose cos and sin have that type."""
    rotates = angle_dtype is not None
    shape = Shape.choose(head_dim, kv_dtype, group, arch, rotates)
    defines = {
        **attention_defines(dtype, kv_dtype, head_dim, group, block_size, has_softcap),
        "NUM_WARPS": shape.num_warps,
        "STAGES": shape.stages,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
        "FUSED_ROPE": int(rotates),
    }
    if rotates:
        defines["ROPE_FP32"] = int(angle_dtype is torch.float32)
    return jit.VariantSpec(
        "paged_decode.cu", "paged_decode", defines, shape.smem_bytes, archs=(arch,)
    )


def attention_defines(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    has_softcap: bool,
) -> dict[str, str | int | float]:
    """Macros that the paged attention kernels have in common. Raises ValueError for other cache dtypes."""
    if kv_dtype != dtype and kv_dtype not in FP8_DEFINES:
        raise ValueError(
            f"attention: a cache of {kv_dtype} under {dtype} queries; caches hold the queries' dtype, "
            "float8_e4m3fn or float8_e5m2"
        )
    defines: dict[str, str | int | float] = {
        jit.scalar_define(dtype): 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "GROUP": group,
    }
    if kv_dtype in FP8_DEFINES:
        defines[FP8_DEFINES[kv_dtype]] = 1
    if has_softcap:
        defines["SOFTCAP"] = 1
    return defines


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    group = config.num_heads // config.num_kv_heads
    if config.head_dim % 16 or config.block_size % 16 or config.dtype is torch.float32:
        return []
    heads = (config.dtype, config.kv_dtype, config.head_dim, group, config.block_size)
    return [
        variant(*heads, capped, arch, angle_dtype)
        for arch in jit.ALL_ARCHS
        for capped in config.softcaps
        for angle_dtype in (None, torch.float32)  # steps with prompt chunks, and without
    ]
