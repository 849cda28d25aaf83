"""Token embedding and output head."""

from torch import Tensor

from engine.ops.linear import linear_float32, pack_weight
from engine.weights.slots import Slot, Source


class Embedding:
    """A row of the table [vocab_size, hidden_size] for each token id; ops.embed_tokens reads it."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int) -> None:
        self.name = name
        self.shape = (vocab_size, hidden_size)
        self.table: Tensor | None = None

    def slots(self) -> list[Slot]:
        return [Slot(self.name, (Source(f"{self.name}.weight", self.shape),))]

    def take(self, tensors: list[Tensor]) -> None:
        (self.table,) = tensors


class OutputHead:
    """Hidden states -> logits. Tied: over a packed copy of the embedding's table.

    The copy costs memory once and makes the largest product of a decode step twice as fast.
    """

    def __init__(self, name: str, embedding: Embedding, tied: bool) -> None:
        self.name = name
        self.embedding = embedding
        self.tied = tied
        self.weight: Tensor | None = None

    def slots(self) -> list[Slot]:
        if self.tied:
            return []
        return [Slot(self.name, (Source(f"{self.name}.weight", self.embedding.shape),))]

    def take(self, tensors: list[Tensor]) -> None:
        table = self.embedding.table if self.tied else tensors[0]
        assert table is not None, "the embedding is loaded before the head tied to it"
        self.weight = pack_weight(table)

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden_size] -> [S, vocab_size] float32. `out` is for GPUs."""
        assert self.weight is not None, f"{self.name} has no weights yet"
        return linear_float32(hidden, self.weight, out)
