"""y = x W^T for up to 256 rows on Hopper GPUs (sm_90a), near the rate at which W can be read, with what surrounds
the product in a decoder. `linear.fastest` says where it is taken.

Contract, besides engine/ops/fused_product.py's
    x         [M, K] bfloat16 or float16, 1 <= M <= 256, K a multiple of 8, last dimension contiguous, rows at
              multiples of 16 bytes
    w         [N, K] of x's dtype, contiguous, N a multiple of 8 (gated: 16), at a multiple of 16 bytes; the
              kernel launched right before this one must not have written it (cuda/common/dependent_launch.cuh)
    bias      [N] of x's dtype, contiguous, at a multiple of 4 bytes, or None
    residual  of the result's shape and x's dtype, last dimension contiguous, rows at multiples of 16 bytes
    out       likewise, if given; without a residual it may be float32, with rows at multiples of 32 bytes

A row of the result depends on its own row of x alone, and the same call gives the same bits every time.
How sums are grouped depends on the plan, that is on N, K, norm and gate, the device, and M rounded up to one of
ROWS. The first product of a plan loads its kernel, which cannot happen while a graph is captured.

The kernel is described in cuda/wide_gemm_sm90.cu, `make_plan` chooses how it cuts up a product. Against
torch's library it gains by what it does on the way, and where launches depend on each other: the library
starts when the kernel before has ended, this kernel has its first weights by then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops.hopper import Device, device_of
from engine.ops.tensor_map import tensor_map

MAX_BYTES = 1 << 33  # of W, so that the kernel can count its elements in 32 bits

ROWS = (32, 64, 128, 192, 256)  # of x, up to which plans are made
CHUNK = 64  # columns of x and W that a stage holds
CLUSTERS = (1, 2, 4)  # blocks that share a tile; of eight too few would run at a time
TILES = (*range(8, 129, 8), 144, 160, 176, 192, 224, 256)  # sizes of N in cuda/common/sm90.cuh
MIN_STAGES = 3
MAX_STAGES = 12
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take
LEFT_OVER = 8 << 10  # bytes of shared memory that no block takes, for small kernels

# What estimates are made of: fitted to 840 timed plans of the products of ten models, 0.1 to 14B, at 64, 128 and 256
# rows in chains of dependent launches on an H200. The plans that they choose took 1.003 times as long as the fastest
# ones in the mean, 1.08 at most; fitted to six of the models, 1.005 and 1.08 for the other four.
MEMORY_RATE = 40.5e3  # bytes of W a microsecond, of one SM if all read
CYCLES_PER_US = 1750.0
CHUNK_US = 0.093  # to wait for a chunk, start its products and free its stage
PRODUCTS_SHOW = 0.66  # of the time that tensor cores take; the rest is hidden in CHUNK_US
NORM_US = 0.098  # to add up the squares of 64 rows of x in a chunk
LATENCY_US = 1.69  # from freeing a stage until its next chunk is there
OVERLAP = 0.445  # of the shorter of two things that go on at a time shows
EXCHANGE_US = 0.28  # for the blocks of a cluster to wait for each other's sums
EXCHANGE_RATE = 14.4e3  # bytes of sums a microsecond
CROWDED_US = 0.77  # if a block takes more than half of an SM: the next kernel's start later
START_US = 1.16  # of any product that is started early


@dataclass(frozen=True)
class Tiling:
    """How a block's warpgroups cover all rows of x: macros of the kernel."""

    warpgroups: int
    heights: int  # 64 rows of x each, of a warpgroup
    widest: int  # rows of W in a tile, so that a warpgroup's sums fit into registers
    # beside a single warp that fetches; for wider ones it is a warpgroup, which gives its registers away
    widest_beside_a_warp: int

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups * self.heights


TILINGS = (
    Tiling(1, 1, 256, 256),
    Tiling(2, 1, 256, 192),
    Tiling(3, 1, 192, 112),
    Tiling(2, 2, 160, 96),
)


