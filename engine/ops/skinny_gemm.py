"""y = x W^T for up to 32 rows, at the rate at which W can be read; with what surrounds it in a decoder.

Contract: engine/ops/fused_product.py, and
    x        [M, K] bfloat16 or float16, M <= 32, K a multiple of 8, last dimension contiguous, rows at
             multiples of 16 bytes
    w        [N, K] of x's dtype, contiguous, at a multiple of 16 bytes; the kernel launched right before
             this one must have written neither w nor bias (see cuda/common/dependent_launch.cuh)
    bias     [N] of x's dtype, contiguous, or None
    residual [M, outputs] of x's dtype, last dimension contiguous, or None; as is `out`, which may be float32
             instead

A row of the result depends on its own row of x and nothing else, bit for bit: not on M, not on its
place. That holds among M <= 32; a larger product is another library's.

The kernel is described in cuda/skinny_gemm.cu, `make_plan` chooses how it cuts up a product.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import fused_product, jit

MAX_ROWS = 32

# Up to how many rows of x `linear` takes this kernel. On Hopper others take over earlier for W of FEW_BYTES: narrow_gemm up
# to SMALL_W, beyond it wide_gemm_sm90 if W has LONG times as many columns as rows, as it splits K. Measured in chains of
# dependent launches and in decode steps on an H200.
DISPATCH_ROWS = 8
SMALL_W = 24 << 20  # bytes
FEW_BYTES, FEW_ROWS = range(6 << 20, SMALL_W), 3  # no rows if K > N
LONG_BYTES, LONG, LONG_ROWS = range(SMALL_W, 40 << 20), 3, 4

WARPS = 8
CHUNK = 64  # columns that a warp multiplies at once
PIECE = 512  # bytes that a warp loads at once: 8 rows, half a chunk
ROW_TILES = (3, 2, 1)  # of 16 rows of W at most, largest first: x is read once for each tile
MAX_STAGES = 6
IN_FLIGHT = 56 * 1024  # bytes that an SM should have under way to keep the memory busy
KEPT_X = 32 * 1024  # bytes of x that a block may keep for all its tiles

# A block that reads so little of W is as long under way as the launch of the next kernel: it leaves half of
# Hopper's shared memory to that kernel's blocks, which then fetch their own weights in the meantime.
SMALL_BLOCK = 160 * 1024
HALF_SMEM = 113 * 1024  # of 228 KB, less what the driver takes of each block

LEAST_SMEM_LIMIT = 99 * 1024  # bytes of shared memory for a block, of consumer cards
SMEM_LIMITS = {"sm_80": 163 * 1024, "sm_87": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
H200 = (132, 227 * 1024)  # SMs, shared memory of a block; assumed where there is no device
MAX_SMS = 192  # of the cards to compile for ahead


@dataclass(frozen=True)
class Product:
    """What a plan is made for."""

    column_tiles: int  # 8 rows of x each
    n: int  # rows of W
    k: int
    gated: bool = False
    normed: bool = False
    float_out: bool = False  # float32 results

    @property
    def unit(self) -> int:
        """Rows of W that no block and no tile divides."""
        return 2 * fused_product.GROUP if self.gated else 1

    @property
    def warp_chunks(self) -> int:
        """Of a tile, for the warp that has most."""
        return -(-self.k // (CHUNK * WARPS))


@dataclass(frozen=True)
class Tiles:
    """What selects a kernel variant, beside the product's options."""

    eights: int  # 8 rows of W each
    column_tiles: int
    stages: int  # of a warp's ring
    refills: bool  # are stages loaded again, or is everything loaded at the start?
    x_chunks: int  # of a warp, that it keeps for all tiles; 0: x flows with W
    in_flight: int  # bytes of stages that are under way, as far as they help
    smem_bytes: int

    @classmethod
    def fit(cls, product: Product, tile_rows: int, num_tiles: int, smem_limit: int) -> "Tiles":
        """With as many stages as memory allows and loads fill."""
        eights, columns = -(-tile_rows // 8), product.column_tiles
        x_chunk = WARPS * PIECE * 2 * columns
        kept = product.warp_chunks if num_tiles > 1 else 0
        if kept * x_chunk > KEPT_X:
            kept = 0
        stage = WARPS * PIECE * 2 * eights + (0 if kept else x_chunk)
        sums = 2 * WARPS * 8 * columns * (8 * eights + 4) * 4
        squares = WARPS * 8 * columns * 4 * product.normed
        fixed = sums + squares + kept * x_chunk
        loads = num_tiles * product.warp_chunks
        stages = min(MAX_STAGES, loads, (smem_limit - fixed) // stage)
        refills = stages < loads
        in_flight = min(IN_FLIGHT, (stages - refills) * stage)
        return cls(eights, columns, stages, refills, kept, in_flight, fixed + stages * stage)


@dataclass(frozen=True)
class Plan:
    """How one product is cut up. The order of its sums depends on none of this."""

    tiles: Tiles
    grid: int
    block_units: int  # of each block
    larger_blocks: int  # the first ones, which have one unit more
    tile_rows: int  # of W


def skinny_gemm(
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
    launch(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual)
    return out


def launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> None:
    """The kernel, for tensors within the contract."""
    m, k = x.shape
    float_out = out.dtype is torch.float32
    product = Product(column_tiles_for(m), w.shape[0], k, gated, norm_eps is not None, float_out)
    kernel, plan = prepare(product, x.dtype, x.device.index)
    kernel(
        (plan.grid,),
        (32 * WARPS,),
        (
            out.data_ptr(),
            x.data_ptr(),
            w.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            residual.data_ptr() if residual is not None else 0,
            np.int32(m),
            np.int32(k),
            np.int32(x.stride(0)),
            np.int32(out.stride(0)),
            np.int32(residual.stride(0) if residual is not None else 0),
            np.int32(plan.block_units),
            np.int32(plan.larger_blocks),
            np.int32(plan.tile_rows),
            np.float32(norm_eps or 0.0),
        ),
    )


def is_chosen(m: int, n: int, k: int, dtype: torch.dtype, on_hopper: bool) -> bool:
    """Whether this kernel is the fastest for x [m, k], W [n, k]."""
    return m <= most_rows(n, k, on_hopper) and supports(m, n, k, dtype)


def most_rows(n: int, k: int, on_hopper: bool) -> int:
    """Up to how many rows of x this kernel is the fastest for W [n, k]."""
    nbytes = 2 * n * k
    if on_hopper and nbytes in FEW_BYTES:
        return 0 if k > n else FEW_ROWS
    is_long = nbytes in LONG_BYTES and k > LONG * n and n % 8 == 0
    return LONG_ROWS if on_hopper and is_long else DISPATCH_ROWS


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    fits = 1 <= m <= MAX_ROWS and n >= 1 and k >= 8 and k % 8 == 0
    return fits and dtype in (torch.bfloat16, torch.float16)


def check(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    gated: bool,
    residual: Tensor | None,
) -> None:
    """Raises ValueError with a remedy for tensors outside the contract."""
    (m, k), n = x.shape, w.shape[0]
    if not supports(m, n, k, x.dtype):
        raise ValueError(
            f"skinny_gemm: x is {tuple(x.shape)} {x.dtype}; it takes 1 to {MAX_ROWS} rows of a "
            "multiple of 8 bfloat16 or float16 numbers. Use torch's linear for others"
        )
    fused_product.check_operands(
        "skinny_gemm", x, w, bias, out, gated, residual, alignment=2, takes_float32=True
    )


def column_tiles_for(m: int) -> int:
    """1, 2 or 4 tiles of 8 rows of x."""
    return 1 if m <= 8 else 2 if m <= 16 else 4


@cache
def prepare(product: Product, dtype: torch.dtype, device: int | None) -> tuple[jit.Kernel, Plan]:
    """The loaded kernel and its plan on a device."""
    num_sms, smem_limit = device_limits(device)
    plan = make_plan(product, num_sms, smem_limit)
    if plan is None:
        raise ValueError(
            f"skinny_gemm: {8 * product.column_tiles} rows do not fit into this device's {smem_limit} "
            "bytes of shared memory for a block; split them, or use torch's linear"
        )
    spec = variant(product, plan.tiles, dtype)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes), plan


def make_plan(product: Product, num_sms: int, smem_limit: int) -> Plan | None:
    """Every SM gets one block and as many rows of W as the others, in tiles as large as memory allows.

    Larger tiles read x less often; more stages keep more of W on its way. None if shared memory is too
    small for so many rows of x.
    """
    units = product.n // product.unit
    grid = min(units, num_sms)
    block_units, larger_blocks = divmod(units, grid)
    block_rows = product.unit * (block_units + (larger_blocks > 0))
    limits = [smem_limit]
    if 2 * product.k * block_rows <= SMALL_BLOCK and smem_limit >= SMEM_LIMITS["sm_90a"]:
        limits.insert(0, HALF_SMEM)
    for limit in limits:
        best: Plan | None = None
        for row_tiles in ROW_TILES:
            tile_rows = even_height(block_rows, 16 * row_tiles, product.unit)
            tiles = Tiles.fit(product, tile_rows, -(-block_rows // tile_rows), limit)
            if tiles.in_flight > (best.tiles.in_flight if best else 0):
                best = Plan(tiles, grid, block_units, larger_blocks, tile_rows)
        if best is not None:
            return best
    return None


def even_height(rows: int, limit: int, unit: int) -> int:
    """The least height, in whole units, of tiles for `rows` that are as few as `limit` allows."""
    num_tiles = -(-rows // limit)
    return -(-rows // (num_tiles * unit)) * unit


def variant(product: Product, tiles: Tiles, dtype: torch.dtype) -> jit.VariantSpec:
    defines: dict[str, int] = {
        jit.scalar_define(dtype): 1,
        "EIGHTS": tiles.eights,
        "COLUMN_TILES": tiles.column_tiles,
        "STAGES": tiles.stages,
        "REFILLS": int(tiles.refills),
        "X_CHUNKS": tiles.x_chunks,
    }
    if product.gated:
        defines["GATED"] = 1
    if product.normed:
        defines["NORMED"] = 1
    if product.float_out:
        defines["FLOAT_OUT"] = 1
    return jit.VariantSpec("skinny_gemm.cu", "skinny_gemm", defines, tiles.smem_bytes)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The products of a decoder, of which one is compiled for each way to cut it up that a card may need."""
    if config.dtype not in (torch.bfloat16, torch.float16):
        return []
    variants: list[jit.VariantSpec] = []
    for product in decoder_products(config):
        if not supports(1, product.n, product.k, config.dtype):
            continue
        for tiles in possible_tiles(config.arch, product):
            spec = variant(product, tiles, config.dtype)
            if spec not in variants:
                variants.append(spec)
    return variants


def decoder_products(config: jit.KernelConfig) -> list[Product]:
    """Those that this kernel is chosen for."""
    hidden, inner, attention = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads * config.head_dim,
    )
    qkv = attention + 2 * config.num_kv_heads * config.head_dim
    gated = fused_product.can_interleave(2 * inner)
    on_hopper = is_hopper() if config.arch is None else config.arch == "sm_90a"
    products = (
        *(Product(1, qkv, hidden, normed=n) for n in fused_product.norms(config.dtype)),
        Product(1, hidden, attention),
        *(Product(1, 2 * inner, hidden, gated, n) for n in fused_product.norms(config.dtype)),
        Product(1, hidden, inner),
        Product(1, config.vocab_size, hidden, float_out=True),
    )
    return [p for p in products if most_rows(p.n, p.k, on_hopper) > 0]


def possible_tiles(arch: str | None, product: Product) -> list[Tiles]:
    """That of the current device; for another `arch`, those of all its cards, however many SMs they have."""
    if arch is None:
        plans = [make_plan(product, *device_limits())]
    else:
        smem_limit = SMEM_LIMITS.get(arch, LEAST_SMEM_LIMIT)
        plans = [make_plan(product, num_sms, smem_limit) for num_sms in range(1, MAX_SMS + 1)]
    return list(dict.fromkeys(plan.tiles for plan in plans if plan is not None))


@cache
def is_hopper(device: int | None = None) -> bool:
    """Whether a device (default: the current one) is; yes where there is none."""
    return not torch.cuda.is_available() or jit.device_arch(device) == "sm_90a"


def device_limits(device: int | None = None) -> tuple[int, int]:
    """SMs and bytes of shared memory for a block, of a device (default: the current one)."""
    if not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(
        torch.cuda.current_device() if device is None else device
    )
    reserved = 1024  # by the driver, of each block
    return (
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor - reserved,
    )
