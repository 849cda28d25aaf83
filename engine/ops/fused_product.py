"""A matrix product with what surrounds it in a decoder: the contract of our kernels.

    x         [M, K], not changed
    w         [N, K] as torch.nn.Linear has it
    bias      [N] or None
    norm_eps  not None: x is normed on the way. The norm's weight is in w already (`fold_norm`), so what is
              left is a factor for each row, which commutes with the product:

                  rms_norm(x, weight) W^T = (x (W diag(weight))^T) / sqrt(mean(x^2) + eps)

    gated     w is [gate; up] with its rows interleaved by eights (`interleave`), as is the bias:
              y = silu(gate part) * (up part), [M, N / 2]
    residual  [M, outputs] or None: is added to y. `out` may be the same tensor
    returns   out [M, outputs] of x's dtype, a fresh tensor unless given. Sums are in float32, and so is all
              else; it is rounded once, at the end. An `out` of float32, where a kernel takes one, is not
              rounded: for logits

Interleaved rows: 16 j ... 16 j + 7 are gate's rows 8 j ... 8 j + 7, and 16 j + 8 ... 16 j + 15 are up's. So a
tile of 16 rows holds both factors of eight outputs, whose 16 bytes are stored together.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 8  # rows of gate, then as many of up
SLAB = 512  # columns or rows of a weight at a time: a copy of it would need its memory again
# typical size in float16 below which its smallest steps, 2^-24, cost more than 11 bits do
FAINT = 2.0**-15


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """The definition in float32, rounded once."""
    wide = x.float()
    y = F.linear(wide, w.float())
    if norm_eps is not None:
        y = y * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)
    if bias is not None:
        y = y + bias.float()
    if gated:
        gate, up = split_interleaved(y)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


def can_fold(w: Tensor, weight: Tensor) -> bool:
    """Whether w [N, K] times the norm's weight [K] is about as exact as w is. In float16 it may overflow, or
    most of it lie among the smallest numbers, whose steps are all alike; other dtypes reach far enough."""
    if w.dtype is not torch.float16:
        return True
    largest, squares = [], []
    for rows in w.split(SLAB):
        folded = rows.float() * weight
        largest.append(folded.abs().max())
        squares.append(folded.square().sum())
    typical = (torch.stack(squares).sum() / w.numel()).sqrt()
    fits = torch.stack(largest).max() <= torch.finfo(w.dtype).max
    return bool(fits & (typical >= FAINT))


def fold_norm(w: Tensor, weight: Tensor) -> Tensor:
    """w [N, K] times the norm's weight [K], in place: computed in float32, rounded once."""
    return w.mul_(weight)


def norms(dtype: torch.dtype) -> tuple[bool, ...]:
    """Whether products behind a norm take it in: in float16 it depends on the weights (`can_fold`)."""
    return (True, False) if dtype is torch.float16 else (True,)


def can_interleave(num_rows: int) -> bool:
    """Whether gate and up, together of so many rows, consist of whole groups."""
    return num_rows % (2 * GROUP) == 0


def interleave(gate_up: Tensor) -> Tensor:
    """[gate; up], of N rows (or N elements), with its rows interleaved: a copy."""
    half = gate_up.shape[0] // 2
    groups = gate_up.view(2, half // GROUP, GROUP, *gate_up.shape[1:])
    return groups.transpose(0, 1).reshape(gate_up.shape)


def interleave_in_place(gate_up: Tensor) -> None:
    """The same without a second matrix."""
    for columns in gate_up.split(SLAB, 1) if gate_up.dim() > 1 else (gate_up,):
        columns.copy_(interleave(columns))


def split_interleaved(y: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up [M, N / 2] of [M, N] whose columns are interleaved."""
    groups = y.view(y.shape[0], -1, 2, GROUP)
    gate, up = groups.unbind(2)
    return gate.reshape(y.shape[0], -1), up.reshape(y.shape[0], -1)


def is_aligned(matrix: Tensor, num_bytes: int = 16) -> bool:
    """Whether rows are contiguous and start at multiples of `num_bytes`."""
    row_stride, column_stride = matrix.stride()
    return (
        column_stride == 1
        and matrix.element_size() * row_stride % num_bytes == 0
        and matrix.data_ptr() % num_bytes == 0
    )


def check_operands(
    kernel: str,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    gated: bool,
    residual: Tensor | None,
    alignment: int,
    takes_float32: bool = False,
) -> None:
    """What kernels ask alike of tensors whose sizes they take. `alignment`: bytes at whose multiples rows of
    `out` and `residual` start, and, up to 4, the bias; of a float32 `out`, which `takes_float32` allows, twice
    as many. Raises ValueError that names the kernel."""
    (m, k), n = x.shape, w.shape[0]
    if gated and not can_interleave(n):
        raise ValueError(
            f"{kernel}: w has {n} rows; gated, it must have a multiple of {2 * GROUP}. Gate the product of "
            "[gate; up] by act_and_mul instead"
        )
    if w.shape[1] != k or w.dtype != x.dtype or not w.is_contiguous():
        raise ValueError(
            f"{kernel}: w is {tuple(w.shape)} {w.dtype}, strides {w.stride()}; it must be a contiguous "
            f"[N, {k}] of {x.dtype}"
        )
    if not (is_aligned(x) and is_aligned(w)):
        raise ValueError(f"{kernel}: rows of x and w must start at multiples of 16 bytes")
    if bias is not None and not (
        bias.shape == (n,)
        and bias.dtype == x.dtype
        and bias.is_contiguous()
        and bias.data_ptr() % min(alignment, 4) == 0
    ):
        raise ValueError(
            f"{kernel}: the bias is {tuple(bias.shape)} {bias.dtype}; it must be a contiguous [{n}] of "
            f"{x.dtype}, at a multiple of {min(alignment, 4)} bytes"
        )
    shape = (m, n // 2 if gated else n)
    result = None if out is residual else out
    for name, tensor in (("out", result), ("the residual", residual)):
        if tensor is None:
            continue
        is_float32 = takes_float32 and name == "out" and tensor.dtype is torch.float32
        dtype, multiple = (torch.float32, 2 * alignment) if is_float32 else (x.dtype, alignment)
        if not (tensor.shape == shape and tensor.dtype == dtype and is_aligned(tensor, multiple)):
            raise ValueError(
                f"{kernel}: {name} is {tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}; it "
                f"must be a {list(shape)} of {dtype} with contiguous rows at multiples of {multiple} bytes"
            )
