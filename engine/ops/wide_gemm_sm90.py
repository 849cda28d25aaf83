"""y = x W^T for 33 to 256 rows on Hopper GPUs (sm_90a), near the rate at which W can be read.

Contract
    x        [M, K] bfloat16 or float16, 1 <= M <= 256, K a multiple of 8, last dimension contiguous, rows at
             multiples of 16 bytes; not changed
    w        [N, K] of x's dtype, contiguous, N a multiple of 8, at a multiple of 16 bytes; the kernel
             launched right before this one must not have written it (see cuda/common/dependent_launch.cuh)
    bias     [N] of x's dtype, contiguous, or None
    returns  out [M, N] of x's dtype, a fresh tensor unless given (then: last dimension contiguous, rows at
             multiples of 16 bytes):

                 y = x W^T + bias       sums in float32, rounded once at the end

A row of the result depends on its own row of x alone, and the same call gives the same bits every time.
How sums are grouped depends on the plan, that is on N, K, the device, and M rounded up to one of COLUMNS.

Products on a device share memory for parts of sums: those of different streams must not run at the same
time. The first product of a plan loads its kernel and takes that memory, which cannot happen while a graph
is captured.

The kernel is described in cuda/wide_gemm_sm90.cu, `make_plan` chooses how it cuts up a product. Against
torch's library it gains where launches depend on each other: the library starts when the kernel before has
ended, this kernel has its first weights by then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit
from engine.ops.narrow_gemm import Device, device_of, devices_of
from engine.ops.skinny_gemm import is_aligned
from engine.ops.tensor_map import tensor_map

# Where `linear` takes this kernel and not torch's library: rows of x, and bytes of W from and to. To be set
# by what `scripts/bench_kernels.py --only wide_gemm` measures, its chains above all.
CHOSEN: tuple[tuple[range, range], ...] = ()

COLUMNS = (32, 64, 96, 128, 192, 256)  # rows of x that variants are made for
CHUNK = 64  # columns of a unit of work
IN_FLIGHT = 96 << 10  # bytes of W that keep an SM's share of the memory busy
MIN_STAGES = 4
MAX_STAGES = 12
MAX_SHARES = 8  # of a tile
LEFT_OVER = 8 << 10  # bytes of shared memory for small kernels that start meanwhile
ALIGNMENT = 1024  # bytes that aligning the stages in shared memory may take
MIN_UNITS = 4  # of a cluster that shares tiles with others: less is not worth adding up
MAX_ELEMENTS = 1 << 32  # of W, so that the kernel can count in 32 bits
MAX_ARRIVALS = 1 << 14  # counters; a tile that is divided has one for each 16 rows

# Of one SM of an H200, in bytes and multiply-adds a microsecond: what estimates are made of.
MEMORY_RATE = 31e3
L2_RATE = 42e3  # what comes from memory counts, too
PRODUCT_RATE = 2.6e6
PARTS_RATE = 30e3  # sums of parts, written and read
LATENCY_US = 1.0  # of a load while all SMs load
UNIT_US = 0.08  # to wait for a stage and to free it
DIVIDED_US = 1.5  # for the last part of a tile to see the others


@dataclass(frozen=True)
class Tiling:
    """How a block's warpgroups cover a tile of W's rows: macros of the kernel."""

    consumers: int  # warpgroups
    heights: int  # 64 rows each, of a warpgroup

    @property
    def rows(self) -> int:
        return 64 * self.heights * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    def fits(self, columns: int) -> bool:
        """Whether a thread's registers hold its sums."""
        return columns * self.heights <= 256 and (self.consumers < 3 or columns <= 96)


TILINGS = (Tiling(1, 1), Tiling(2, 1), Tiling(3, 1), Tiling(2, 2))  # by height
CLUSTERS = (1, 2, 4)  # blocks that share x; of eight too few would run at a time


