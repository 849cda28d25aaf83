"""Causal attention of prompt chunks over a paged KV cache, for every GPU from sm_80 on.

Contract
    q            [T, num_heads, D] bfloat16 or float16; heads contiguous, tokens a multiple of 8 numbers
                 apart
    k_cache      [num_blocks, num_kv_heads, block_size, D], contiguous, of q's dtype or float8_e4m3fn or
    v_cache      float8_e5m2. Holds the chunks' own keys and values, too. Query head h reads KV head
                 h // (num_heads // num_kv_heads)
    block_table  int32 [table rows, max_blocks]; what lies behind a row's tokens is not read
    rows         int32 [B] table row of each batch row
    work         int32 [W, 4] {batch row, first query, q_len, kv_len}: the q_len queries of a batch row are
                 the last q_len of its kv_len tokens; an item covers `queries_per_item` of them from the
                 first query on. Items with first query >= q_len are padding. `work_items` makes them
    num_items    int32 [1] on the device: only so many of `work` count, from 0 on, and what lies behind them
                 may be anything; None: all of them. So one CUDA graph serves lists of any length up to W
    q_start      int32 [B] first token of each batch row in q and out
    out          [T, num_heads, D] contiguous, of q's dtype; tokens of no chunk are not written
    window       a token sees itself and window - 1 tokens before it; None: all before it
    softcap      0: none; else scores become softcap * tanh(score / softcap)
    k_scale      what the caches' numbers are to be multiplied by
    v_scale

    out = softmax(q K^T * scale) V in float32, with weights rounded to the dtype for the second product. A
    token's result does not depend on how its prompt was cut into chunks.

D is 64, 80, 96, 128, 256 or any other multiple of 16 up to 256; block_size 16, 32, 64 or 128.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.paged_decode import (
    attention_defines,
    check_layout,
    gather,
    row_stride,
    score_scalars,
)

NO_WINDOW = 1 << 30


def paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    work: Tensor,
    q_start: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    num_items: Tensor | None = None,
) -> None:
    """See the module's contract."""
    run = launch if q.is_cuda else reference
    run(
        q,
        k_cache,
        v_cache,
        block_table,
        rows,
        work,
        q_start,
        scale,
        out,
        window,
        softcap,
        k_scale,
        v_scale,
        num_items,
    )


