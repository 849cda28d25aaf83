"""RMS norm layers."""

import torch
from torch import Tensor

from engine.ops.rms_norm import rms_norm
from engine.weights.slots import Slot, Source


class RmsNorm:
    """Root-mean-square norm over the hidden dimension."""

    def __init__(self, name: str, size: int, eps: float) -> None:
        self.name = name
        self.size = size
        self.eps = eps
        self.weight: Tensor | None = None

    def slots(self) -> list[Slot]:
        return [Slot(self.name, (Source(f"{self.name}.weight", (self.size,)),))]

    def take(self, tensors: list[Tensor]) -> None:
        (self.weight,) = tensors

    def __call__(self, x: Tensor) -> Tensor:
        """[T, size] -> the same, a fresh tensor."""
        assert self.weight is not None, f"{self.name} has no weights yet"
        return rms_norm(x, self.weight, self.eps)


class QkNorm:
    """Weights of the per-head norms of q and k, spread over the heads for ops.rope_and_cache."""

    def __init__(self, name: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        self.name = name
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.weight: Tensor | None = None  # [num_heads + num_kv_heads, head_dim]

    def slots(self) -> list[Slot]:
        names = (f"{self.name}.q_norm.weight", f"{self.name}.k_norm.weight")
        return [Slot(name, (Source(name, (self.head_dim,)),)) for name in names]

    def take(self, tensors: list[Tensor]) -> None:
        q, k = tensors
        self.weight = torch.cat((q.expand(self.num_heads, -1), k.expand(self.num_kv_heads, -1)))
