"""Linear layers. This is the only file that knows how a weight matrix is stored.

A quantization method would be another class with the same four methods, chosen where decoder.py
builds its layers: `slots` says what the checkpoint holds, `take` repacks it, calling multiplies, `add_to`
does so onto a sum.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.layers.norm import RmsNorm
from engine.ops.activation import silu_and_mul
from engine.ops.fused_product import can_fold, can_interleave, fold_norm, interleave_in_place
from engine.ops.linear import fused_linear, linear, pack_weight
from engine.weights.slots import Slot, Source


class Linear:
    """One matrix product over the stacked rows of several of the checkpoint's matrices.

    `sources` are (name, rows); each has `in_features` columns, and a bias of `rows` if `bias`.
    `norm`: of the input, loaded before this layer. `gated`: the two sources are gate and up, and the result
    is silu(gate) * up. `fused`: weights are stored as engine/ops/fused_product.py wants them, for GPUs.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        sources: Sequence[tuple[str, int]],
        bias: bool = False,
        *,
        norm: RmsNorm | None = None,
        gated: bool = False,
        fused: bool = False,
    ) -> None:
        self.name = name
        self.in_features = in_features
        self.sources = sources
        self.has_bias = bias
        self.norm = norm
        self.is_gated = gated
        self.is_fused = fused
        self.is_folded = fused and norm is not None  # the norm's weight, into this one's
        self.is_interleaved = fused and gated and can_interleave(sum(rows for _, rows in sources))
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def slots(self) -> list[Slot]:
        weights = [Source(f"{s}.weight", (rows, self.in_features)) for s, rows in self.sources]
        slots = [Slot(self.name, tuple(weights))]
        if self.has_bias:
            biases = [Source(f"{s}.bias", (rows,)) for s, rows in self.sources]
            slots.append(Slot(self.name, tuple(biases)))
        return slots

    def take(self, tensors: list[Tensor]) -> None:
        if self.is_fused and self.norm is not None:
            assert self.norm.weight is not None, f"{self.norm.name} is loaded before {self.name}"
            self.is_folded = can_fold(tensors[0], self.norm.weight)
            if self.is_folded:
                fold_norm(tensors[0], self.norm.weight)
        if self.is_interleaved:
            for tensor in tensors:
                interleave_in_place(tensor)
        self.weight = tensors[0] if self.is_fused else pack_weight(tensors[0])
        self.bias = tensors[1] if self.has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, sum of rows], or half as many if gated."""
        assert self.weight is not None, f"{self.name} has no weights yet"
        norm_eps = None
        if self.norm is not None and self.is_folded:
            norm_eps = self.norm.eps
        elif self.norm is not None:
            x = self.norm(x)
        if self.is_fused:
            y = fused_linear(
                x, self.weight, self.bias, norm_eps=norm_eps, gated=self.is_interleaved
            )
        else:
            y = linear(x, self.weight, self.bias)
        return silu_and_mul(y) if self.is_gated and not self.is_interleaved else y

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """total [T, sum of rows] += the product with x [T, in_features]. For layers without norm and gate."""
        assert self.weight is not None, f"{self.name} has no weights yet"
        if self.is_fused:
            fused_linear(x, self.weight, self.bias, residual=total)
        else:
            total.add_(linear(x, self.weight, self.bias))
