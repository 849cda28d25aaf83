"""Causal attention of prompt chunks over a paged KV cache, for Hopper GPUs (sm_90a).

Contract
    As engine/ops/paged_prefill.py, whose place it takes where `supports` says so, with these limits:

    q            head_dim 64 or 128; tokens a multiple of 8 numbers apart, so it may be a slice
    k_cache      of q's dtype; block_size 16, 32, 64 or 128
    v_cache
    work         of QUERIES_PER_ITEM queries an item: work_items(..., QUERIES_PER_ITEM)

All but the addresses of q, out and the caches may change between replays of a CUDA graph.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.paged_prefill import NO_WINDOW
from engine.ops.tensor_map import tensor_map

QUERIES_PER_ITEM = 128  # Q_ROWS in the kernel
KEYS = 128  # of a tile
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
THREADS = 384
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
    out: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See the module's contract. Raises ValueError for what is outside it."""
    _, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    if not supports(head_dim, q.dtype, block_size, "sm_90a") or k_cache.dtype != q.dtype:
        raise ValueError(
            f"paged_prefill_sm90: head_dim {head_dim}, {q.dtype}, block_size {block_size}, cache "
            f"{k_cache.dtype}; use paged_prefill, which takes every shape"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"paged_prefill_sm90: {num_kv_heads} KV heads must divide {num_heads} query heads"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and out.is_contiguous()):
        raise ValueError("paged_prefill_sm90: the caches and out must be contiguous")
    if work.shape[0] == 0:
        return
    kernel = load(head_dim, q.dtype, block_size, softcap > 0, q.device.index)
    num_items = work.shape[0] * num_heads
    cache_rows = (num_blocks * num_kv_heads * block_size, head_dim)
    box = (block_size, 64)
    kernel(
        (min(num_items, num_sms(q.device.index)),),
        (THREADS,),
        (
            tensor_map(q, (QUERIES_PER_ITEM, 1, 64)),
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
            np.float32(LOG2_E * (softcap or scale * k_scale)),
            np.float32(2 * LOG2_E * scale * k_scale / softcap if softcap else 0.0),
            np.float32(v_scale),
        ),
    )


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


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    if config.kv_dtype != config.dtype:
        return []
    if not supports(config.head_dim, config.dtype, config.block_size, "sm_90a"):
        return []
    return [
        variant(config.head_dim, config.dtype, config.block_size, capped)
        for capped in config.softcaps
    ]


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
    tiles = (QUERIES_PER_ITEM + 2 * stages * KEYS) * head_dim * 2
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
