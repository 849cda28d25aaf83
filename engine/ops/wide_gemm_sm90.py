"""y = x W^T for 33 to 256 rows on Hopper GPUs (sm_90a), near the rate at which W can be read, with what
surrounds the product in a decoder.

Contract, besides engine/ops/fused_product.py's
    x         [M, K] bfloat16 or float16, 1 <= M <= 256, K a multiple of 8, last dimension contiguous, rows at
              multiples of 16 bytes
    w         [N, K] of x's dtype, contiguous, N a multiple of 8 (gated: 16), at a multiple of 16 bytes; the
              kernel launched right before this one must not have written it (cuda/common/dependent_launch.cuh)
    bias      [N] of x's dtype, contiguous, at a multiple of 4 bytes, or None
    residual  of the result's shape and x's dtype, last dimension contiguous, rows at multiples of 16 bytes
    out       likewise, if given

A row of the result depends on its own row of x alone, and the same call gives the same bits every time.
How sums are grouped depends on the plan, that is on N, K, the device, and M rounded up to one of ROWS.
The first product of a plan loads its kernel, which cannot happen while a graph is captured.

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
from engine.ops.narrow_gemm import Device, device_of, devices_of
from engine.ops.skinny_gemm import is_aligned
from engine.ops.tensor_map import tensor_map

# Where `linear` takes this kernel and not torch's library: rows of x, and bytes of W from and to. To be set
# by what `scripts/bench_kernels.py --only wide_gemm` measures, its chains above all.
CHOSEN: tuple[tuple[range, range], ...] = ()

ROWS = (64, 128, 192, 256)  # of x that variants are made for
CHUNK = 64  # columns of x and W that a stage holds
CLUSTERS = (1, 2, 4)  # blocks; of eight too few would run at a time
WIDTHS = (*range(8, 129, 8), 144, 160, 176, 192, 224, 256)  # sizes of N in cuda/common/sm90.cuh
MIN_STAGES = 3
MAX_STAGES = 12
MAX_ELEMENTS = 1 << 32  # of W, so that the kernel can count in 32 bits

# What a block takes of an SM. A small product leaves room for the next one's block, which fetches its first
# weights meanwhile; a large one has enough of W under way to keep its share of the memory busy.
IN_FLIGHT = 96 << 10  # bytes of W
SMALL_BYTES = 24 << 20  # of W, up to which a product is small
SMALL_SMEM = 112 << 10  # bytes of shared memory of its blocks
LEFT_OVER = 8 << 10  # by blocks of a large one, for small kernels
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take

# Of one SM of an H200, in bytes a microsecond and in cycles: what estimates are made of.
MEMORY_RATE = 31e3  # if all SMs read
L2_RATE = 42e3  # what comes from memory counts, too
ARRIVAL_RATE = 110e3  # into shared memory, multicast or not
SHARED_RATE = 224e3  # of shared memory, read by products and written by arrivals
CYCLES_PER_US = 1750.0
UNIT_US = 0.08  # to wait for a stage, start its products and free it
LATENCY_US = 1.0  # of a load while all SMs load
OVERLAP = 0.1  # of the shorter of two things that go on at a time shows
WRITE_US = 0.6  # of the last tile's results
CLUSTER_US = 0.3  # for the blocks of a cluster to start together
SPLIT_US = 1.2  # for the blocks of a cluster to wait for each other and start to add
ADD_RATE = 40e3  # sums read from other blocks


@dataclass(frozen=True)
class Tiling:
    """How a block's warpgroups cover all rows of x and a tile of W's rows: macros of the kernel."""

    groups_m: int  # warpgroups over the rows of x
    heights: int  # 64 rows of x each, of a warpgroup
    groups_n: int  # warpgroups over the rows of W
    widest: int  # rows of W of a warpgroup, so that its sums fit into registers

    @property
    def rows(self) -> int:
        return 64 * self.groups_m * self.heights

    @property
    def consumers(self) -> int:
        return self.groups_m * self.groups_n

    def threads(self, width: int) -> int:
        """A warp fetches, or, where warpgroups need the registers that it would take, a warpgroup."""
        limit = {1: 256, 2: 192, 3: 112}[self.consumers]
        return 128 * self.consumers + (32 if self.heights * width <= limit else 128)


TILINGS = (
    Tiling(1, 1, 1, 256),
    Tiling(1, 1, 2, 160),
    Tiling(2, 1, 1, 256),
    Tiling(1, 2, 2, 160),
    Tiling(3, 1, 1, 192),
    Tiling(2, 2, 1, 160),
)


@dataclass(frozen=True)
class Plan:
    """How one product is cut up."""

    tiling: Tiling
    width: int  # rows of W of a warpgroup
    cluster: int  # blocks that share x, by multicast or, split, by columns
    is_split: bool
    grid: int  # blocks
    rounds: int  # tiles, one after another, of the block that has most
    num_chunks: int  # of K
    gated: bool
    stages: int = MIN_STAGES

    @property
    def tile(self) -> int:
        """Rows of W."""
        return self.width * self.tiling.groups_n

    @property
    def units(self) -> int:
        """Chunks that a block reads, of all its tiles."""
        return (
            -(-self.num_chunks // self.cluster) if self.is_split else self.rounds * self.num_chunks
        )

    @property
    def stage_bytes(self) -> int:
        return 2 * CHUNK * (self.tiling.rows + self.tile)

    @property
    def smem_bytes(self) -> int:
        """Of a block: alignment, stages with two barriers each, two more barriers."""
        return ALIGNMENT + self.stages * (self.stage_bytes + 16) + 16

    @property
    def parcel_bytes(self) -> int:
        """What a block of a split product receives, where its stages were: sums, and squares of its rows."""
        if not self.is_split:
            return 0
        octets, blended = self.width // 8, 2 if self.gated else 1
        bands, quartets = (
            4 * self.tiling.consumers * self.tiling.heights,
            -(-octets // (4 * blended)),
        )
        dealt = -(-bands * quartets // self.cluster)
        return 16 * dealt * self.cluster * (32 * min(octets, 4 * blended) + 8)

    @property
    def x_box(self) -> int:
        """Rows of x that a block fetches."""
        return self.tiling.rows if self.is_split else self.tiling.rows // self.cluster

    def __str__(self) -> str:
        """Clusters, x or / (split), blocks in each; warpgroups x rows of W; rounds; stages."""
        share = "/" if self.is_split else "x"
        rounds = f" r{self.rounds}" if self.rounds > 1 else ""
        clusters = self.grid // self.cluster
        tile = f"{self.tiling.groups_n}x{self.width}"
        return f"{clusters}{share}{self.cluster} {tile}{rounds} s{self.stages}"


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
        out = torch.empty((m, n // 2 if gated else n), dtype=x.dtype, device=x.device)
    plan = prepare(rows_for(m), n, k, gated, x.device.index)
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
    load(plan, x.dtype, norm_eps is not None, residual is not None)(
        (plan.grid,),
        (plan.tiling.threads(plan.width),),
        (
            tensor_map(w, (plan.width, CHUNK)),
            tensor_map(x, (plan.x_box, CHUNK)),
            out.data_ptr(),
            residual.data_ptr() if residual is not None else 0,
            bias.data_ptr() if bias is not None else 0,
            np.int32(x.shape[0]),
            np.int32(w.shape[0]),
            np.int32(w.shape[1]),
            np.int32(out.stride(0)),
            np.int32(residual.stride(0) if residual is not None else 0),
            np.float32(norm_eps or 0.0),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = 1 <= m <= ROWS[-1] and n >= 8 and n % 8 == 0 and k >= 8 and k % 8 == 0
    return fits and n * k < MAX_ELEMENTS and dtype in (torch.bfloat16, torch.float16)


def is_chosen(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel is the fastest for x [M, K], W [N, K] on their CUDA device."""
    m, (n, k) = x.shape[0], weight.shape
    return (
        pays(m, n, k)
        and supports(m, n, k, x.dtype)
        and weight.dtype == x.dtype
        and device_of(x.device.index).has_clusters
        and weight.is_contiguous()
        and is_aligned(x)
        and is_aligned(weight)
    )


