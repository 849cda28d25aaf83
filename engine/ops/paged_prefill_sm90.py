"""Causal attention of prompt chunks over a paged KV cache, for Hopper GPUs (sm_90a).

Contract
    q            [T, num_heads, head_dim] bfloat16 or float16, a view of anything with contiguous heads
                 and rows at multiples of 16 bytes; not changed
    k_cache      [num_blocks, num_kv_heads, block_size, head_dim] of q's dtype, contiguous. Holds the
    v_cache      chunks' own keys and values too. Blocks that no chunk uses may hold anything
    block_table  int32 [table rows, max_blocks]
    rows         int32 [B] table row of each batch row
    work         int32 [W, 4] {batch row, first query row, q_len, kv_len}: the q_len queries of a batch row
                 are the last q_len of its kv_len tokens; an item covers Q_ROWS of them from the first
                 query row on. Items with first query row >= q_len are padding. `work_items` makes them
    q_start      int32 [B] first row of each chunk in q and out
    window       a token sees itself and window - 1 tokens before it; None: all before it
    softcap      0: none; else scores become softcap * tanh(score / softcap)
    returns      out [T, num_heads * head_dim], a fresh tensor unless given; rows of no chunk are not
                 written

All but q and out lie where a CUDA graph may find new values at each replay. head_dim is 64 or 128,
block_size 16, 32, 64 or 128 (`supports`). The reference is that of engine/ops/paged_prefill.py.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.tensor_map import tensor_map

Q_ROWS = 128  # query rows of a work item, as in the kernel
KEYS = 128  # of a tile
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
THREADS = 384
NO_WINDOW = 1 << 30
LOG2_E = 1.4426950408889634


def paged_prefill_sm90(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    work: Tensor,
    q_start: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """See the module's contract. Raises ValueError for shapes outside it."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    if not supports(head_dim, q.dtype, block_size, "sm_90a") or k_cache.dtype != q.dtype:
        raise ValueError(
            f"paged_prefill_sm90: head_dim {head_dim}, {q.dtype}, block_size {block_size}, cache "
            f"{k_cache.dtype}; use paged_prefill, which takes every shape"
        )
    if num_heads % num_kv_heads or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(
            f"paged_prefill_sm90: {num_heads} query heads over a cache of {num_kv_heads} heads, which "
            "must divide them and be contiguous"
        )
    if out is None:
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if work.shape[0] == 0:
        return out
    kernel = load(head_dim, q.dtype, block_size, softcap > 0, q.device.index)
    num_items = work.shape[0] * num_heads
    cache_rows = (num_blocks * num_kv_heads * block_size, head_dim)
    box = (block_size, 64)
    kernel(
        (min(num_items, num_sms(q.device.index)),),
        (THREADS,),
        (
            tensor_map(q, (Q_ROWS, 1, 64)),
            tensor_map(k_cache.view(cache_rows), box),
            tensor_map(v_cache.view(cache_rows), box),
            out.data_ptr(),
            block_table.data_ptr(),
            rows.data_ptr(),
            work.data_ptr(),
            q_start.data_ptr(),
            np.int32(work.shape[0]),
            np.int32(block_table.stride(0)),
            np.int32(num_heads),
            np.int32(num_kv_heads),
            np.int32(window or NO_WINDOW),
            np.float32(LOG2_E * (softcap or scale)),
            np.float32(2 * LOG2_E * scale / softcap if softcap else 0.0),
        ),
    )
    return out


def supports(head_dim: int, dtype: torch.dtype, block_size: int, arch: str) -> bool:
    """Whether this kernel can stand in for paged_prefill.

    `dtype` is the cache's, `arch` as jit.device_arch() says it.
    """
    return (
        arch == "sm_90a"
        and head_dim in HEAD_DIMS
        and dtype in (torch.bfloat16, torch.float16)
        and block_size in BLOCK_SIZES
    )


def work_items(q_lens: Sequence[int], kv_lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """`work` for chunks of q_lens new tokens in sequences of kv_lens, longest items first."""
    q_len, kv_len = np.asarray(q_lens, np.int32), np.asarray(kv_lens, np.int32)
    counts = -(-q_len // Q_ROWS)
    batch_row = np.repeat(np.arange(len(q_len), dtype=np.int32), counts)
    first_item = np.repeat(np.cumsum(counts) - counts, counts)
    first_row = (np.arange(len(batch_row)) - first_item) * Q_ROWS
    items = np.stack([batch_row, first_row, q_len[batch_row], kv_len[batch_row]], 1).astype(
        np.int32
    )
    keys_seen = np.minimum(items[:, 3], items[:, 3] - items[:, 2] + items[:, 1] + Q_ROWS)
    return items[np.argsort(-keys_seen, kind="stable")]


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    if config.kv_dtype != config.dtype:
        return []
    if not supports(config.head_dim, config.dtype, config.block_size, "sm_90a"):
        return []
    return [variant(config.head_dim, config.dtype, config.block_size, softcap=False)]


def variant(
    head_dim: int, dtype: torch.dtype, block_size: int, softcap: bool, stages: int | None = None
) -> jit.VariantSpec:
    """Two stages of 128 keys of head_dim 128 keep the tensor cores fed; memory allows three."""
    stages = stages or (2 if head_dim == 128 else 4)
    defines = {
        jit.scalar_define(dtype): 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "STAGES": stages,
    }
    if softcap:
        defines["SOFTCAP"] = 1
    tiles = (Q_ROWS + 2 * stages * KEYS) * head_dim * 2
    smem_bytes = 1024 + tiles + 16 + 4 * 8 * stages  # alignment, tiles, barriers
    return jit.VariantSpec(
        "paged_prefill_sm90.cu", "paged_prefill_sm90", defines, smem_bytes, archs=("sm_90a",)
    )


@cache
def load(
    head_dim: int, dtype: torch.dtype, block_size: int, softcap: bool, device: int
) -> jit.Kernel:
    spec = variant(head_dim, dtype, block_size, softcap)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


@cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
