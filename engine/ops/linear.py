"""y = x W^T + b.

Contract
    x       [T, in_features], bfloat16 or float32, rows contiguous
    weight  what `pack_weight` returned for W [out_features, in_features] of x's dtype
    bias    [out_features] of x's dtype, or None
    returns [T, out_features], a fresh tensor of x's dtype

On a CPU, `pack_weight` copies W into the blocked layout of oneDNN's matrix product once, instead of
torch doing so at every call. That is 1.3 to 2.3 times faster for a few rows, and for T >= 2 a row of
the result is the same, bit for bit, whatever the other rows are (the runner pads a lone row to two).
Neither holds where oneDNN is missing and W is left as it is.

On a GPU few rows go to one of our own kernels (engine/ops/skinny_gemm.py, engine/ops/narrow_gemm.py,
engine/ops/wide_gemm_sm90.py) where it is known to be faster, the others to torch's library.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import wide_gemm_sm90 as wide
from engine.ops.narrow_gemm import is_chosen, narrow_gemm
from engine.ops.skinny_gemm import linear_cuda
from engine.ops.wide_gemm_sm90 import wide_gemm_sm90

TYPICAL_ROWS = 16  # a hint to oneDNN; the layout it chooses serves other counts as well


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See the module's contract."""
    if x.is_cuda:
        if is_chosen(x, weight):
            return narrow_gemm(x, weight, bias)
        if wide.is_chosen(x, weight):
            return wide_gemm_sm90(x, weight, bias)
        return linear_cuda(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with an unpacked weight."""
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
