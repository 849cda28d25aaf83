"""silu(x G^T) * (x U^T) for many rows x on Hopper GPUs (sm_90a): a product that applies the gate before it writes.

Contract: engine/ops/fused_product.py's for `gated`, without bias and residual, without norm, which is a kernel in
front, and here
    x        [M, K] bfloat16 or float16, K a multiple of 8, last dimension contiguous, rows at multiples of 16
             bytes
    w        [N, K] of x's dtype, gate and up interleaved by eights, contiguous, N a multiple of 16, at a multiple
             of 16 bytes; the kernel launched right before this one must not have written it
             (cuda/common/dependent_launch.cuh)
    out      [M, N / 2] of x's dtype, last dimension contiguous, rows at multiples of 16 bytes, if given
    returns  out, rounded once: gate, up and silu's result are never rounded

A row of the result depends on its own row of x alone, and sums are in the order of K whatever the tile: a row
has the same bits in every batch. The first product with a tile loads its kernel, which cannot happen while a
graph is captured.

The library's product writes [M, N], and a kernel behind it reads that again: for a 7B model at 8,192 rows 0.9 GB
a layer. Here half of that is written, and nothing is read. The kernel is described in cuda/gated_gemm_sm90.cu.
Products without a gate are the library's: the same kernel, timed with what a decoder does to them, was slower.
"""

from functools import cache
from math import ceil, sqrt

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops.hopper import Device, device_of, devices_of
from engine.ops.tensor_map import tensor_map
from engine.ops.wide_gemm_sm90 import products_of

# For so many rows `linear` takes this kernel and not torch's library with a kernel behind it: measured on an H200.
FEWEST_ROWS = 193

ROWS = 128  # of x, in a tile
TILES = (192, 128)  # rows of W
# Of a round, in which each SM computes a tile, relative to each other. Fitted to products of 256 to 8192 rows of a 7B
# and a 0.5B model on an H200: the tile that is cheaper by it is the faster one, or 1 % slower.
ROUND_COST = {192: 1.38, 128: 1.0}

CHUNK = 64  # columns of x and W that a stage holds
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take
SMEM_LIMIT = 227 << 10  # bytes of a block on Hopper
THREADS = 384  # two warpgroups that multiply, and one that fetches


def gated_gemm_sm90(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        return fused_product.reference(x, w, out=out, gated=True)
    check(x, w, out)
    m, n = x.shape[0], w.shape[0]
    if out is None:
        out = x.new_empty(m, n // 2)
    launch(x, w, out, tile_for(m, n, device_of(x.device.index)))
    return out


def launch(x: Tensor, w: Tensor, out: Tensor, tile: int) -> None:
    """The product by tiles of so many rows of W, for tensors within the contract."""
    m, (n, k) = x.shape[0], w.shape
    device = device_of(x.device.index)
    load(tile, x.dtype)(
        (grid_of(tile, m, n, device),),
        (THREADS,),
        (
            tensor_map(w, (tile, CHUNK)),
            tensor_map(x, (ROWS, CHUNK)),
            out.data_ptr(),
            *map(np.int32, (m, n, k, out.stride(0), band_of(tile, m, device))),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed, and gate that."""
    fits = m >= 1 and n >= 16 and n % 16 == 0 and k >= 8 and k % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def check(x: Tensor, w: Tensor, out: Tensor | None = None) -> None:
    """Raises ValueError with a remedy for tensors outside the contract."""
    (m, k), n = x.shape, w.shape[0]
    if not supports(m, n, k, x.dtype):
        raise ValueError(
            f"gated_gemm_sm90: x is {tuple(x.shape)} {x.dtype}, w has {n} rows; it takes rows of a multiple "
            "of 8 bfloat16 or float16 numbers, and a multiple of 16 rows of w. Use torch's linear and "
            "act_and_mul for others"
        )
    if not device_of(x.device.index).has_clusters:
        raise ValueError(
            "gated_gemm_sm90 needs a Hopper GPU (sm_90); use torch's linear and act_and_mul on others"
        )
    fused_product.check_operands("gated_gemm_sm90", x, w, None, out, True, None, alignment=16)


@cache
def load(tile: int, dtype: torch.dtype) -> jit.Kernel:
    spec = variant(tile, dtype)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


@cache
def tile_for(m: int, n: int, device: Device) -> int:
    """The one of TILES with the shorter estimate."""
    return min(TILES, key=lambda tile: rounds_of(tile, m, n, device) * ROUND_COST[tile])


def rounds_of(tile: int, m: int, n: int, device: Device) -> int:
    """Tiles of the SM that has most."""
    return ceil(tiles_of(tile, m, n) / device.num_sms)


def tiles_of(tile: int, m: int, n: int) -> int:
    return ceil(m / ROWS) * ceil(n / tile)


def grid_of(tile: int, m: int, n: int, device: Device) -> int:
    """Blocks: no more than run at a time."""
    return min(tiles_of(tile, m, n), device.num_sms)


def band_of(tile: int, m: int, device: Device) -> int:
    """Tiles below each other in a band, such that those that run at a time span about as many rows of x as of W;
    bands are alike, but for the last."""
    heights = ceil(m / ROWS)
    return ceil(heights / ceil(heights / sqrt(device.num_sms * tile / ROWS)))


def stages_of(tile: int) -> int:
    return (SMEM_LIMIT - ALIGNMENT) // stage_bytes(tile)


def stage_bytes(tile: int) -> int:
    """A chunk of x and W, and two barriers."""
    return 2 * CHUNK * (ROWS + tile) + 16


def variant(tile: int, dtype: torch.dtype) -> jit.VariantSpec:
    stages = stages_of(tile)
    defines = {jit.scalar_define(dtype): 1, "TILE": tile, "STAGES": stages}
    smem_bytes = ALIGNMENT + stages * stage_bytes(tile)
    return jit.VariantSpec(
        "gated_gemm_sm90.cu", "gated_gemm_sm90", defines, smem_bytes, archs=("sm_90a",)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """Both tiles, for a decoder's gated product: which of them it takes depends on the number of rows."""
    takes = any(
        p.gated and supports(FEWEST_ROWS, p.n, p.k, config.dtype) for p in products_of(config)
    )
    on_hopper = any(device.has_clusters for device in devices_of(config.arch))
    return [variant(tile, config.dtype) for tile in TILES] if takes and on_hopper else []
