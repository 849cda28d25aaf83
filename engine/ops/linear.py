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

On a GPU products go to one of our own kernels where it is known to be faster, else to torch's library; `fastest`
chooses. For few rows our kernels do all in one launch. For many there is one for gated products, with a kernel
for the norm in front. The library has kernels for the norm in front, and for gate and residual behind.
"""

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import gated_gemm_sm90 as gated_gemm
from engine.ops import narrow_gemm as narrow
from engine.ops import skinny_gemm as skinny
from engine.ops import wide_gemm_sm90 as wide
from engine.ops.activation import silu_and_mul
from engine.ops.fused_product import is_aligned
from engine.ops.rms_norm import rms_norm

TYPICAL_ROWS = 16  # a hint to oneDNN; the layout it chooses serves other counts as well
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
    kernel = kernel_for(x, weight, is_surrounded=False, is_gate_alone=False)
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
    is_surrounded = norm_eps is not None or gated or residual is not None
    is_gate_alone = gated and bias is None and residual is None
    kernel = kernel_for(x, w, is_surrounded, is_gate_alone)
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
    x: Tensor, w: Tensor, is_surrounded: bool, is_gate_alone: bool
) -> Callable[..., Tensor] | None:
    """What of ours computes this product, with the signature of fused_product.reference; None: torch's
    library is faster, or the only one that takes such tensors. See `fastest`."""
    if not x.is_cuda or w.dtype != x.dtype:
        return None
    m = min(x.shape[0], MOST_FEW_ROWS + 1)  # more are all alike
    kernel = fastest(m, *w.shape, x.dtype, x.device.index, is_surrounded, is_gate_alone)
    if kernel is None or not (w.is_contiguous() and is_aligned(x) and is_aligned(w)):
        return None
    return kernel


@cache
def fastest(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    device: int | None,
    is_surrounded: bool,
    is_gate_alone: bool,
) -> Callable[..., Tensor] | None:
    """For x [m, k] and W [n, k]; None: torch's library.

    `is_surrounded`: there is a norm, a gate or a residual. A product with nothing around it is a model's
    head, mostly: to read its large W for more than a few rows, the library takes no longer.

    `is_gate_alone`: gated, without bias and residual, with or without a norm. Such products of many rows
    are gated_gemm_sm90's, which has a kernel for the norm in front: it comes after the kernels for few rows,
    which norm on the way, but for the last rows of wide_gemm_sm90's."""
    if skinny.is_chosen(m, n, k, dtype, device):
        return skinny.skinny_gemm
    if narrow.is_chosen(m, n, k, dtype, device):
        return narrow.narrow_gemm
    if not is_surrounded:
        return None
    takes_gate = is_gate_alone and gated_gemm.is_chosen(m, n, k, dtype, device)
    is_wide = wide.is_chosen(m, n, k, dtype, device)
    if takes_gate and (not is_wide or m >= FEWEST_ROWS_BEFORE_WIDE):
        return norm_and_gated_gemm
    return wide.wide_gemm_sm90 if is_wide else None


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