def pays(m: int, n: int, k: int) -> bool:
    return any(m in rows and 2 * n * k in nbytes for rows, nbytes in CHOSEN)


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
    if gated and not fused_product.can_interleave(n):
        raise ValueError(
            f"wide_gemm_sm90: w has {n} rows; gated, it must have a multiple of {2 * fused_product.GROUP}. "
            "Use torch's linear and silu_and_mul for others"
        )
    if w.shape[1] != k or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(
            f"wide_gemm_sm90: w is {tuple(w.shape)} {w.dtype}, strides {w.stride()}; it must be a "
            f"contiguous [N, {k}] of {x.dtype}"
        )
    if not (is_aligned(x) and is_aligned(w)):
        raise ValueError("wide_gemm_sm90: rows of x and w must start at multiples of 16 bytes")
    if bias is not None and not (
        bias.shape == (n,)
        and bias.dtype == x.dtype
        and bias.is_contiguous()
        and bias.data_ptr() % 4 == 0
    ):
        raise ValueError(
            f"wide_gemm_sm90: the bias is {tuple(bias.shape)} {bias.dtype}; it must be a contiguous [{n}] "
            f"of {x.dtype}, at a multiple of 4 bytes"
        )
    shape = (m, n // 2 if gated else n)
    for name, tensor in (("out", out), ("the residual", residual)):
        if tensor is not None and not (
            tensor.shape == shape and tensor.dtype == x.dtype and is_aligned(tensor)
        ):
            raise ValueError(
                f"wide_gemm_sm90: {name} is {tuple(tensor.shape)} {tensor.dtype}, strides "
                f"{tensor.stride()}; it must be a {list(shape)} of {x.dtype} with contiguous rows at "
                "multiples of 16 bytes"
            )


def rows_for(m: int) -> int:
    return next(rows for rows in ROWS if m <= rows)


@cache
def prepare(rows: int, n: int, k: int, gated: bool, device: int | None) -> Plan:
    """The plan of a product on a device. Raises ValueError on a device that is not Hopper's."""
    limits = device_of(device)
    if not limits.has_clusters:
        raise ValueError("wide_gemm_sm90 needs a Hopper GPU (sm_90); use torch's linear on others")
    return make_plan(rows, n, k, limits, gated)


@cache
def load(plan: Plan, dtype: torch.dtype, normed: bool, residual: bool) -> jit.Kernel:
    spec = variant(plan, dtype, normed, residual)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


def make_plan(rows: int, n: int, k: int, device: Device, gated: bool = False) -> Plan:
    """The plan with the shortest estimate."""
    plans = candidates(rows, n, k, device, gated)
    return min(plans, key=lambda plan: estimate(plan, n, k, device))


def candidates(rows: int, n: int, k: int, device: Device, gated: bool = False) -> list[Plan]:
    """For each tiling and size of cluster, the lowest tiles that cover W in the fewest rounds and in one more,
    and, split, in one."""
    plans = (with_stages(plan, n, k, device) for plan in unstaged_plans(rows, n, k, device, gated))
    return [plan for plan in plans if plan is not None]


def unstaged_plans(rows: int, n: int, k: int, device: Device, gated: bool) -> Iterator[Plan]:
    num_chunks = -(-k // CHUNK)
    for tiling in TILINGS:
        if tiling.rows != rows:
            continue
        for cluster in CLUSTERS:
            limit = device.clusters_of(cluster)
            if limit == 0:
                continue
            least = -(-n // (limit * cluster * tiling.widest * tiling.groups_n))
            for rounds in (least, least + 1):
                width = width_for(n, limit * cluster * rounds, tiling, gated)
                if width is None:
                    continue
                tiles = -(-n // (width * tiling.groups_n * cluster))  # of a cluster
                actual = -(-tiles // limit)
                grid = -(-tiles // actual) * cluster
                yield Plan(tiling, width, cluster, False, grid, actual, num_chunks, gated)
            width = width_for(n, limit, tiling, gated)
            if cluster > 1 and width is not None and num_chunks >= cluster:
                grid = -(-n // (width * tiling.groups_n)) * cluster
                yield Plan(tiling, width, cluster, True, grid, 1, num_chunks, gated)


def width_for(n: int, num_tiles: int, tiling: Tiling, gated: bool) -> int | None:
    """The smallest for which so many tiles cover W; None if that is too wide."""
    least = n / (num_tiles * tiling.groups_n)
    unit = 2 * fused_product.GROUP if gated else 8
    fitting = (width for width in WIDTHS if width >= least and width % unit == 0)
    return next((width for width in fitting if width <= tiling.widest), None)


def with_stages(plan: Plan, n: int, k: int, device: Device) -> Plan | None:
    """As many stages as it takes to have enough of W under way, or all that a block reads; None if too few fit."""
    each = plan.stage_bytes + 16
    fitting = (device.smem_limit - LEFT_OVER - ALIGNMENT - 16) // each
    wanted = min(-(-IN_FLIGHT // (2 * CHUNK * plan.tile)), plan.units, MAX_STAGES)
    if 2 * n * k <= SMALL_BYTES:
        wanted = min(wanted, (SMALL_SMEM - ALIGNMENT) // each)
    least = max(MIN_STAGES, -(-plan.parcel_bytes // plan.stage_bytes))
    return replace(plan, stages=min(fitting, max(wanted, least))) if fitting >= least else None


def estimate(plan: Plan, n: int, k: int, device: Device) -> float:
    """Microseconds from the first load to the last store, but for a constant."""
    tiling = plan.tiling
    w_bytes, x_bytes = 2 * CHUNK * plan.tile, 2 * CHUNK * tiling.rows  # of a unit
    from_l2 = w_bytes + (x_bytes if plan.is_split else x_bytes / plan.cluster)
    instructions = CHUNK // 16 * tiling.rows // 64 * tiling.groups_n
    shared = w_bytes + x_bytes + instructions * 32 * (64 + plan.width)
    unit = max(
        from_l2 / L2_RATE,
        (w_bytes + x_bytes) / ARRIVAL_RATE,
        shared / SHARED_RATE,
        instructions * plan.width / 2 / CYCLES_PER_US,
        LATENCY_US / plan.stages,
        UNIT_US,
    )
    reading, working = 2 * n * k / (device.num_sms * MEMORY_RATE), plan.units * unit
    time = WRITE_US + max(reading, working) + OVERLAP * min(reading, working)
    if plan.cluster > 1:
        time += CLUSTER_US
    return time + (SPLIT_US + plan.parcel_bytes / ADD_RATE if plan.is_split else 0.0)


def variant(
    plan: Plan, dtype: torch.dtype, normed: bool = False, residual: bool = False
) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "GROUPS_M": plan.tiling.groups_m,
        "HEIGHTS": plan.tiling.heights,
        "GROUPS_N": plan.tiling.groups_n,
        "WIDTH": plan.width,
        "THREADS": plan.tiling.threads(plan.width),
        "STAGES": plan.stages,
        "CLUSTER": plan.cluster,
        "SPLIT": int(plan.is_split),
        "NORMED": int(normed),
        "GATED": int(plan.gated),
        "RESIDUAL": int(residual),
    }
    return jit.VariantSpec(
        "wide_gemm_sm90.cu", "wide_gemm_sm90", defines, plan.smem_bytes, archs=("sm_90a",)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The products of a decoder for which this kernel pays, on the current device or, if config.arch is
    given, on every card of that architecture."""
    devices = [device for device in devices_of(config.arch) if device.has_clusters]
    found = [
        variant(make_plan(rows, p.n, p.k, device, p.gated), config.dtype, p.normed, p.residual)
        for rows in ROWS
        for p in products_of(config)
        if supports(rows, p.n, p.k, config.dtype)
        and any(pays(m, p.n, p.k) for m in range(1, rows + 1) if rows_for(m) == rows)
        for device in devices
    ]
    return [spec for i, spec in enumerate(found) if spec not in found[:i]]


@dataclass(frozen=True)
class Product:
    """One of a decoder's, as it is launched."""

    n: int
    k: int
    normed: bool = False
    gated: bool = False
    residual: bool = False


def products_of(config: jit.KernelConfig) -> list[Product]:
    attention, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    gated = fused_product.can_interleave(2 * inner)
    return [
        Product(attention + 2 * kv, hidden, normed=True),
        Product(hidden, attention, residual=True),
        Product(2 * inner, hidden, normed=True, gated=gated),
        Product(hidden, inner, residual=True),
        Product(config.vocab_size, hidden),
    ]
