"""Causal attention of prompt chunks over a paged KV cache, for Hopper GPUs (sm_90a).

Contract
    As engine/ops/paged_prefill.py, whose place it takes where `supports` says so, with these limits:

    q            head_dim 64 or 128; tokens a multiple of 8 numbers apart, so it may be a slice
    k_cache      of q's dtype; block_size 16, 32, 64 or 128
    v_cache
    work         of tiling.queries queries an item; plan_items makes it
    tiling       one of tilings(head_dim, softcap > 0); the result is the same to the bit with each

Thread blocks are as many as `work` has room for, up to one a multiprocessor, whatever num_items says.
All but the addresses of q, out and the caches may change between replays of a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.paged_decode import LOG2_E
from engine.ops.paged_prefill import NO_WINDOW, work_items
from engine.ops.tensor_map import tensor_map

BLOCK_SIZES = (16, 32, 64, 128)
KEYS = 128  # of a tile
ITEM_COST = 2  # what an item costs besides its tiles (queries, first scores, result), in tiles


@dataclass(frozen=True)
class Tiling:
    """How a thread block divides its work."""

    consumers: int  # warpgroups that compute, on 64 queries each; one more moves memory
    stages: int  # tiles of K, and of V, that shared memory holds
    tile_time: float = 1.0  # measured, relative to the other tilings of the head size

    @property
    def queries(self) -> int:
        """Of a work item."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def smem_bytes(self, head_dim: int) -> int:
        """Alignment, tiles, barriers."""
        rows = self.queries + 2 * self.stages * KEYS
        return 1024 + rows * head_dim * 2 + 8 * (2 + 4 * self.stages)

    def time(self, work: npt.NDArray[np.int32], num_heads: int, num_sms: int) -> float:
        """Estimate of the kernel's time without a window, in tiles of a tiling with tile_time 1: that of the
        thread block with the most to do. Of two tilings' times on an H200 it gave the ratio within 7%."""
        _, first, q_len, kv_len = work.T
        tiles = -(-np.minimum(kv_len, kv_len - q_len + first + self.queries) // KEYS)
        costs = np.repeat(tiles + ITEM_COST, num_heads)
        blocks = min(len(costs), num_sms)
        rounds = np.pad(costs, (0, -len(costs) % blocks)).reshape(-1, blocks)
        rounds[1::2] = rounds[1::2, ::-1]  # as the kernel deals items out
        return float(rounds.sum(0).max()) * self.tile_time


TILINGS = {  # by head_dim
    # Three groups keep the tensor cores busier, but fill the device only with many items.
    64: (Tiling(consumers=2, stages=4), Tiling(consumers=3, stages=4, tile_time=1.23)),
    128: (Tiling(consumers=2, stages=2),),
}


def tilings(head_dim: int, softcap: bool) -> tuple[Tiling, ...]:
    """What a model may choose from; `softcap`: any layer has one. It leaves three groups too few registers."""
    return TILINGS[head_dim][:1] if softcap else TILINGS[head_dim]


def plan_items(
    choices: Sequence[Tiling],
    q_lens: npt.ArrayLike,
    kv_lens: npt.ArrayLike,
    num_heads: int,
    num_sms: int,
) -> tuple[Tiling, npt.NDArray[np.int32]]:
    """The tiling that takes the least time for these chunks, at least one, and `work` for it."""
    if len(choices) == 1:  # an estimate would take the host longer than the items
        return choices[0], work_items(q_lens, kv_lens, choices[0].queries)
    plans = [(tiling, work_items(q_lens, kv_lens, tiling.queries)) for tiling in choices]
    return min(plans, key=lambda plan: plan[0].time(plan[1], num_heads, num_sms))


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
    *,
    tiling: Tiling,
    num_items: Tensor | None = None,
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
    device, max_items = q.device.index, work.shape[0]
    kernel = load(tiling, head_dim, q.dtype, block_size, softcap > 0, device)
    cache_rows, box = num_blocks * num_kv_heads * block_size, (block_size, 64)
    kernel(
        (min(max_items * num_heads, num_sms(device)),),
        (tiling.threads,),
        (
            tensor_map(q, (tiling.queries, 1, 64)),
            tensor_map(k_cache.view(cache_rows, head_dim), box),
            tensor_map(v_cache.view(cache_rows, head_dim), box),
            out.data_ptr(),
            block_table.data_ptr(),
            rows.data_ptr(),
            work.data_ptr(),
            q_start.data_ptr(),
            0 if num_items is None else num_items.data_ptr(),
            np.int32(max_items),
            np.int32(block_table.stride(0)),
            *scalars(num_heads, num_kv_heads, window, scale, softcap, k_scale, v_scale),
        ),
    )


@cache
def scalars(
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    scale: float,
    softcap: float,
    k_scale: float,
    v_scale: float,
) -> tuple[np.generic, ...]:
    """As the kernel takes them, made once and not for every layer anew."""
    return (
        np.int32(num_heads),
        np.int32(num_kv_heads),
        np.int32(window or NO_WINDOW),
        np.float32(LOG2_E * (softcap or scale * k_scale)),
        np.float32(2 * LOG2_E * scale * k_scale / softcap if softcap else 0.0),
        np.float32(v_scale),
    )


def supports(head_dim: int, dtype: torch.dtype, block_size: int, arch: str) -> bool:
    """Whether this kernel can stand in for paged_prefill.

    `dtype` is the cache's, `arch` as jit.device_arch() says it.
    """
    return (
        arch == "sm_90a"
        and head_dim in TILINGS
        and dtype in (torch.bfloat16, torch.float16)
        and block_size in BLOCK_SIZES
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    if config.kv_dtype != config.dtype:
        return []
    if not supports(config.head_dim, config.dtype, config.block_size, "sm_90a"):
        return []
    return [
        variant(tiling, config.head_dim, config.dtype, config.block_size, capped)
        for tiling in tilings(config.head_dim, any(config.softcaps))
        for capped in config.softcaps
    ]


def variant(
    tiling: Tiling, head_dim: int, dtype: torch.dtype, block_size: int, softcap: bool
) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "CONSUMERS": tiling.consumers,
        "STAGES": tiling.stages,
    }
    if softcap:
        defines["SOFTCAP"] = 1
    return jit.VariantSpec(
        "paged_prefill_sm90.cu",
        "paged_prefill_sm90",
        defines,
        tiling.smem_bytes(head_dim),
        archs=("sm_90a",),
    )


@cache
def load(
    tiling: Tiling, head_dim: int, dtype: torch.dtype, block_size: int, softcap: bool, device: int
) -> jit.Kernel:
    spec = variant(tiling, head_dim, dtype, block_size, softcap)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


@cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
