"""silu(x G^T) * (x U^T) for many rows x on Hopper GPUs (sm_90a): a product that applies the gate before it writes.

Contract: engine/ops/fused_product.py's for `gated`, without bias, norm and residual, and here
    x        [M, K] bfloat16 or float16, normed, K a multiple of 8, last dimension contiguous, rows at multiples
             of 16 bytes
    w        [N, K] of x's dtype, gate and up interleaved by eights, contiguous, N a multiple of 16, at a multiple
             of 16 bytes; the kernel launched right before this one must not have written it
             (cuda/common/dependent_launch.cuh)
    out      [M, N / 2] of x's dtype, last dimension contiguous, rows at multiples of 16 bytes, if given
    returns  out, rounded once: gate, up and silu's result are never rounded

A row of the result depends on its own row of x alone, sums are in the order of K whatever the tiling: a row
has the same bits in every batch. The first product of a tiling loads its kernel, which cannot happen while a
graph is captured.

The library's product writes [M, N], and a kernel behind it reads that again: for a 7B model at 8,192 rows 0.9 GB
a layer. Here half of that is written, and nothing is read. The kernel is described in cuda/gated_gemm_sm90.cu.
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

# Where `linear` takes this kernel and not torch's library with a kernel behind it: rows of x, and bytes of W.
CHOSEN: tuple[tuple[range, range], ...] = ()

CHUNK = 64  # columns of x and W that a stage holds
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take
SMEM_LIMIT = 227 << 10  # bytes of a block on Hopper
MAX_STAGES = 8
GATE_CYCLES = 16  # of a scheduler, for a warp's exponentials and reciprocals of 32 outputs


@dataclass(frozen=True)
class Tiling:
    """How warpgroups cover a tile, and blocks the product: macros of the kernel."""

    groups: int  # warpgroups that multiply
    heights: int  # 64 rows of x each, of a warpgroup
    tile: int  # rows of W
    ping_pong: bool = False  # each warpgroup has a tile of its own
    cluster: int = 1  # blocks below each other that fetch W together

    @property
    def rows(self) -> int:
        """Of x, in a block's tile."""
        return 64 * self.heights * (1 if self.ping_pong else self.groups)

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def stage_bytes(self) -> int:
        """A chunk of x and W, and two barriers."""
        return 2 * CHUNK * (self.rows + self.tile) + 16

    @property
    def stages(self) -> int:
        return min(MAX_STAGES, (SMEM_LIMIT - ALIGNMENT) // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return ALIGNMENT + self.stages * self.stage_bytes

    def __str__(self) -> str:
        """Rows of x and of W in a tile; blocks that share W."""
        way = " in turns" if self.ping_pong else ""
        return f"{self.rows}x{self.tile}/{self.cluster}{way}"


TILINGS = tuple(
    Tiling(groups, heights, tile, ping_pong, cluster)
    for groups, heights, tile, ping_pong in (
        (2, 1, 256, False),
        (2, 2, 192, False),
        (3, 1, 192, False),
        (2, 2, 192, True),
        (2, 2, 128, True),
    )
    for cluster in (1, 2)
)


def gated_gemm_sm90(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        return fused_product.reference(x, w, out=out, gated=True)
    check(x, w, out)
    m, (n, k) = x.shape[0], w.shape
    if out is None:
        out = x.new_empty(m, n // 2)
    launch(x, w, out, tiling_for(m, n, k, device_of(x.device.index)))
    return out


def launch(x: Tensor, w: Tensor, out: Tensor, tiling: Tiling) -> None:
    """The product by a given tiling, for tensors within the contract."""
    m, (n, k) = x.shape[0], w.shape
    device = device_of(x.device.index)
    load(tiling, x.dtype)(
        (grid_of(tiling, m, n, device),),
        (tiling.threads,),
        (
            tensor_map(w, (tiling.tile // tiling.cluster, CHUNK)),
            tensor_map(x, (tiling.rows, CHUNK)),
            out.data_ptr(),
            *map(np.int32, (m, n, k, out.stride(0), band_of(tiling, m, device))),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = m >= 1 and n >= 16 and n % 16 == 0 and k >= 8 and k % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def is_chosen(m: int, n: int, k: int, dtype: torch.dtype, device: int | None) -> bool:
    """Whether this kernel is the fastest for x [m, k], W [n, k] on a CUDA device, and the gate."""
    return pays(m, n, k) and supports(m, n, k, dtype) and device_of(device).has_clusters


def pays(m: int, n: int, k: int) -> bool:
    return any(m in rows and 2 * n * k in nbytes for rows, nbytes in CHOSEN)


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
def load(tiling: Tiling, dtype: torch.dtype) -> jit.Kernel:
    spec = variant(tiling, dtype)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


@cache
def tiling_for(m: int, n: int, k: int, device: Device) -> Tiling:
    """The one with the shortest estimate."""
    fitting = (tiling for tiling in TILINGS if tiling.cluster <= device.num_sms)
    return min(fitting, key=lambda tiling: cycles(tiling, m, n, k, device))


def cycles(tiling: Tiling, m: int, n: int, k: int, device: Device) -> int:
    """Of the SM that has most tiles: chunks, and the gates of a tile. With warpgroups that take turns only the
    last tile's gates show."""
    rounds = ceil(items_of(tiling, m, n) / device.clusters_of(tiling.cluster))
    products = ceil(k / CHUNK) * chunk_cycles(tiling)
    gates = GATE_CYCLES * tiling.rows * tiling.tile // 256
    return rounds * products + gates * (1 if tiling.ping_pong else rounds)


def chunk_cycles(tiling: Tiling) -> int:
    """Of tensor cores at wgmma's full rate, or of shared memory, into which 128 bytes a cycle are written and from
    which each 64 rows of x are read with all rows of W."""
    heights, tile = tiling.rows // 64, tiling.tile
    return max(heights * 2 * tile, tiling.rows + tile + heights * (64 + tile))


def items_of(tiling: Tiling, m: int, n: int) -> int:
    """Tiles of a cluster: of its blocks together."""
    return heights_of(tiling, m) * ceil(n / tiling.tile)


def heights_of(tiling: Tiling, m: int) -> int:
    """Tiles of a cluster, one below the other."""
    return ceil(m / (tiling.cluster * tiling.rows))


def grid_of(tiling: Tiling, m: int, n: int, device: Device) -> int:
    """Blocks: no more than run at a time."""
    clusters = min(items_of(tiling, m, n), device.clusters_of(tiling.cluster))
    return clusters * tiling.cluster


def band_of(tiling: Tiling, m: int, device: Device) -> int:
    """Heights in a band, such that tiles that run at a time span about as many rows of x as of W; bands are
    alike, but for the last."""
    heights = heights_of(tiling, m)
    at_a_time = device.clusters_of(tiling.cluster)
    square = sqrt(at_a_time * tiling.tile / (tiling.cluster * tiling.rows))
    return ceil(heights / ceil(heights / square))


def variant(tiling: Tiling, dtype: torch.dtype) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "GROUPS": tiling.groups,
        "HEIGHTS": tiling.heights,
        "TILE": tiling.tile,
        "STAGES": tiling.stages,
        "CLUSTER": tiling.cluster,
        "PING_PONG": int(tiling.ping_pong),
    }
    return jit.VariantSpec(
        "gated_gemm_sm90.cu", "gated_gemm_sm90", defines, tiling.smem_bytes, archs=("sm_90a",)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """All tilings if a decoder's gated product is this kernel's for some number of rows: which of them it takes
    depends on that number."""
    n, k = 2 * config.intermediate_size, config.hidden_size
    is_used = any(2 * n * k in nbytes for _, nbytes in CHOSEN) and supports(1, n, k, config.dtype)
    on_hopper = any(device.has_clusters for device in devices_of(config.arch))
    return [variant(tiling, config.dtype) for tiling in TILINGS] if is_used and on_hopper else []
