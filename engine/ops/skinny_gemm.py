"""y = x W^T for up to 32 rows, at the rate at which W can be read; with what surrounds it in a decoder.

Contract
    x        [M, K] bfloat16 or float16, M <= 32, K a multiple of 8, last dimension contiguous, rows at
             multiples of 16 bytes; not changed
    w        [N, K] of x's dtype, contiguous, as torch.nn.Linear has it; gated: [2 N, K], gate then up
    bias     [N] (gated: [2 N]) or None
    residual [M, N], last dimension contiguous, or None; `out` may be the same tensor
    returns  out [M, N] of x's dtype, a fresh tensor unless given:

                 y = x W^T + bias                            sums in float32, rounded once at the end
      normed     x := rms_norm(x, norm_weight, eps) first    bfloat16 only
      gated      y = silu(x gate^T + bias) * (x up^T + bias)
      residual   y += residual

A row of the result depends on its own row of x and nothing else, bit for bit: not on M, not on its
place. That holds among M <= 32; a larger product is another library's. Normalisation is not computed
ahead: x * norm_weight is rounded and multiplied, and the sum divided by the root mean square at the end,
so products of large activations must fit the dtype, which rules out float16.

The kernel is described in cuda/skinny_gemm.cu.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit

MAX_ROWS = 32
DISPATCH_ROWS = (
    8  # up to here `linear_cuda` takes this kernel; beyond, the library is faster (H200)
)
WARPS = 8
PIECE = 512  # bytes that a warp loads at once
ROW_TILES = (3, 2, 1)  # of 16 rows of W, largest first: x is read once for each tile
MAX_STAGES = 6
IN_FLIGHT = 56 * 1024  # bytes that an SM should have under way to keep the memory busy
LEAST_SMEM_LIMIT = 99 * 1024  # bytes of shared memory for a block, of consumer cards
SMEM_LIMITS = {"sm_80": 163 * 1024, "sm_87": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
H200 = (132, 227 * 1024)  # SMs, shared memory of a block; assumed where there is no device


@dataclass(frozen=True)
class Tiles:
    """What selects a kernel variant."""

    row_tiles: int  # 16 rows of W each
    column_tiles: int  # 8 rows of x each
    stages: int
    in_flight: int  # bytes, as far as they help
    smem_bytes: int

    @classmethod
    def fit(cls, row_tiles: int, column_tiles: int, normed: bool, smem_limit: int) -> "Tiles":
        """With as many stages as memory allows; fewer than 2 do not work."""
        stage = WARPS * PIECE * (4 * row_tiles + 2 * column_tiles + 2 * normed)
        sums = 2 * WARPS * 8 * column_tiles * (16 * row_tiles + 4 + normed) * 4
        stages = min(MAX_STAGES, (smem_limit - sums) // stage)
        in_flight = min(IN_FLIGHT, (stages - 1) * stage)
        return cls(row_tiles, column_tiles, stages, in_flight, stages * stage + sums)


@dataclass(frozen=True)
class Plan:
    """How one product is cut up. The order of its sums depends on none of this."""

    tiles: Tiles
    grid: int
    block_rows: int  # outputs of a block
    tile_rows: int  # outputs of a tile


def skinny_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    gated: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See the module's contract. Raises ValueError for what the kernel cannot do on a CUDA device."""
    if not x.is_cuda:
        return reference(x, w, bias, residual, out, gated=gated, norm_weight=norm_weight, eps=eps)
    check(x, w, residual, norm_weight is not None)
    if out is None:
        width = w.shape[0] // 2 if gated else w.shape[0]
        out = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    launch(x, w, bias, residual, out, gated, norm_weight, eps)
    return out


def launch(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    gated: bool,
    norm_weight: Tensor | None,
    eps: float,
) -> None:
    (m, k), n = x.shape, out.shape[1]
    normed = norm_weight is not None
    kernel, plan = prepare(column_tiles_for(m), n, x.dtype, gated, normed, x.device.index)
    kernel(
        (plan.grid,),
        (32 * WARPS,),
        (
            out.data_ptr(),
            x.data_ptr(),
            w.data_ptr(),
            bias.data_ptr() if bias is not None else 0,
            residual.data_ptr() if residual is not None else 0,
            norm_weight.data_ptr() if norm_weight is not None else 0,
            np.int32(m),
            np.int32(n),
            np.int32(k),
            np.int32(x.stride(0)),
            np.int32(out.stride(0)),
            np.int32(residual.stride(0) if residual is not None else 0),
            np.int32(plan.block_rows),
            np.int32(plan.tile_rows),
            np.float32(eps),
        ),
    )


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    *,
    gated: bool = False,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The definition in float32, rounded once."""
    wide = x.float()
    if norm_weight is not None:
        wide = F.rms_norm(wide, wide.shape[-1:], norm_weight.float(), eps)
    y = F.linear(wide, w.float(), bias.float() if bias is not None else None)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


def linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b on a CUDA device: this kernel for few rows, torch's library for more."""
    m, k = x.shape
    is_few = m <= DISPATCH_ROWS and supports(m, weight.shape[0], k, x.dtype)
    if is_few and weight.is_contiguous() and is_aligned(x) and is_aligned(weight):
        return skinny_gemm(x, weight, bias)
    return F.linear(x, weight, bias)


def is_aligned(matrix: Tensor) -> bool:
    """Whether rows are contiguous and start at multiples of 16 bytes."""
    return matrix.stride(1) == 1 and matrix.stride(0) % 8 == 0 and matrix.data_ptr() % 16 == 0


