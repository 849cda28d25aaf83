"""y = x W^T with what surrounds it in a decoder, for up to 64 rows, chosen for up to 16: bound by reading W.

Contract: engine/ops/fused_product.py, and here
    x        [M, K] bfloat16 or float16, 1 <= M <= 64, K a multiple of 8, last dimension contiguous, rows at
             multiples of 16 bytes
    w        [N, K] of x's dtype, contiguous, N even, gated a multiple of 16, at a multiple of 16 bytes; the
             kernel launched right before this one must not have written it, nor the bias (see
             cuda/common/dependent_launch.cuh)
    bias     [N] of x's dtype, contiguous, at a multiple of 4 bytes
    residual, out
             of x's dtype, last dimension contiguous, rows at multiples of 4 bytes; `out` may be float32
             instead, with rows at multiples of 8 bytes

A row of the result depends on its own row of x alone, and the same call gives the same bits every time.
How sums are grouped depends on the plan, that is on N, K, whether it is gated, the device, and M rounded up
to 16, 32 or 64.

The kernel is described in cuda/narrow_gemm.cu, `make_plan` chooses how it cuts up a product. It runs on all
devices and is made for Hopper, whose blocks can add their sums without a way through global memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops.hopper import Device, device_of, devices_of
from engine.ops.skinny_gemm import SMALL_W, most_rows
from engine.ops.wide_gemm_sm90 import products_of

# Of x: up to so many `linear` takes this kernel on Hopper for W of less than SMALL_W, where it does not take skinny_gemm.
CHOSEN_ROWS = 16

MAX_ROWS = 64
THREADS = 256
MAX_STAGES = 16
MIN_STAGES = 3  # fewer leave the memory idle
IN_FLIGHT = 64 * 1024  # bytes of W that an SM should have under way
SMALL_BLOCK = 96 * 1024  # bytes of W: who reads no more leaves half of its SM to the next kernel
CLUSTERS = (1, 2)  # of 4 and 8 blocks not enough run at a time on an H200: they took twice as long
MAX_FRAGMENTS = 32  # of 16 x 8 sums in a warp's registers
SQUARES_BYTES = 512  # what warps have of the sums of x's squares

# Of one SM of an H200, in bytes and multiply-adds a microsecond: what estimates are made of, fitted to
# measurements of ten products of 16 to 64 rows by several plans each. Only their ratios matter for the
# choice, and those are alike on other devices.
MEMORY_RATE = 32e3
L2_RATE = 45e3  # what comes from memory counts, too
PRODUCT_RATE = 0.8e6
CHUNK_US = 0.22  # a chunk takes so long in any case: a barrier, loads from shared memory, products
EXCHANGE_RATE = 40e3  # reads of other blocks' sums
LATENCY_US = 1.0  # of a load while all SMs load
CLUSTER_US = 0.8  # for the blocks of a cluster to wait for each other and start to read


@dataclass(frozen=True)
class Tiling:
    """How a block's warps cover a tile of W's rows and a chunk of its columns: macros of the kernel."""

    row_tiles: int  # 16 rows each, of a warp
    warps_n: int  # over the tile's rows
    warps_k: int  # over the chunk's columns
    chunk: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps_n


TILINGS = (  # by height. Wide chunks mean fewer barriers, where there is little to do between them
    Tiling(1, 1, 8, 128),
    Tiling(1, 1, 8, 256),
    Tiling(2, 1, 8, 128),
    Tiling(2, 1, 8, 256),
    Tiling(2, 2, 4, 64),
    Tiling(3, 2, 4, 64),
    Tiling(2, 4, 2, 64),
    Tiling(3, 4, 2, 64),
    Tiling(2, 8, 1, 64),
)


@dataclass(frozen=True)
class Plan:
    """How one product is cut up."""

    tiling: Tiling
    column_tiles: int  # 8 rows of x each
    cluster: int  # blocks that share a tile
    grid: int  # blocks
    tile_rows: int  # of W; even, at most the tiling's
    gated: bool  # tile_rows is a multiple of 16 then
    block_chunks: int  # of the block that has most, in all its tiles
    stages: int = 0
    smem_bytes: int = 0

    def __str__(self) -> str:
        tile = f"{self.tile_rows}/{self.tiling.rows} rows x {self.cluster} blocks"
        return f"{tile}, {self.stages} stages of {self.tiling.chunk}"


def narrow_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        return fused_product.reference(
            x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual
        )
    check(x, w, bias, out, gated, residual)
    if out is None:
        outputs = w.shape[0] // 2 if gated else w.shape[0]
        out = x.new_empty(x.shape[0], outputs)
    plan = prepare(column_tiles_for(x.shape[0]), *w.shape, gated, x.device.index)
    launch(x, w, bias, out, plan, norm_eps, residual)
    return out


def launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    plan: Plan,
    norm_eps: float | None = None,
    residual: Tensor | None = None,
) -> None:
    """The product by a given plan, for tensors within the contract."""
    load(plan, x.dtype, norm_eps is not None, out.dtype is torch.float32)(
        (plan.grid,),
        (THREADS,),
        (
            out.data_ptr(),
            x.data_ptr(),
            w.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            residual.data_ptr() if residual is not None else 0,
            np.int32(x.shape[0]),
            np.int32(w.shape[0]),
            np.int32(w.shape[1]),
            np.int32(x.stride(0)),
            np.int32(out.stride(0)),
            np.int32(residual.stride(0) if residual is not None else 0),
            np.int32(plan.tile_rows),
            np.float32(norm_eps or 0.0),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = 1 <= m <= MAX_ROWS and n >= 2 and n % 2 == 0 and k >= 8 and k % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def is_chosen(m: int, n: int, k: int, dtype: torch.dtype, device: Device) -> bool:
    """Whether this kernel is the fastest for x [m, k], W [n, k]."""
    are_few = most_rows(n, k, device.has_clusters) < m <= CHOSEN_ROWS
    is_small = 2 * n * k < SMALL_W
    return device.has_clusters and are_few and is_small and supports(m, n, k, dtype)


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
            f"narrow_gemm: x is {tuple(x.shape)} {x.dtype}, w has {n} rows; it takes 1 to {MAX_ROWS} rows "
            "of a multiple of 8 bfloat16 or float16 numbers, and an even number of rows of w. Use torch's "
            "linear for others"
        )
    fused_product.check_operands(
        "narrow_gemm", x, w, bias, out, gated, residual, alignment=4, takes_float32=True
    )


def column_tiles_for(m: int) -> int:
    """2, 4 or 8 tiles of 8 rows of x."""
    return 2 if m <= 16 else 4 if m <= 32 else 8


@cache
def prepare(column_tiles: int, n: int, k: int, gated: bool, device: int | None) -> Plan:
    """The plan of a product on a device. Raises ValueError where its shared memory is too small."""
    plan = make_plan(column_tiles, n, k, device_of(device), gated)
    if plan is None:
        raise ValueError(
            f"narrow_gemm: a product of {8 * column_tiles} rows does not fit into this device's shared "
            "memory; split the rows, or use torch's linear"
        )
    return plan


@cache
def load(plan: Plan, dtype: torch.dtype, normed: bool, float_out: bool = False) -> jit.Kernel:
    spec = variant(plan, dtype, normed, float_out)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


def make_plan(
    column_tiles: int, n: int, k: int, device: Device, gated: bool = False
) -> Plan | None:
    """The plan with the shortest estimate; None if nothing fits into shared memory."""
    plans = candidates(column_tiles, n, k, device, gated)
    return min(plans, key=lambda plan: estimate(plan, n, k, device), default=None)


def candidates(
    column_tiles: int, n: int, k: int, device: Device, gated: bool = False
) -> list[Plan]:
    """For each size of cluster the tiles of each height that give all clusters as many."""
    plans = [
        with_stages(plan, device) for plan in unstaged_plans(column_tiles, n, k, device, gated)
    ]
    return [plan for plan in plans if plan is not None]


def unstaged_plans(
    column_tiles: int, n: int, k: int, device: Device, gated: bool
) -> Iterator[Plan]:
    tilings = [t for t in TILINGS if t.row_tiles * column_tiles <= MAX_FRAGMENTS]
    group = 2 * fused_product.GROUP if gated else 2  # rows of W that stay together
    for cluster in CLUSTERS if device.has_clusters else (1,):
        num_clusters = device.clusters_of(cluster)
        if num_clusters == 0:
            continue
        numbers = {-(-n // (num_clusters * t.rows)) for t in tilings}  # of tiles, for each cluster
        for tiles in sorted(numbers):
            tile_rows = -(-n // (num_clusters * tiles * group)) * group
            height = next(t.rows for t in tilings if t.rows >= tile_rows)
            for tiling in [t for t in tilings if t.rows == height]:
                num_tiles, num_chunks = -(-n // tile_rows), -(-k // tiling.chunk)
                if num_chunks < cluster:  # a block would have nothing to do
                    continue
                grid = cluster * min(num_tiles, num_clusters)
                block_chunks = -(-num_tiles * cluster // grid) * -(-num_chunks // cluster)
                yield Plan(tiling, column_tiles, cluster, grid, tile_rows, gated, block_chunks)


def with_stages(plan: Plan, device: Device) -> Plan | None:
    """As many stages as it takes to have enough of W under way, or all that a block reads; None if too
    few fit. More would do harm: in what is left, the next kernel's blocks fetch their first weights.
    """
    tiling, columns = plan.tiling, 8 * plan.column_tiles
    stage = 2 * tiling.chunk * (tiling.rows + columns)
    sums = 4 * tiling.rows * columns * tiling.warps_k + SQUARES_BYTES
    if plan.cluster > 1:  # what blocks send each other, of two tiles; of squares; two barriers
        sums += 2 * 4 * tiling.rows * columns + 4 * plan.cluster * columns + 16
    w_chunk = 2 * tiling.chunk * plan.tile_rows
    wanted = min(MAX_STAGES, min(plan.block_chunks, -(-IN_FLIGHT // w_chunk)) + 1)
    is_small = plan.block_chunks * w_chunk <= SMALL_BLOCK
    for limit in ((device.smem_limit - 1024) // 2,) * is_small + (device.smem_limit,):
        stages = min(max(MIN_STAGES, wanted), (limit - sums) // stage)
        if stages >= MIN_STAGES:
            return replace(plan, stages=stages, smem_bytes=stages * stage + sums)
    return None


def estimate(plan: Plan, n: int, k: int, device: Device) -> float:
    """Microseconds from the first load to the last store, but for a constant."""
    tiling, columns = plan.tiling, 8 * plan.column_tiles
    w_bytes, x_bytes = 2 * tiling.chunk * plan.tile_rows, 2 * tiling.chunk * columns  # of a chunk
    time = max(
        2 * n * k / (device.num_sms * MEMORY_RATE),
        plan.block_chunks / (plan.stages - 1) * LATENCY_US,
        plan.block_chunks * (w_bytes + x_bytes) / L2_RATE,
        plan.block_chunks * tiling.chunk * tiling.rows * columns / PRODUCT_RATE,
        plan.block_chunks * CHUNK_US,
    )
    sums = 4 * plan.tile_rows * columns
    return time + (CLUSTER_US + sums / EXCHANGE_RATE if plan.cluster > 1 else 0.0)


def variant(
    plan: Plan, dtype: torch.dtype, normed: bool = False, float_out: bool = False
) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "ROW_TILES": plan.tiling.row_tiles,
        "WARPS_N": plan.tiling.warps_n,
        "WARPS_K": plan.tiling.warps_k,
        "CHUNK": plan.tiling.chunk,
        "COLUMN_TILES": plan.column_tiles,
        "STAGES": plan.stages,
        "CLUSTER": plan.cluster,
    }
    if normed:
        defines["NORMED"] = 1
    if plan.gated:
        defines["GATED"] = 1
    if float_out:
        defines["FLOAT_OUT"] = 1
    archs = jit.ALL_ARCHS if plan.cluster == 1 else ("sm_90a",)
    return jit.VariantSpec("narrow_gemm.cu", "narrow_gemm", defines, plan.smem_bytes, archs)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The products of a decoder for which this kernel pays, on the current device or, if config.arch is
    given, on every card of that architecture."""
    if config.dtype not in (torch.bfloat16, torch.float16):
        return []
    found = []
    for device in devices_of(config.arch):
        for p in products_of(config):
            rows = CHOSEN_ROWS  # fewer have the same plan
            if not is_chosen(rows, p.n, p.k, config.dtype, device):
                continue
            plan = make_plan(column_tiles_for(rows), p.n, p.k, device, p.gated)
            if plan is not None:
                found.append(variant(plan, config.dtype, p.normed, p.float_out))
    return [spec for i, spec in enumerate(found) if spec not in found[:i]]
