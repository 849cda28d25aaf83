"""y = x W^T + b, and products with what surrounds them in a decoder: the choice of who computes them.

Contract of `linear`
    x       [T, in_features], bfloat16, float16 or float32, rows contiguous
    weight  what `pack_weight` returned for W [out_features, in_features] of x's dtype
    bias    [out_features] of x's dtype, or None
    returns [T, out_features] of x's dtype, a fresh tensor

Contract of `linear_float32`, for a model's head
    returns out [T, out_features] float32, a fresh tensor unless given (`out` is for GPUs). On a GPU sums are
            not rounded: logits of 16 to 32 would be by up to 1/16 in bfloat16, more than all else in a
            model costs most tokens' log-probabilities. A CPU's library rounds to x's dtype first

Contract of `fused_linear`: engine/ops/fused_product.py's, with W as it is and the result written over
`residual` if there is one. The library's way rounds in between: the normed x, gate and up, silu's result.

On a CPU, `pack_weight` copies W into the blocked layout of oneDNN's matrix product once, instead of
torch doing so at every call. That is 1.3 to 2.3 times faster for a few rows, and for T >= 2 a row of
the result is the same, bit for bit, whatever the other rows are (the runner pads a lone row to two).
Neither holds where oneDNN is missing and W is left as it is.

On a GPU products go to one of our own kernels where it is faster by all that is known, else to torch's library;
`fastest` chooses. For few rows our kernels do all in one launch. For many there is one for gated products, with a
kernel for the norm in front. The library has kernels for the norm in front, and for gate and residual behind.
"""

from collections.abc import Callable
from functools import cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import gated_gemm_sm90 as gated_gemm
from engine.ops import jit
from engine.ops import narrow_gemm as narrow
from engine.ops import skinny_gemm as skinny
from engine.ops import wide_gemm_sm90 as wide
from engine.ops.activation import silu_and_mul
from engine.ops.fused_product import is_aligned
from engine.ops.hopper import Device, device_of, devices_of
from engine.ops.rms_norm import rms_norm

TYPICAL_ROWS = 16  # a hint to oneDNN; the layout it chooses serves other counts as well
WIDE_ROWS = 64  # up to so many wide_gemm_sm90 is the fastest for nearly all that skinny_gemm and narrow_gemm leave
ESTIMATED_ROWS = 192  # up to so many estimates choose between it and the library
MOST_FEW_ROWS = wide.ROWS[-1]  # no kernel for few rows takes more
# Of a gated product: for so many rows the norm's kernel and gated_gemm_sm90 take less time together than
# wide_gemm_sm90, which norms on the way. On an H200, at 256 rows of a 0.5B model: 14.2 and 15.7 us.
FEWEST_ROWS_BEFORE_WIDE = 241


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See the module's contract."""
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return fused_linear(x, weight, bias)