def supports(m: int, n: int, k: int, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply [m, k] by [n, k] transposed."""
    return 1 <= m <= MAX_ROWS and n >= 1 and k % 8 == 0 and dtype in (torch.bfloat16, torch.float16)


def check(x: Tensor, w: Tensor, residual: Tensor | None, normed: bool) -> None:
    """Raises ValueError with a remedy for tensors outside the contract."""
    m, k = x.shape
    if not supports(m, w.shape[0], k, x.dtype):
        raise ValueError(
            f"skinny_gemm: x is {tuple(x.shape)} {x.dtype}; it takes 1 to {MAX_ROWS} rows of a "
            "multiple of 8 bfloat16 or float16 numbers. Use torch's linear for others"
        )
    if w.shape[1] != k or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(
            f"skinny_gemm: w is {tuple(w.shape)} {w.dtype}, strides {w.stride()}; it must be a "
            f"contiguous [N, {k}] of {x.dtype}"
        )
    if not (is_aligned(x) and is_aligned(w)):
        raise ValueError("skinny_gemm: rows of x and w must start at multiples of 16 bytes")
    if residual is not None and residual.stride(1) != 1:
        raise ValueError("skinny_gemm: rows of the residual must be contiguous")
    if normed and x.dtype != torch.bfloat16:
        raise ValueError(
            "skinny_gemm: normalising needs bfloat16; call rms_norm before for float16"
        )


def column_tiles_for(m: int) -> int:
    """1, 2 or 4 tiles of 8 rows of x."""
    return 1 if m <= 8 else 2 if m <= 16 else 4


@cache
def prepare(
    column_tiles: int, n: int, dtype: torch.dtype, gated: bool, normed: bool, device: int | None
) -> tuple[jit.Kernel, Plan]:
    """The loaded kernel and its plan on a device."""
    num_sms, smem_limit = device_limits(device)
    plan = make_plan(column_tiles, n, gated, normed, num_sms, smem_limit)
    if plan is None:
        raise ValueError(
            f"skinny_gemm: {8 * column_tiles} rows do not fit into this device's {smem_limit} bytes of "
            "shared memory for a block; split them, or use torch's linear"
        )
    spec = variant(plan.tiles, dtype, gated, normed)
    return jit.kernel(spec.source, spec.name, spec.defines, spec.smem_bytes), plan


def make_plan(
    column_tiles: int, n: int, gated: bool, normed: bool, num_sms: int, smem_limit: int
) -> Plan | None:
    """Every SM gets one block and as many outputs as the others, in tiles as large as memory allows.

    Larger tiles read x less often; more stages keep more of W on its way. None if shared memory is too
    small for so many rows of x.
    """
    step = 8 if gated else 16
    block_rows = -(-n // num_sms)
    best: Plan | None = None
    best_in_flight = -1
    for limit in ROW_TILES:
        num_tiles = -(-block_rows // (limit * step))
        tile_rows = -(-block_rows // num_tiles)
        tiles = Tiles.fit(-(-tile_rows // step), column_tiles, normed, smem_limit)
        if tiles.stages >= 2 and tiles.in_flight > best_in_flight:
            best_in_flight = tiles.in_flight
            best = Plan(tiles, -(-n // block_rows), block_rows, tile_rows)
    return best


def variant(tiles: Tiles, dtype: torch.dtype, gated: bool, normed: bool) -> jit.VariantSpec:
    defines: dict[str, int] = {
        jit.scalar_define(dtype): 1,
        "ROW_TILES": tiles.row_tiles,
        "COLUMN_TILES": tiles.column_tiles,
        "STAGES": tiles.stages,
    }
    if gated:
        defines["GATED"] = 1
    if normed:
        defines["NORMED"] = 1
    return jit.VariantSpec("skinny_gemm.cu", "skinny_gemm", defines, tiles.smem_bytes)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The products of a decoder. Normed and gated ones are left out: on an H200 a separate norm and a
    separate gate cost less than they add here (docs/performance.md)."""
    if config.dtype not in (torch.bfloat16, torch.float16):
        return []
    heads, kv_heads, hidden = config.num_heads, config.num_kv_heads, config.hidden_size
    qkv, gate_up = (heads + 2 * kv_heads) * config.head_dim, 2 * config.intermediate_size
    products = [(n, False, False) for n in (qkv, hidden, gate_up, config.vocab_size)]
    variants: list[jit.VariantSpec] = []
    for column_tiles in sorted({column_tiles_for(m + 1) for m in range(DISPATCH_ROWS)}):
        for n, gated, normed in products:
            for tiles in possible_tiles(config.arch, column_tiles, n, gated, normed):
                spec = variant(tiles, config.dtype, gated, normed)
                if spec not in variants:
                    variants.append(spec)
    return variants


def possible_tiles(
    arch: str | None, column_tiles: int, n: int, gated: bool, normed: bool
) -> list[Tiles]:
    """That of the current device; for another `arch`, those of all its cards, however many SMs they have."""
    if arch is None:
        plan = make_plan(column_tiles, n, gated, normed, *device_limits())
        return [] if plan is None else [plan.tiles]
    smem_limit = SMEM_LIMITS.get(arch, LEAST_SMEM_LIMIT)
    fits = [Tiles.fit(row_tiles, column_tiles, normed, smem_limit) for row_tiles in ROW_TILES]
    return [tiles for tiles in fits if tiles.stages >= 2]


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
