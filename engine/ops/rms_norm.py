"""y = weight * x / sqrt(mean(x^2) + eps), over the last dimension (https://arxiv.org/abs/1910.07467).

Contract
    x       [..., N] bfloat16, float16 or float32, last dimension contiguous; not changed
    weight  broadcasts against x from the right, usually [N], of x's dtype; None: ones
    returns x's shape and dtype, a fresh tensor

The mean and the division are done in float32, the result is rounded to x's dtype, and only then
multiplied by the weight: the order of the reference implementations, which matters in bfloat16.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit

SOURCE = "rms_norm.cu"
MAX_HIDDEN_BYTES = 64 * 1024  # of a row: four 16-byte vectors for each of 1024 threads


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See the module's contract."""
    if x.is_cuda and has_kernel(x, weight):
        return launch(x, weight, eps)
    y = F.rms_norm(x, x.shape[-1:], None, eps)
    return y if weight is None else y.mul_(weight)


def reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The definition, operation by operation."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    y = (wide * scale).to(x.dtype)
    return y if weight is None else y * weight


# --- CUDA: cuda/rms_norm.cu ---


def has_kernel(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the kernel reads these: whole rows of 16-byte vectors, one weight for all rows."""
    row_bytes = x.shape[-1] * x.element_size()
    rows_are_aligned = x.is_contiguous() or (
        x.dim() == 2 and x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0
    )
    return (
        (weight is None or weight.dim() == 1)
        and row_bytes % 16 == 0
        and row_bytes <= MAX_HIDDEN_BYTES
        and rows_are_aligned
        and x.data_ptr() % 16 == 0
    )


def launch(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    num_rows, hidden = rows.shape
    y = x.new_empty(*x.shape)
    threads, per_block = geometry(hidden, x.dtype)
    kernel(hidden, x.dtype)(
        (-(-num_rows // per_block),),
        (threads * per_block,),
        (
            rows.data_ptr(),
            weight.data_ptr() if weight is not None else 0,
            y.data_ptr(),
            np.int64(rows.stride(0)),
            np.int32(num_rows),
            np.float32(eps),
        ),
    )
    return y


@cache
def geometry(hidden: int, dtype: torch.dtype) -> tuple[int, int]:
    """Threads for a row and rows in a block.

    A warp takes a short row, so that nothing waits for a barrier; two vectors a thread keep enough
    loads under way for long ones.
    """
    vectors = hidden * dtype.itemsize // 16
    if vectors <= 128:
        return 32, 4
    return min(1024, -(-vectors // 64) * 32), 1


@cache
def kernel(hidden: int, dtype: torch.dtype) -> jit.Kernel:
    spec = variant(hidden, dtype)
    return jit.kernel(spec.source, spec.name, spec.defines)


def variant(hidden: int, dtype: torch.dtype) -> jit.VariantSpec:
    threads, rows = geometry(hidden, dtype)
    defines = {jit.scalar_define(dtype): 1, "HIDDEN": hidden, "THREADS": threads, "ROWS": rows}
    return jit.VariantSpec(SOURCE, "rms_norm", defines)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """The norm over the hidden dimension."""
    row_bytes = config.hidden_size * config.dtype.itemsize
    if row_bytes % 16 or row_bytes > MAX_HIDDEN_BYTES:
        return []
    return [variant(config.hidden_size, config.dtype)]