@dataclass(frozen=True)
class Plan:
    """How one product is cut up."""

    tiling: Tiling
    tile: int  # rows of W
    cluster: int  # blocks that share a tile, by columns
    grid: int  # blocks
    rounds: int  # tiles, one after another, of the block that has most
    num_chunks: int  # of K
    gated: bool
    stages: int = MIN_STAGES

    @property
    def threads(self) -> int:
        fetching = 32 if self.tile <= self.tiling.widest_beside_a_warp else 128
        return 128 * self.tiling.warpgroups + fetching

    @property
    def units(self) -> int:
        """Chunks that a block reads, of all its tiles."""
        return self.rounds * -(-self.num_chunks // self.cluster)

    @property
    def stage_bytes(self) -> int:
        """A chunk of x and W, and two barriers."""
        return 2 * CHUNK * (self.tiling.rows + self.tile) + 16

    @property
    def smem_bytes(self) -> int:
        """Of a block: alignment, stages, two more barriers."""
        return ALIGNMENT + self.stages * self.stage_bytes + 16

    @property
    def parcel_bytes(self) -> int:
        """What a block of a split product receives, where its stages were: sums, and squares of its rows."""
        if self.cluster == 1:
            return 0
        octets, blended = self.tile // 8, 2 if self.gated else 1
        bands, quartets = self.tiling.rows // 16, -(-octets // (4 * blended))
        dealt = -(-bands * quartets // self.cluster)
        return 16 * dealt * self.cluster * (32 * min(octets, 4 * blended) + 8)

    @property
    def least_stages(self) -> int:
        return max(MIN_STAGES, -(-self.parcel_bytes // (self.stage_bytes - 16)))

    def __str__(self) -> str:
        """Tiles, by as many blocks each; rows of W; rounds; stages."""
        rounds = f" r{self.rounds}" if self.rounds > 1 else ""
        return f"{self.grid // self.cluster}/{self.cluster} x{self.tile}{rounds} s{self.stages}"


def wide_gemm_sm90(
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
    m, (n, k) = x.shape[0], w.shape
    if out is None:
        out = x.new_empty(m, n // 2 if gated else n)
    plan = prepare(rows_for(m), n, k, gated, norm_eps is not None, x.device.index)
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
    m, (n, k) = x.shape[0], w.shape
    residual_stride = 0 if residual is None else residual.stride(0)
    is_float = out.dtype is torch.float32
    load(plan, x.dtype, norm_eps is not None, residual is not None, is_float)(
        (plan.grid,),
        (plan.threads,),
        (
            tensor_map(w, (plan.tile, CHUNK)),
            tensor_map(x, (m, CHUNK)),
            out.data_ptr(),
            residual.data_ptr() if residual is not None else 0,
            bias.data_ptr() if bias is not None else 0,
            *scalars(m, n, k, out.stride(0), residual_stride, norm_eps or 0.0),
        ),
    )


@cache
def scalars(
    m: int, n: int, k: int, out_stride: int, residual_stride: int, eps: float
) -> tuple[np.generic, ...]:
    """As the kernel takes them, made once and not for every layer anew."""
    sizes = (m, n, k, out_stride, residual_stride)
    return (*map(np.int32, sizes), np.float32(eps))


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = 1 <= m <= ROWS[-1] and n >= 8 and n % 8 == 0 and k >= 8 and k % 8 == 0
    return fits and 2 * n * k < MAX_BYTES and dtype in (torch.bfloat16, torch.float16)


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
            f"wide_gemm_sm90: x is {tuple(x.shape)} {x.dtype}, w has {n} rows; it takes 1 to "
            f"{ROWS[-1]} rows of a multiple of 8 bfloat16 or float16 numbers, and a multiple of 8 rows "
            "of w. Use torch's linear for others"
        )
    fused_product.check_operands(
        *("wide_gemm_sm90", x, w, bias, out, gated, residual),
        alignment=16,
        takes_float32=residual is None,
    )


@cache
def rows_for(m: int) -> int:
    return next(rows for rows in ROWS if m <= rows)


@cache
def prepare(rows: int, n: int, k: int, gated: bool, normed: bool, device: int | None) -> Plan:
    """The plan of a product on a device. Raises ValueError on a device that is not Hopper's."""
    limits = device_of(device)
    if not limits.has_clusters:
        raise ValueError("wide_gemm_sm90 needs a Hopper GPU (sm_90); use torch's linear on others")
    return make_plan(rows, n, k, limits, gated, normed)


@cache
def load(
    plan: Plan, dtype: torch.dtype, normed: bool, residual: bool, float_out: bool = False
) -> jit.Kernel:
    spec = variant(plan, dtype, normed, residual, float_out)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


def make_plan(
    rows: int, n: int, k: int, device: Device, gated: bool = False, normed: bool = False
) -> Plan:
    """The plan with the shortest estimate for up to `rows` rows, one of ROWS."""
    plans = candidates(rows, n, k, device, gated)
    return min(plans, key=lambda plan: estimate(plan, rows, n, k, normed, device))


def candidates(rows: int, n: int, k: int, device: Device, gated: bool = False) -> list[Plan]:
    """For each size of cluster the lowest tiles that cover W in one round, or, of single blocks, in the fewest and
    in one more; with as many stages as fit into half of an SM's shared memory, and into all."""
    limits = (half_of(device), device.smem_limit - LEFT_OVER)
    plans = [
        replace(plan, stages=stages)
        for plan in unstaged_plans(rows, n, k, device, gated)
        for stages in [most_stages(plan, limit) for limit in limits]
        if stages is not None
    ]
    return list(dict.fromkeys(plans))


def unstaged_plans(rows: int, n: int, k: int, device: Device, gated: bool) -> Iterator[Plan]:
    tiling = next(tiling for tiling in TILINGS if rows <= tiling.rows)
    num_chunks = -(-k // CHUNK)
    for cluster in CLUSTERS:
        limit = device.clusters_of(cluster)  # tiles at a time
        if limit == 0 or num_chunks < cluster:
            continue
        least = -(-n // (limit * tiling.widest))
        for rounds in (least, least + 1) if cluster == 1 else (1,):
            tile = tile_for(n, limit * rounds, tiling, gated)
            if tile is not None:
                num_tiles = -(-n // tile)
                actual = -(-num_tiles // limit)
                grid = -(-num_tiles // actual) * cluster
                yield Plan(tiling, tile, cluster, grid, actual, num_chunks, gated)


def tile_for(n: int, num_tiles: int, tiling: Tiling, gated: bool) -> int | None:
    """The lowest of which so many cover W; None if that is too wide for the registers."""
    unit = 2 * fused_product.GROUP if gated else 8
    fitting = (tile for tile in TILES if tile * num_tiles >= n and tile % unit == 0)
    return next((tile for tile in fitting if tile <= tiling.widest), None)


def most_stages(plan: Plan, smem_bytes: int) -> int | None:
    """As many as fit and are of use; None if too few fit."""
    fitting = (smem_bytes - ALIGNMENT - 16) // plan.stage_bytes
    stages = min(fitting, max(plan.least_stages, min(plan.units, MAX_STAGES)))
    return stages if stages >= plan.least_stages else None


@cache
def least_us(rows: int, n: int, k: int, device: Device, gated: bool, normed: bool) -> float:
    """The shortest estimate for up to `rows` rows, one of ROWS."""
    return estimate(make_plan(rows, n, k, device, gated, normed), rows, n, k, normed, device)


def estimate(plan: Plan, rows: int, n: int, k: int, normed: bool, device: Device) -> float:
    """Microseconds for `rows` of x."""
    chunk = CHUNK_US + PRODUCTS_SHOW * product_cycles(plan) / CYCLES_PER_US
    if normed:  # in the first of several tiles
        chunk += NORM_US * plan.tiling.rows / 64 / plan.rounds
    refills = max(0, plan.units - plan.stages)
    working = plan.units * chunk + refills * max(0.0, LATENCY_US / plan.stages - chunk)
    reading = 2 * n * k / (device.num_sms * MEMORY_RATE)
    time = START_US + max(reading, working) + OVERLAP * min(reading, working)
    if plan.smem_bytes > half_of(device):
        time += CROWDED_US
    if plan.cluster == 1:
        return time
    sent = 4 * rows * plan.tile * (plan.cluster - 1) / plan.cluster
    return time + EXCHANGE_US + sent / EXCHANGE_RATE


def product_cycles(plan: Plan) -> float:
    """Of an SM's tensor cores, for a chunk: they multiply, or wait for 16 columns from shared memory."""
    instructions = CHUNK // 16 * plan.tiling.rows // 64
    return instructions * max(plan.tile / 2, 16 + plan.tile / 4)


def half_of(device: Device) -> int:
    """Bytes of shared memory of a block beside which another finds room."""
    return (device.smem_limit - ALIGNMENT) // 2


def variant(
    plan: Plan,
    dtype: torch.dtype,
    normed: bool = False,
    residual: bool = False,
    float_out: bool = False,
) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "WARPGROUPS": plan.tiling.warpgroups,
        "HEIGHTS": plan.tiling.heights,
        "TILE": plan.tile,
        "THREADS": plan.threads,
        "STAGES": plan.stages,
        "CLUSTER": plan.cluster,
        "NORMED": int(normed),
        "GATED": int(plan.gated),
        "RESIDUAL": int(residual),
        "FLOAT_OUT": int(float_out),
    }
    return jit.VariantSpec(
        "wide_gemm_sm90.cu", "wide_gemm_sm90", defines, plan.smem_bytes, archs=("sm_90a",)
    )


@dataclass(frozen=True)
class Product:
    """One of a decoder's, as it is launched."""

    n: int
    k: int
    normed: bool = False
    gated: bool = False
    residual: bool = False
    float_out: bool = False


def variant_of(product: Product, rows: int, dtype: torch.dtype, device: Device) -> jit.VariantSpec:
    """The kernel that takes a product of up to `rows` rows, one of ROWS, on a device."""
    p = product
    plan = make_plan(rows, p.n, p.k, device, p.gated, p.normed)
    return variant(plan, dtype, p.normed, p.residual, p.float_out)


def products_of(config: jit.KernelConfig) -> list[Product]:
    attention, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    gated, norms = fused_product.can_interleave(2 * inner), fused_product.norms(config.dtype)
    return [
        *(Product(attention + 2 * kv, hidden, normed=n) for n in norms),
        Product(hidden, attention, residual=True),
        *(Product(2 * inner, hidden, normed=n, gated=gated) for n in norms),
        Product(hidden, inner, residual=True),
        Product(config.vocab_size, hidden, float_out=True),
    ]
