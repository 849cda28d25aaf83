"""Decode steps of few rows with all layers in one kernel (engine/ops/decoder_layers.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import KVCache, StepInputs
from engine.layers.linear import Linear
from engine.models.base import Model
from engine.models.decoder import Decoder, DecoderLayer
from engine.ops import decoder_layers, jit
from engine.ops.decoder_layers import MAX_ROWS, Layer, LayerTable, Scratch, Shape
from engine.ops.embed_tokens import embed_tokens

# A step of 0.5B took 0.49, 0.51, 0.55 and 0.65 ms at 1, 2, 4 and 8 rows on an H200, and 0.62 to 0.65 by a kernel for each
# part. 0: off.
MOST_ROWS = 4


@dataclass(frozen=True)
class SmallSteps:
    """What such steps of one model on one KV cache need. Not for two steps at once: they share scratch."""

    model: Decoder
    table: LayerTable
    scratch: Scratch
    sizes: list[int]  # numbers of rows that a step may have, ascending

    @classmethod
    def make(
        cls, model: Model, kv: KVCache, device: torch.device, sizes: list[int]
    ) -> "SmallSteps | None":
        """For those of `sizes` for which it is the better way; None if there are none.

        Steps are padded to these sizes, in a graph or not: how attention is split depends on padding rows, too.
        """
        if (
            MOST_ROWS == 0
            or not isinstance(model, Decoder)
            or jit.device_arch(device.index) != "sm_90a"
        ):
            return None
        shape = shape_of(model, kv)
        num_blocks = decoder_layers.multiprocessors(device.index)
        # with a part each, a long row among short ones would be one block's for each KV head
        max_rows = min(MOST_ROWS, MAX_ROWS, num_blocks // (2 * shape.num_kv_heads))
        sizes = [size for size in sizes if size <= max_rows]
        if not (sizes and takes(model, kv)):
            return None
        if not decoder_layers.is_chosen(shape, num_blocks, sizes[-1]):
            return None
        layers = [layer_of(layer, kv) for layer in model.layers]
        table = LayerTable.make(shape, layers)
        return cls(model, table, Scratch.allocate(shape, num_blocks, device), sizes)

    def forward(self, inputs: StepInputs) -> Tensor:
        """As Model.forward, for a decode step of one of `sizes`, its inputs on the device; attention is not planned."""
        model, spec = self.model, self.model.spec
        assert model.embedding.table is not None
        assert inputs.rows_device is not None
        assert inputs.seq_lens_device is not None
        hidden, angles = embed_tokens(
            inputs.input_ids, inputs.positions, model.embedding.table, model.rotary.table
        )
        decoder_layers.decoder_layers(
            hidden,
            self.table,
            model.rotary.of_rows(angles),
            inputs.block_table,
            inputs.rows_device,
            inputs.seq_lens_device,
            self.scratch,
            spec.head_dim**-0.5,
            spec.rms_norm_eps,
        )
        return model.norm(hidden)


def shape_of(model: Decoder, kv: KVCache) -> Shape:
    spec = model.spec
    return Shape(
        kv.k[0].dtype,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        kv.block_size,
    )


def takes(model: Decoder, kv: KVCache) -> bool:
    """Whether weights are stored as the kernel wants them, and attention is plain."""
    return all(
        is_whole(layer.qkv, kv.k[0].dtype)
        and layer.qkv.is_folded
        and is_whole(layer.output, kv.k[0].dtype)
        and is_whole(layer.gate_up, kv.k[0].dtype)
        and layer.gate_up.is_folded
        and layer.gate_up.is_interleaved
        and is_whole(layer.down, kv.k[0].dtype)
        and layer.attention_spec.sliding_window is None
        and not layer.attention_spec.softcap
        and layer.attention_spec.scale == model.spec.head_dim**-0.5
        for layer in model.layers
    )


def is_whole(linear: Linear, dtype: torch.dtype) -> bool:
    """A plain matrix of the cache's dtype."""
    weight = linear.weight
    return type(linear) is Linear and weight is not None and weight.dtype is dtype


def layer_of(layer: DecoderLayer, kv: KVCache) -> Layer:
    qkv, output, gate_up, down = (
        linear.weight for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
    assert qkv is not None
    assert output is not None
    assert gate_up is not None
    assert down is not None
    return Layer(
        qkv,
        output,
        gate_up,
        down,
        kv.k[layer.index],
        kv.v[layer.index],
        layer.qkv.bias,
        layer.output.bias,
        layer.gate_up.bias,
        layer.down.bias,
        layer.qk_norm.weight if layer.qk_norm is not None else None,
    )