@dataclass(frozen=True)
class Plan:
    """How one product is cut up."""

    tiling: Tiling
    columns: int  # rows of x, at most
    cluster: int  # blocks; each has a tile of its own
    num_clusters: int
    tile_rows: int  # of W, for a block; a multiple of 8, at most the tiling's
    num_tiles: int  # of a cluster
    num_chunks: int
    is_divided: bool = True  # may clusters share a tile?
    stages: int = 4

    @property
    def cluster_units(self) -> int:
        """Chunks of the cluster that has most."""
        if self.is_divided:
            return -(-self.num_tiles * self.num_chunks // self.num_clusters)
        return -(-self.num_tiles // self.num_clusters) * self.num_chunks

    @property
    def smem_bytes(self) -> int:
        """Of a block: alignment, stages, two barriers each."""
        return ALIGNMENT + self.stages * (2 * CHUNK * (self.tiling.rows + self.columns) + 16)

    @property
    def num_parts(self) -> int:
        """Float32 sums in the memory that parts of tiles need."""
        blocks = self.num_clusters * self.cluster
        return 2 * blocks * self.tiling.rows * self.columns if self.is_divided else 0

    @property
    def num_arrivals(self) -> int:
        warps = 4 * self.tiling.consumers
        return self.num_tiles * self.cluster * warps if self.is_divided else 0

    def __str__(self) -> str:
        kind = "divided" if self.is_divided else "whole"
        return (
            f"{self.num_clusters} x {self.cluster} blocks, {kind} tiles of "
            f"{self.tile_rows}/{self.tiling.rows} rows, {self.stages} stages"
        )


def wide_gemm_sm90(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        return reference(x, w, bias, out)
    check(x, w, bias, out)
    if out is None:
        out = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    launch(x, w, bias, out, prepare(columns_for(x.shape[0]), *w.shape, x.device.index))
    return out


def reference(
    x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """The definition in float32, rounded once."""
    y = F.linear(x.float(), w.float(), bias.float() if bias is not None else None)
    return y.to(x.dtype) if out is None else out.copy_(y)


def launch(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor, plan: Plan) -> None:
    """The product by a given plan, for tensors within the contract."""
    parts, arrivals = scratch(plan.num_parts, x.device) if plan.is_divided else (0, 0)
    load(plan, x.dtype)(
        (plan.num_clusters * plan.cluster,),
        (plan.tiling.threads,),
        (
            tensor_map(w, (plan.tile_rows, CHUNK)),
            tensor_map(x, (plan.columns // plan.cluster, CHUNK)),
            out.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            parts,
            arrivals,
            np.int32(x.shape[0]),
            np.int32(w.shape[0]),
            np.int32(out.stride(0)),
            np.int32(plan.num_chunks),
            np.int32(plan.tile_rows),
            np.int32(plan.num_tiles),
            np.int32(1 if plan.is_divided else plan.num_chunks),
        ),
    )


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = 1 <= m <= COLUMNS[-1] and n >= 8 and n % 8 == 0 and k >= 8 and k % 8 == 0
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


def check(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor | None) -> None:
    """Raises ValueError with a remedy for tensors outside the contract."""
    (m, k), n = x.shape, w.shape[0]
    if not supports(m, n, k, x.dtype):
        raise ValueError(
            f"wide_gemm_sm90: x is {tuple(x.shape)} {x.dtype}, w has {n} rows; it takes 1 to "
            f"{COLUMNS[-1]} rows of a multiple of 8 bfloat16 or float16 numbers, and a multiple of 8 rows "
            "of w. Use torch's linear for others"
        )
    if w.shape[1] != k or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(
            f"wide_gemm_sm90: w is {tuple(w.shape)} {w.dtype}, strides {w.stride()}; it must be a "
            f"contiguous [N, {k}] of {x.dtype}"
        )
    if not (is_aligned(x) and is_aligned(w)):
        raise ValueError("wide_gemm_sm90: rows of x and w must start at multiples of 16 bytes")
    if bias is not None and not (
        bias.shape == (n,) and bias.dtype == x.dtype and bias.is_contiguous()
    ):
        raise ValueError(
            f"wide_gemm_sm90: the bias is {tuple(bias.shape)} {bias.dtype}; it must be a contiguous [{n}] "
            f"of {x.dtype}"
        )
    if out is not None and not (out.shape == (m, n) and out.dtype == x.dtype and is_aligned(out)):
        raise ValueError(
            f"wide_gemm_sm90: out is {tuple(out.shape)} {out.dtype}, strides {out.stride()}; it must be a "
            f"[{m}, {n}] of {x.dtype} with contiguous rows at multiples of 16 bytes"
        )


def columns_for(m: int) -> int:
    return next(columns for columns in COLUMNS if m <= columns)


@cache
def prepare(columns: int, n: int, k: int, device: int | None) -> Plan:
    """The plan of a product on a device. Raises ValueError on a device that is not Hopper's."""
    limits = device_of(device)
    if not limits.has_clusters:
        raise ValueError("wide_gemm_sm90 needs a Hopper GPU (sm_90); use torch's linear on others")
    return make_plan(columns, n, k, limits)


@cache
def load(plan: Plan, dtype: torch.dtype) -> jit.Kernel:
    spec = variant(plan, dtype)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes)


def scratch(num_parts: int, device: torch.device) -> tuple[int, int]:
    """Addresses of memory for parts of sums, and of counters that are zero between launches."""
    return parts_of(num_parts, device).data_ptr(), arrivals_of(device).data_ptr()


@cache
def parts_of(num_parts: int, device: torch.device) -> Tensor:
    refuse_capture(device)
    return torch.empty(num_parts, dtype=torch.float32, device=device)


@cache
def arrivals_of(device: torch.device) -> Tensor:
    refuse_capture(device)
    return torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device)


def refuse_capture(device: torch.device) -> None:
    """Memory taken while a graph is captured would belong to that graph, and be zeroed by it alone."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "wide_gemm_sm90: the first product of a shape takes memory, which must not happen while a "
            "CUDA graph is captured; run the product once before"
        )


def make_plan(columns: int, n: int, k: int, device: Device) -> Plan:
    """The plan with the shortest estimate."""
    plans = candidates(columns, n, k, device)
    return min(plans, key=lambda plan: estimate(plan, n, k, device))


def candidates(columns: int, n: int, k: int, device: Device) -> list[Plan]:
    """For each size of cluster and each height of tiles: high tiles, divided so that all clusters have the
    same; tiles of which each cluster has as many as the others; and tiles of which several have one."""
    num_chunks = -(-k // CHUNK)
    plans = []
    for cluster in CLUSTERS:
        limit = max(1, device.clusters_of(cluster))
        for tiling in TILINGS:
            if not tiling.fits(columns):
                continue
            for rows, shares in ways_to_divide(n, num_chunks, tiling.rows, cluster, limit):
                num_tiles = -(-n // (rows * cluster))
                if shares:
                    num_clusters = num_tiles * shares
                else:
                    num_clusters = min(limit, num_tiles * num_chunks // MIN_UNITS)
                rounds = -(-num_tiles // limit) if shares == 1 else 1
                plan = Plan(
                    tiling,
                    columns,
                    cluster,
                    -(-num_clusters // rounds),
                    rows,
                    num_tiles,
                    num_chunks,
                    is_divided=shares != 1,
                )
                if plan.num_clusters and plan.num_arrivals <= MAX_ARRIVALS:
                    plans.append(with_stages(plan, device))
    return [plan for plan in dict.fromkeys(plans) if plan.stages >= MIN_STAGES]


def ways_to_divide(
    n: int, num_chunks: int, height: int, cluster: int, limit: int
) -> Iterator[tuple[int, int]]:
    """(rows of W in a block's tile, clusters that share one; 0: as it comes, for an even distribution)."""
    yield height, 0
    rounds = -(-n // (limit * cluster * height))
    yield 8 * -(-n // (limit * cluster * rounds * 8)), 1
    for shares in range(2, min(MAX_SHARES, limit, num_chunks // MIN_UNITS) + 1):
        rows = 8 * -(-n // (limit // shares * cluster * 8))
        if rows <= height:
            yield rows, shares


def with_stages(plan: Plan, device: Device) -> Plan:
    """As many stages as it takes to have enough of W under way, or all that a block reads. More would do
    harm: what is left is for the next kernel's blocks, which start while this one ends."""
    under_way = min(plan.cluster_units, -(-IN_FLIGHT // (2 * CHUNK * plan.tile_rows)))
    smallest = replace(plan, stages=1)
    fitting = (device.smem_limit - LEFT_OVER - ALIGNMENT) // (smallest.smem_bytes - ALIGNMENT)
    return replace(plan, stages=min(fitting, MAX_STAGES, max(MIN_STAGES, under_way)))


def estimate(plan: Plan, n: int, k: int, device: Device) -> float:
    """Microseconds from the first load to the last store, but for a constant."""
    units, rows, columns = plan.cluster_units, plan.tiling.rows, plan.columns
    unit_bytes = 2 * CHUNK * (plan.tile_rows + columns // plan.cluster)
    in_flight = min(plan.stages, units) * unit_bytes
    time = max(
        2 * n * k / (device.num_sms * MEMORY_RATE),
        units * unit_bytes / min(L2_RATE, in_flight / LATENCY_US),
        units * (CHUNK * rows * columns / PRODUCT_RATE + UNIT_US),
    )
    if not plan.is_divided:
        return time
    shares = -(-plan.num_chunks // plan.cluster_units) + (plan.num_clusters % plan.num_tiles > 0)
    return time + DIVIDED_US + 4 * plan.tile_rows * columns * (1 + shares) / PARTS_RATE


def variant(plan: Plan, dtype: torch.dtype) -> jit.VariantSpec:
    defines = {
        jit.scalar_define(dtype): 1,
        "COLUMNS": plan.columns,
        "CONSUMERS": plan.tiling.consumers,
        "HEIGHTS": plan.tiling.heights,
        "STAGES": plan.stages,
        "CLUSTER": plan.cluster,
    }
    return jit.VariantSpec(
        "wide_gemm_sm90.cu", "wide_gemm_sm90", defines, plan.smem_bytes, archs=("sm_90a",)
    )


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The products of a decoder for which this kernel pays, on the current device or, if config.arch is
    given, on every card of that architecture."""
    devices = [device for device in devices_of(config.arch) if device.has_clusters]
    found = [
        variant(make_plan(columns, n, k, device), config.dtype)
        for columns in COLUMNS
        for n, k in products(config)
        if supports(columns, n, k, config.dtype)
        and any(pays(m, n, k) for m in range(1, columns + 1) if columns_for(m) == columns)
        for device in devices
    ]
    return [spec for i, spec in enumerate(found) if spec not in found[:i]]


def products(config: jit.KernelConfig) -> list[tuple[int, int]]:
    """Rows and columns of a decoder layer's matrices and of the head."""
    attention, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return [
        (attention + 2 * kv, hidden),
        (hidden, attention),
        (2 * inner, hidden),
        (hidden, inner),
        (config.vocab_size, hidden),
    ]