def linear_float32(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """See the module's contract."""
    if not x.is_cuda:
        return linear(x, weight).float()
    kernel = kernel_for(x, weight)
    if kernel is not None:
        if out is None:
            out = x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
        return kernel(x, weight, None, out)
    if x.dtype is torch.float32:
        return torch.mm(x, weight.t(), out=out)
    return torch.mm(x, weight.t(), torch.float32, out=out)


def fused_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """See the module's contract."""
    kernel = kernel_for(x, w, norm_eps is not None, gated, residual is not None, bias is not None)
    if kernel is not None:
        return kernel(x, w, bias, residual, norm_eps=norm_eps, gated=gated, residual=residual)
    if norm_eps is not None:
        x = rms_norm(x, None, norm_eps)
    if residual is not None and bias is None and not gated:
        return residual.addmm_(x, w.t())
    y = F.linear(x, w, bias)
    if gated:
        y = silu_and_mul(y, interleaved=True)
    return y if residual is None else residual.add_(y)


def kernel_for(
    x: Tensor,
    w: Tensor,
    normed: bool = False,
    gated: bool = False,
    residual: bool = False,
    has_bias: bool = False,
) -> Callable[..., Tensor] | None:
    """What of ours computes this product, with the signature of fused_product.reference; None: torch's
    library is faster, or the only one that takes such tensors. See `fastest`."""
    if not x.is_cuda or w.dtype != x.dtype:
        return None
    m = min(x.shape[0], MOST_FEW_ROWS + 1)  # more are all alike
    device = device_of(x.device.index)
    kernel = fastest(m, *w.shape, x.dtype, device, normed, gated, residual, has_bias)
    if kernel is None or not (w.is_contiguous() and is_aligned(x) and is_aligned(w)):
        return None
    return kernel


@cache
def fastest(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: Device,
    normed: bool = False,
    gated: bool = False,
    residual: bool = False,
    has_bias: bool = False,
) -> Callable[..., Tensor] | None:
    """For x [m, k] and W [n, k], and what surrounds them; None: torch's library.

    Each kernel's time was measured for the products of ten models, 0.1 to 14B, at 22 numbers of rows from 1 to 256 in
    chains of dependent launches on an H200 (scripts/bench_products.py), and whole decode steps of some of them. In
    steps, where a kernel follows others than itself, W of less than SMALL_W are narrow_gemm's up to 16 rows although in
    chains wide_gemm_sm90 is as fast, and beyond 192 rows larger ones are the library's. Between 65 and 192 rows
    estimates choose that were fitted to the chains. Products of more than WIDE_ROWS rows with nothing around them, a
    model's head mostly, are the library's: to store their results takes the others longer."""
    if skinny.is_chosen(m, n, k, dtype, device.has_clusters):
        return skinny.skinny_gemm
    if narrow.is_chosen(m, n, k, dtype, device):
        return narrow.narrow_gemm
    if not device.has_clusters:
        return None
    is_wide = wide.supports(m, n, k, dtype)
    if is_wide and m > WIDE_ROWS:
        is_surrounded = normed or gated or residual
        is_wide = is_surrounded and wide_beats_library(m, n, k, device, normed, gated)
    # gated_gemm_sm90 has neither; the norm has a kernel in front
    is_gate_alone = gated and not (residual or has_bias)
    fewest = FEWEST_ROWS_BEFORE_WIDE if is_wide else gated_gemm.FEWEST_ROWS
    if is_gate_alone and m >= fewest and gated_gemm.supports(m, n, k, dtype):
        return norm_and_gated_gemm
    return wide.wide_gemm_sm90 if is_wide else None


def wide_beats_library(m: int, n: int, k: int, device: Device, normed: bool, gated: bool) -> bool:
    """For more than WIDE_ROWS rows with something around their product."""
    if 2 * n * k < skinny.SMALL_W:
        return True
    if m > ESTIMATED_ROWS:
        return False
    ours = wide.least_us(wide.rows_for(m), n, k, device, gated, normed)
    return ours <= library_us(m, n, k, normed, gated)


def library_us(m: int, n: int, k: int, normed: bool, gated: bool) -> float:
    """Microseconds of the library for 65 to 256 rows, with its kernels in front and behind, 7% off in the mean; and half
    of one, as the kernel behind cannot fetch its weights meanwhile."""
    m = -(-m // 64) * 64  # of its tiles
    products = 0.309e-3 * k + 0.338e-6 * n * k + 1.15e-9 * m * n * k + 2.11e-6 * m * k
    return 4.0 + products + 1.71 * normed + 1.31e-6 * m * n * gated


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """wide_gemm_sm90's variants for a decoder's products, where it is chosen on the current device or, if
    config.arch is given, on a card of that architecture."""
    cases = product(
        [device for device in devices_of(config.arch) if device.has_clusters],
        wide.products_of(config),
        range(1, MOST_FEW_ROWS + 1),
        (False, True),
    )
    found = dict.fromkeys(
        (p, wide.rows_for(m), device)
        for device, p, m, has_bias in cases
        if fastest(m, p.n, p.k, config.dtype, device, p.normed, p.gated, p.residual, has_bias)
        is wide.wide_gemm_sm90
    )
    variants = [wide.variant_of(p, rows, config.dtype, device) for p, rows, device in found]
    return [spec for i, spec in enumerate(variants) if spec not in variants[:i]]


def norm_and_gated_gemm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    gated: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """fused_product's contract by two kernels, the norm's rounding in between. Neither bias nor residual."""
    assert gated
    assert bias is None
    assert residual is None
    if norm_eps is not None:
        x = rms_norm(x, None, norm_eps)
    return gated_gemm.gated_gemm_sm90(x, w, out)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` with an unpacked weight."""
    return F.linear(x, weight, bias)


def pack_weight(weight: Tensor) -> Tensor:
    """A packed copy of W on a CPU where that works, else W itself. The caller drops the original."""
    if weight.is_cuda or not can_pack(weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether packed products work here, found out by doing one."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    weight = torch.randn(48, 64, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        y = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False  # other processors and builds of torch lack these
    return bool(packed.is_mkldnn) and torch.allclose(
        y.float(), reference(x, weight, bias).float(), rtol=0.02, atol=0.1
    )