def work_items(
    q_lens: npt.ArrayLike, kv_lens: npt.ArrayLike, queries_per_item: int
) -> npt.NDArray[np.int32]:
    """`work` for chunks of q_lens new tokens in sequences of kv_lens, longest items first."""
    q_len, kv_len = np.asarray(q_lens, np.int64), np.asarray(kv_lens, np.int64)
    counts = -(-q_len // queries_per_item)
    row = np.repeat(np.arange(len(q_len)), counts)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries_per_item
    keys_seen = np.minimum(kv_len[row], kv_len[row] - q_len[row] + first + queries_per_item)
    items = np.stack([row, first, q_len[row], kv_len[row]], 1).astype(np.int32)
    return items[np.argsort(-keys_seen, kind="stable")]


def queries_per_item(head_dim: int, group: int, arch: str) -> int:
    """Queries of an item of `work` for the kernel on `arch`. Their query heads fill a tile's rows.
    Raises ValueError for more query heads per KV head than rows."""
    num_warps, m_tiles = warp_tiles(head_dim, arch)
    rows = num_warps * m_tiles * 16
    if group > rows:
        raise ValueError(
            f"attention: {group} query heads per KV head; kernels take up to {rows} for heads of {head_dim}"
        )
    return rows // group


def warp_tiles(head_dim: int, arch: str) -> tuple[int, int]:
    """Warps of a thread block, and tiles of 16 rows of each. Two tiles halve the reads of shared memory,
    but only small heads leave the registers for them."""
    if head_dim <= 128:
        return 4, 2
    return (8, 1) if arch == "sm_90a" else (4, 1)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    work: Tensor,
    q_start: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_items: Tensor | None = None,
) -> None:
    """Chunk by chunk in float32; the items only say which chunks there are."""
    group = q.shape[1] // k_cache.shape[1]
    items = work if num_items is None else work[: int(num_items)]
    chunks = {row: (q_len, kv_len) for row, _, q_len, kv_len in items.tolist() if q_len}
    for row, (q_len, kv_len) in chunks.items():
        start, table_row = int(q_start[row]), block_table[int(rows[row])]
        keys = gather(k_cache, table_row, 0, kv_len).repeat_interleave(group, 0) * k_scale
        values = gather(v_cache, table_row, 0, kv_len).repeat_interleave(group, 0) * v_scale
        queries = q[start : start + q_len].float().transpose(0, 1)  # [num_heads, q_len, D]
        scores = queries @ keys.transpose(1, 2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None] - torch.arange(
            kv_len, device=q.device
        )
        hidden = (distance < 0) | (distance >= (window or NO_WINDOW))
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out[start : start + q_len] = (weights @ values).transpose(0, 1)


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    work: Tensor,
    q_start: Tensor,
    scale: float,
    out: Tensor,
    window: int | None,
    softcap: float,
    k_scale: float,
    v_scale: float,
    num_items: Tensor | None = None,
) -> None:
    """Raises ValueError for layouts outside the contract."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, block_size = k_cache.shape[1:3]
    check_layout(q, k_cache, v_cache, out)
    kernel, threads = load(
        q.dtype, k_cache.dtype, head_dim, num_heads // num_kv_heads, block_size, softcap > 0
    )
    kernel(
        (work.shape[0] * num_kv_heads,),
        (threads,),
        (
            out.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.data_ptr(),
            rows.data_ptr(),
            work.data_ptr(),
            0 if num_items is None else num_items.data_ptr(),
            q_start.data_ptr(),
            np.int64(q.stride(0)),
            np.int32(block_table.stride(0)),
            np.int32(num_kv_heads),
            np.int32(window or NO_WINDOW),
            *score_scalars(scale * k_scale, softcap),
            np.float32(v_scale),
        ),
    )


@dataclass(frozen=True)
class Shape:
    """How a kernel variant uses a multiprocessor."""

    num_warps: int
    m_tiles: int  # of 16 rows, of each warp
    keys: int  # of a tile
    blocks_per_sm: int
    smem_bytes: int

    @classmethod
    def choose(cls, head_dim: int, kv_dtype: torch.dtype, has_softcap: bool, arch: str) -> "Shape":
        """Of 64 or fewer keys, as many as memory and registers allow without spilling."""
        num_warps, m_tiles = warp_tiles(head_dim, arch)
        is_small = head_dim <= 128
        if arch == "sm_90a":
            blocks, budget = (2, 113 * 1024) if is_small else (1, 227 * 1024)
        else:  # twice in an A100, once in the others; large heads once in all
            blocks, budget = (2, 81 * 1024) if is_small else (1, 98 * 1024)
        q_bytes = num_warps * m_tiles * 16 * row_stride(head_dim * 2)
        key_bytes = 2 * 2 * row_stride(head_dim * kv_dtype.itemsize)  # K and V, two buffers
        # soft-cap, conversion, and rows whose chunks are not at constant distances take registers
        is_plain = not has_softcap and kv_dtype.itemsize == 2 and head_dim % 64 == 0
        keys = 64 if is_plain or head_dim <= 64 or not is_small else 32
        while q_bytes + keys * key_bytes > budget:
            keys //= 2
        return cls(num_warps, m_tiles, keys, blocks, q_bytes + keys * key_bytes)


@cache
def load(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    has_softcap: bool,
) -> tuple[jit.Kernel, int]:
    """The kernel for the current device, and its threads per block."""
    arch = jit.device_arch()
    spec = variant(dtype, kv_dtype, head_dim, group, block_size, has_softcap, arch)
    kernel = jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)
    return kernel, 32 * Shape.choose(head_dim, kv_dtype, has_softcap, arch).num_warps


def variant(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    group: int,
    block_size: int,
    has_softcap: bool,
    arch: str,
) -> jit.VariantSpec:
    shape = Shape.choose(head_dim, kv_dtype, has_softcap, arch)
    defines = {
        **attention_defines(dtype, kv_dtype, head_dim, group, block_size, has_softcap),
        "NUM_WARPS": shape.num_warps,
        "M_TILES": shape.m_tiles,
        "KEYS": shape.keys,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
    }
    return jit.VariantSpec(
        "paged_prefill.cu", "paged_prefill", defines, shape.smem_bytes, archs=(arch,)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    group = config.num_heads // config.num_kv_heads
    if config.head_dim % 16 or config.block_size % 16 or config.dtype is torch.float32:
        return []
    return [
        variant(
            config.dtype, config.kv_dtype, config.head_dim, group, config.block_size, capped, arch
        )
        for arch in jit.ALL_ARCHS
        for capped in config.softcaps
    ]
