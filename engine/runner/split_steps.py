"""Large decode steps of small models in two halves, one's attention beside the other's products.

Attention is bound by memory, and the products of a small model by their starts and ends. So each half of the rows
goes through the layers on a stream of its own, the second one attention behind the first:

    ahead    prepare ─ embed ┬ plan ─ qkv ─ attention ┬ output ─ gate, up ─ down ─ qkv ─ attention ─ ... ┬ norm ─ logits
    behind                   └ plan ───────────────── ┴ qkv ─ attention ─ output ─ gate, up ─ down ─ ... ┘

Where two attentions meet, both take longer in the same way, so the distance between the halves stays as it began.
In exchange weights are read twice, and a half's products are those of fewer rows.

What both halves write is apart: each has rows of the hidden states, its own plan and scratch of attention, and
temporary tensors of its stream. Kernels of both have to find room on a multiprocessor at the same time, so
attention takes half of each, and products do where they can (engine/ops/side_by_side.py).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.base import GraphAttention, StepInputs
from engine.attention.paged import PagedAttention
from engine.models.base import Model
from engine.models.decoder import Decoder, DecoderLayer
from engine.ops import jit, paged_decode, side_by_side
from engine.ops.embed_tokens import embed_tokens

IS_CHOSEN = True
# Of steps, padding included. By estimate: a half's chain takes as long as a step of so many rows, which is little
# less for fewer; and products of more than 128 rows leave no room beside them.
ROWS = range(64, 257)
QUANTUM = 8  # rows; halves are multiples of it, but for the end


class Half(NamedTuple):
    """Some rows of a step, on their way through the layers."""

    hidden: Tensor  # [rows, hidden_size], changed in place
    rotation: tuple[Tensor, Tensor]
    inputs: StepInputs
    attention: GraphAttention

    def plan(self) -> None:
        inputs = self.inputs
        assert inputs.rows_device is not None
        assert inputs.seq_lens_device is not None
        self.attention.plan_on_device(
            inputs.seq_lens_device, inputs.rows_device, inputs.num_decodes
        )

    def attend(self, layer: DecoderLayer) -> Tensor:
        """The first part of a layer."""
        return layer.attend(layer.project(self.hidden, self.rotation), self.inputs, self.attention)

    def run(self, layer: DecoderLayer) -> None:
        layer(self.hidden, self.rotation, self.inputs, self.attention)


@dataclass(frozen=True)
class SplitSteps:
    """What such steps need. Not for two steps at once: they share scratch."""

    model: Decoder
    attentions: tuple[GraphAttention, GraphAttention]  # over the same cache
    side: torch.cuda.Stream | None  # of the second half; None: one after the other, on a CPU

    @classmethod
    def make(
        cls, model: Model, attention: GraphAttention, sizes: list[int], device: torch.device
    ) -> "SplitSteps | None":
        """For steps of some of `sizes`, ascending; None if none of them is faster in halves."""
        largest = max((size for size in sizes if size in ROWS), default=0)
        if not (
            IS_CHOSEN
            and largest
            and isinstance(model, Decoder)
            and isinstance(attention, PagedAttention)
            and jit.device_arch(device.index) == "sm_90a"
            and side_by_side.is_worth(model.spec)
            and (blocks := blocks_on_half(model, attention, device))
        ):
            return None
        first, second = (
            PagedAttention(
                attention.kv,
                list(dict.fromkeys(model.attention_specs)),
                rows_ahead(largest),
                attention.limits.max_tokens,
                device,
                attention.limits.is_fixed,
                blocks,
            )
            for _ in range(2)
        )
        return cls(model, (first, second), torch.cuda.Stream(device))

    def takes(self, size: int) -> bool:
        return size in ROWS

    def forward(self, inputs: StepInputs) -> Tensor:
        """As Model.forward, for a decode step on the device; attention is planned here.

        Streams part and meet at launches that wait for all in front of them: a dependent one would rely on one
        neighbour alone (cuda/common/dependent_launch.cuh).
        """
        model = self.model
        assert model.embedding.table is not None
        hidden, angles = embed_tokens(
            inputs.input_ids, inputs.positions, model.embedding.table, model.rotary.table
        )
        middle = rows_ahead(len(hidden))
        ahead, behind = (
            Half(hidden[rows], model.rotary.of_rows(angles[rows]), inputs.part(rows), attention)
            for rows, attention in zip(
                (slice(middle), slice(middle, None)), self.attentions, strict=True
            )
        )
        begin, *others = model.layers
        with side_by_side.leaving_room():
            self.part()
            with jit.whole_launches():
                ahead.plan()
                with self.on_side():
                    behind.plan()
            attended = ahead.attend(begin)
            self.part()
            with jit.whole_launches():
                with self.on_side():
                    attended_behind = behind.attend(begin)
                begin.output.add_to(ahead.hidden, attended)
            with self.on_side():
                begin.add_rest(behind.hidden, attended_behind)
            begin.down.add_to(ahead.hidden, begin.gate_up(ahead.hidden))
            for layer in others:
                ahead.run(layer)
                with self.on_side():
                    behind.run(layer)
            self.meet()
        with jit.whole_launches():
            return model.norm(hidden)

    def on_side(self) -> AbstractContextManager[object]:
        return nullcontext() if self.side is None else torch.cuda.stream(self.side)

    def part(self) -> None:
        """What follows on the side comes after what is on the current stream."""
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())

    def meet(self) -> None:
        """What follows on the current stream comes after what is on the side."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)


def rows_ahead(size: int) -> int:
    """Rows of the first half."""
    return -(-size // (2 * QUANTUM)) * QUANTUM


def blocks_on_half(model: Decoder, attention: PagedAttention, device: torch.device) -> int:
    """Thread blocks of attention that fit into half of a multiprocessor; 0 if one takes it all."""
    spec, kv_dtype = model.spec, attention.kv.k[0].dtype
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return paged_decode.resident_blocks(*heads, kv_dtype, device) // 2
