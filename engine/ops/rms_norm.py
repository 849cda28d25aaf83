"""y = weight * x / sqrt(mean(x^2) + eps), over the last dimension (https://arxiv.org/abs/1910.07467).

Contract
    x       [..., N] bfloat16 or float32, last dimension contiguous; not changed
    weight  broadcasts against x from the right, usually [N], of x's dtype
    returns x's shape and dtype, a fresh tensor

The mean and the division are done in float32, the result is rounded to x's dtype, and only then
multiplied by the weight: the order of the reference implementations, which matters in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the module's contract."""
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition, operation by operation."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight
