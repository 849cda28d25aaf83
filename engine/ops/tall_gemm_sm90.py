"""y = x W^T for many rows x on Hopper GPUs (sm_90a), with what a decoder does to the result before it is written.

Contract: engine/ops/fused_product.py's without norm, which is a kernel in front, and here
    x         [M, K] bfloat16 or float16, K a multiple of 8, last dimension contiguous, rows at multiples of 16
              bytes
    w         [N, K] of x's dtype, contiguous, N a multiple of 8 (gated: 16), at a multiple of 16 bytes; the kernel
              launched right before this one must not have written it (cuda/common/dependent_launch.cuh)
    bias      [N] of x's dtype, contiguous, at a multiple of 4 bytes, or None; gated: None
    residual  [M, N] of x's dtype, last dimension contiguous, rows at multiples of 16 bytes, or None. The result is
              written over it. Not if gated
    out       [M, outputs] of x's dtype, likewise, if given: not besides a residual

A row of the result depends on its own row of x alone, and sums are in the order of K whatever the tile: a row
has the same bits in every batch. The first product of a kind loads its kernels, which cannot happen while a
graph is captured.

Gated, the library's product writes [M, N], and a kernel behind it reads that again: for a 7B model at 8,192 rows
0.9 GB a layer. Here half of that is written, and nothing is read. The kernel is described in
cuda/tall_gemm_sm90.cu.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil, sqrt

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops.narrow_gemm import Device, device_of, devices_of
from engine.ops.tensor_map import tensor_map
from engine.ops.wide_gemm_sm90 import products_of

ANY = range(1, 1 << 40)


@dataclass(frozen=True)
class Shapes:
    """Of products: rows of x, rows of W, columns."""

    m: range
    n: range = ANY
    k: range = ANY

    def has(self, m: int, n: int, k: int) -> bool:
        return m in self.m and n in self.n and k in self.k


# Where `linear` takes this kernel, if none for few rows, and not torch's library with kernels behind it. Measured
# on an H200.
CHOSEN: dict[str, tuple[Shapes, ...]] = {
    "gated": (Shapes(m=range(257, 1 << 40)),),
    "other": (),
}

ROWS = 128  # of x, in a tile
TILES = (192, 128)  # rows of W
# Of a round, in which each SM computes a tile, relative to each other. Fitted to gated products of 512 to 8192 rows
# of a 7B and a 0.5B model on an H200: the tile that is cheaper by it is the faster one, or less than 1 % slower.
ROUND_COST = {192: 1.45, 128: 1.0}

CHUNK = 64  # columns of x and W that a stage holds
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take
SMEM_LIMIT = 227 << 10  # bytes of a block on Hopper
THREADS = 384  # two warpgroups that multiply, and one that fetches


def tall_gemm_sm90(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        out = out if residual is None else residual
        return fused_product.reference(x, w, bias, out, gated=gated, residual=residual)
    check(x, w, bias, out, gated, residual)
    m, n = x.shape[0], w.shape[0]
    tile = tile_for(m, n, device_of(x.device.index))
    if residual is not None:
        out = residual
    elif out is None:
        out = x.new_empty(m, n // 2 if gated else n)
    launch(x, w, bias, out, tile, gated, residual is not None)
    return out


def launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tile: int,
    gated: bool = False,
    residual: bool = False,
) -> None:
    """The product by tiles of so many rows of W, for tensors within the contract. `residual`: onto `out`."""
    m, (n, k) = x.shape[0], w.shape
    device = device_of(x.device.index)
    load(tile, x.dtype, gated, residual)(
        (grid_of(tile, m, n, device),),
        (THREADS,),
        (
            tensor_map(w, (tile, CHUNK)),
            tensor_map(x, (ROWS, CHUNK)),
            out.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            *map(np.int32, (m, n, k, out.stride(0), band_of(tile, m, device))),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = m >= 1 and n >= 8 and n % 8 == 0 and k >= 8 and k % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def is_chosen(m: int, n: int, k: int, gated: bool, dtype: torch.dtype, device: int | None) -> bool:
    """Whether this kernel is the fastest for x [m, k], W [n, k] on a CUDA device, and what is behind them, if none
    for few rows is chosen."""
    pays = any(shapes.has(m, n, k) for shapes in chosen(gated))
    return pays and supports(m, n, k, dtype) and device_of(device).has_clusters


def chosen(gated: bool) -> tuple[Shapes, ...]:
    return CHOSEN["gated" if gated else "other"]


def check(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> None:
    """Raises ValueError with a remedy for tensors outside the contract."""
    (m, k), n = x.shape, w.shape[0]
    if not supports(m, n, k, x.dtype):
        raise ValueError(
            f"tall_gemm_sm90: x is {tuple(x.shape)} {x.dtype}, w has {n} rows; it takes rows of a multiple "
            "of 8 bfloat16 or float16 numbers, and a multiple of 8 rows of w. Use torch's linear for others"
        )
    if gated and (bias is not None or residual is not None):
        raise ValueError(
            "tall_gemm_sm90: a gated product takes neither bias nor residual. Use torch's linear and act_and_mul"
        )
    if out is not None and residual is not None:
        raise ValueError("tall_gemm_sm90: a residual is written over; leave out the other `out`")
    if not device_of(x.device.index).has_clusters:
        raise ValueError("tall_gemm_sm90 needs a Hopper GPU (sm_90); use torch's linear on others")
    fused_product.check_operands("tall_gemm_sm90", x, w, bias, out, gated, residual, alignment=16)


@cache
def load(tile: int, dtype: torch.dtype, gated: bool, residual: bool) -> jit.Kernel:
    spec = variant(tile, dtype, gated, residual)
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


def variant(
    tile: int, dtype: torch.dtype, gated: bool = False, residual: bool = False
) -> jit.VariantSpec:
    stages = stages_of(tile)
    defines = {
        jit.scalar_define(dtype): 1,
        "TILE": tile,
        "STAGES": stages,
        "GATED": int(gated),
        "RESIDUAL": int(residual),
    }
    smem_bytes = ALIGNMENT + stages * stage_bytes(tile)
    return jit.VariantSpec(
        "tall_gemm_sm90.cu", "tall_gemm_sm90", defines, smem_bytes, archs=("sm_90a",)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """Both tiles for each kind of product of a decoder that is this kernel's for some number of rows."""
    if not any(device.has_clusters for device in devices_of(config.arch)):
        return []
    kinds = {
        (p.gated, p.residual)
        for p in products_of(config)
        if any(p.n in shapes.n and p.k in shapes.k for shapes in chosen(p.gated))
        and supports(1, p.n, p.k, config.dtype)
    }
    return [variant(tile, config.dtype, *kind) for kind in sorted(kinds) for tile in TILES]
