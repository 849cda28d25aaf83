"""Linear layers. This is the only file that knows how a weight matrix is stored.

A quantization method would be another class with the same three methods, chosen where decoder.py
builds its layers: `slots` says what the checkpoint holds, `take` repacks it, calling multiplies.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.ops.linear import linear, pack_weight
from engine.weights.slots import Slot, Source


class Linear:
    """One matrix product over the stacked rows of several of the checkpoint's matrices.

    `sources` are (name, rows); each has `in_features` columns, and a bias of `rows` if `bias`.
    """

    def __init__(
        self, name: str, in_features: int, sources: Sequence[tuple[str, int]], bias: bool = False
    ) -> None:
        self.name = name
        self.in_features = in_features
        self.sources = sources
        self.has_bias = bias
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
        self.weight = pack_weight(tensors[0])
        self.bias = tensors[1] if self.has_bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, sum of rows]."""
        assert self.weight is not None, f"{self.name} has no weights yet"
        return linear(x, self.weight, self.bias)
