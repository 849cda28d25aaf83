"""Layers, caches and rows for ops.decoder_layers, on a GPU and in the emulator.

What no row may read is NaN: unused blocks, what follows a row's last token in its last block, and, before a step,
the place of its newest token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.ops import decoder_layers, jit
from engine.ops.decoder_layers import Layer, LayerTable, Scratch, Shape

EPS = 1e-6
POISONS = ("hidden", "infinity", "keys", "values", "qkv", "gate_up", "output_bias", "qk_norm")


@dataclass
class Step:
    """A step of len(lens) rows, then `padding` rows of the reserved block 0."""

    shape: Shape
    lens: list[int]
    padding: int = 0
    num_layers: int = 2
    has_bias: bool = False
    has_qk_norm: bool = False
    num_blocks: int = 132  # thread blocks
    device: str = "cpu"
    caches: list[tuple[Tensor, Tensor]] = field(init=False)
    table: LayerTable = field(init=False)

    def __post_init__(self) -> None:
        shape, m = self.shape, len(self.lens) + self.padding
        self.longest = list(self.lens)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        size = shape.block_size
        counts = [-(-n // size) for n in self.lens]
        blocks = 1 + torch.randperm(sum(counts) + 3)  # three are nobody's
        self.block_table = torch.zeros(m + 3, max(counts) + 1, dtype=torch.int32)
        self.rows = torch.zeros(m, dtype=torch.int32)
        self.rows[: len(self.lens)] = 1 + torch.randperm(m + 2)[: len(self.lens)].int()
        used = 0
        for row, count in zip(self.rows.tolist(), counts, strict=False):
            self.block_table[row, :count] = blocks[used : used + count]
            used += count
        self.block_table, self.rows = self.move(self.block_table), self.move(self.rows)
        self.rows_of_longest = self.rows.clone()
        self.seq_lens = self.move(torch.ones(m, dtype=torch.int32))
        self.hidden = self.numbers(m, hidden)
        self.angles = self.move(torch.zeros(m, 1, shape.head_dim))  # cos, then sin
        self.caches, layers = [], []
        for _ in range(self.num_layers):
            cache = (len(blocks) + 1, shape.num_kv_heads, size, shape.head_dim)
            self.caches.append((self.numbers(*cache), self.numbers(*cache)))
            biases = (
                {
                    name: self.numbers(n)
                    for name, n in (
                        ("qkv_bias", shape.qkv),
                        ("output_bias", hidden),
                        ("gate_up_bias", 2 * inner),
                        ("down_bias", hidden),
                    )
                }
                if self.has_bias
                else {}
            )
            heads = shape.num_heads + shape.num_kv_heads
            layers.append(
                Layer(
                    self.matrix(shape.qkv, hidden),
                    self.matrix(hidden, shape.attended),
                    self.matrix(2 * inner, hidden),
                    self.matrix(hidden, inner),
                    *(torch.empty_like(c) for c in self.caches[-1]),
                    **biases,
                    qk_norm=self.numbers(heads, shape.head_dim) if self.has_qk_norm else None,
                )
            )
        self.table = LayerTable.make(shape, layers)
        self.scratch = Scratch.allocate(shape, self.num_blocks, self.hidden.device)
        self.draw(self.lens)

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def numbers(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)

    def matrix(self, n: int, k: int) -> Tensor:
        return (torch.randn(n, k, device=self.device) * k**-0.5).to(self.shape.dtype)

    def draw(self, lens: list[int]) -> None:
        """New numbers, and lengths no longer than the first ones; in place, as a graph holds the tensors."""
        self.lens = lens
        count, size = len(lens), self.shape.block_size
        self.hidden.copy_(2 * torch.randn(self.hidden.shape))
        theta = 10 * torch.randn(len(self.hidden), 1, self.shape.head_dim // 2)
        self.angles.copy_(torch.cat((theta.cos(), theta.sin()), -1))
        self.seq_lens.fill_(1)
        self.seq_lens[:count] = torch.tensor(lens, dtype=torch.int32)
        self.rows.copy_(self.rows_of_longest)  # fewer ones before
        self.rows[count:] = 0
        for layer, pristine in zip(self.table.layers, self.caches, strict=True):
            for cache, numbers in zip((layer.k_cache, layer.v_cache), pristine, strict=True):
                cache.fill_(torch.nan)
                cache[0] = 0
                for row, length in zip(self.rows[:count].tolist(), lens, strict=True):
                    blocks = self.block_table[row].tolist()
                    for i in range(-(-(length - 1) // size)):
                        filled = min(size, length - 1 - i * size)
                        cache[blocks[i], :, :filled] = numbers[blocks[i], :, :filled]

    def poison(self, place: str) -> list[int]:
        """Put NaN of the bits that stand for "not there yet", or infinity, into the first layer's numbers. Returns
        the rows that go bad. The first row is longer than one token, and there are biases and weights of norms."""
        layer, block = self.table.layers[0], int(self.block_table[self.rows[0], 0])
        if place == "infinity":
            self.hidden[0] = torch.inf
            return [0]
        of_first_row = {
            "hidden": self.hidden[0],
            "keys": layer.k_cache[block, :, 0],
            "values": layer.v_cache[block, :, 0],
        }
        if place in of_first_row:
            of_first_row[place].view(torch.int16).fill_(-1)
            return [0]
        getattr(layer, place)[-1:].view(torch.int16).fill_(-1)
        return list(range(len(self.hidden)))

    def spec(self, smem_bytes: int = decoder_layers.SMEM_LIMIT, **defines: int) -> jit.VariantSpec:
        """`smem_bytes`: with little of it the ring soon comes round."""
        least_blocks = min(self.num_blocks, decoder_layers.LEAST_BLOCKS)
        spec = decoder_layers.variant(self.shape, least_blocks, smem_bytes)
        return jit.VariantSpec(
            spec.source, spec.name, {**spec.defines, **defines}, spec.smem_bytes, spec.archs
        )

    def launch(
        self,
        hidden: Tensor,
        spec: jit.VariantSpec,
        stamps: Tensor | None = None,
        cooperative: bool = True,
    ) -> None:
        decoder_layers.launch(
            hidden, self.table, self.rotation(), self.block_table, self.rows, self.seq_lens, self.scratch,
            self.shape.head_dim**-0.5, EPS, spec, self.num_blocks, stamps, cooperative,
        )  # fmt: skip

    def rotation(self) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles.chunk(2, -1)
        return cos, sin

    def reference(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """What becomes of `hidden`, and the caches; nothing is changed."""
        copies = [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in self.table.layers]
        layers = [
            Layer(**{**vars(layer), "k_cache": k, "v_cache": v})
            for layer, (k, v) in zip(self.table.layers, copies, strict=True)
        ]
        hidden = self.hidden.clone()
        decoder_layers.reference(
            hidden, LayerTable(self.shape, tuple(layers), self.table.addresses), self.rotation(),
            self.block_table, self.rows, self.seq_lens, self.shape.head_dim**-0.5, EPS,
        )  # fmt: skip
        return hidden, copies

    def check(self, hidden: Tensor, want: Tensor, caches: list[tuple[Tensor, Tensor]]) -> None:
        """The kernel's results against the reference's."""
        count, eps = len(self.lens), torch.finfo(self.shape.dtype).eps
        assert torch.isfinite(hidden).all(), (
            f"not finite: {(~torch.isfinite(hidden)).nonzero()[:5].tolist()}"
        )
        difference = (hidden.float() - want.float())[:count]
        errors = difference.norm(dim=-1) / want[:count].float().norm(dim=-1)
        worst = int(errors.argmax())
        assert errors[worst] < 2 * eps, (
            f"{self.shape}, lens {self.lens}: row {worst} has a relative error of {float(errors[worst]):.2e}, "
            f"limit {2 * eps:.1e}; all rows: {errors.tolist()}; largest difference "
            f"{float(difference[worst].abs().max()):.3g} in column {int(difference[worst].abs().argmax())}"
        )
        for i, (layer, pair) in enumerate(zip(self.table.layers, caches, strict=True)):
            for name, got, expected in zip("kv", (layer.k_cache, layer.v_cache), pair, strict=True):
                got, expected = got[1:].float(), expected[1:].float()
                assert torch.equal(got.isnan(), expected.isnan()), (
                    f"layer {i}, {name} cache: numbers differ in being NaN at (block - 1, head, token) "
                    f"{(got.isnan() != expected.isnan()).any(-1).nonzero()[:5].tolist()}"
                )
                error = (
                    (got - expected).nan_to_num().abs() / (1 + expected.nan_to_num().abs())
                ).max()
                assert error < 16 * eps, f"layer {i}, {name} cache: off by {float(error)}"
        assert self.scratch.is_clean(), "what passes from phase to phase must be empty in the end"
