"""The pre-norm decoder that most open models are, driven by a frozen description.

tokens -> embedding -> hidden [T, hidden_size], which every layer adds to in place:

    hidden += o(attend_new(qkv(norm(hidden))))
    hidden += down(silu_and_mul(gate_up(norm(hidden))))

Norms, the gate and the sums belong to the products beside them (engine/layers/linear.py).

hidden -> norm -> head -> logits [S, vocab_size]

Of the last layer every token needs its keys and values; what comes behind them is computed for the S rows
that are wanted, with the step's attention between.
"""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    KVScales,
    NewTokens,
    StepInputs,
    rotate_and_store,
)
from engine.layers.embedding import Embedding, OutputHead
from engine.layers.linear import Linear
from engine.layers.norm import QkNorm, RmsNorm
from engine.layers.rope_config import RopeConfig
from engine.layers.rotary import Rotary
from engine.models import ARCHITECTURES
from engine.models.config import ModelConfig
from engine.ops.embed_tokens import embed_tokens
from engine.weights.slots import WeightedLayer


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What distinguishes one decoder from another. A family's file makes it from the config."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # one per layer

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        sliding_windows: tuple[int | None, ...] | None = None,
    ) -> "DecoderSpec":
        """The common fields from the config, the others from the family."""
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_model_len=config.max_model_len,
            rms_norm_eps=config.rms_norm_eps,
            rope=config.rope,
            tied_head=config.tie_word_embeddings,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            sliding_windows=sliding_windows or (None,) * config.num_layers,
        )


class DecoderLayer:
    """Attention and MLP of one layer."""

    def __init__(self, spec: DecoderSpec, index: int, fused: bool) -> None:
        self.index = index
        self.spec = spec
        self.attention_spec = AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            sliding_window=spec.sliding_windows[index],
            qk_norm_eps=spec.rms_norm_eps,
        )
        name = f"model.layers.{index}"
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        hidden, inner = spec.hidden_size, spec.intermediate_size
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.input_norm = RmsNorm(f"{name}.input_layernorm", hidden, spec.rms_norm_eps)
        self.qkv = Linear(
            f"{attn}.qkv",
            hidden,
            [(f"{attn}.q_proj", q_size), (f"{attn}.k_proj", kv_size), (f"{attn}.v_proj", kv_size)],
            bias=spec.qkv_bias,
            norm=self.input_norm,
            fused=fused,
        )
        self.qk_norm = (
            QkNorm(attn, spec.num_heads, spec.num_kv_heads, spec.head_dim) if spec.qk_norm else None
        )
        self.output = Linear(
            f"{attn}.o_proj",
            q_size,
            [(f"{attn}.o_proj", hidden)],
            bias=spec.output_bias,
            fused=fused,
        )
        self.mlp_norm = RmsNorm(f"{name}.post_attention_layernorm", hidden, spec.rms_norm_eps)
        self.gate_up = Linear(
            f"{mlp}.gate_up",
            hidden,
            [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)],
            bias=spec.mlp_bias,
            norm=self.mlp_norm,
            gated=True,
            fused=fused,
        )
        self.down = Linear(
            f"{mlp}.down_proj",
            inner,
            [(f"{mlp}.down_proj", hidden)],
            bias=spec.mlp_bias,
            fused=fused,
        )

    def weighted_layers(self) -> Iterator[WeightedLayer]:
        yield from (self.input_norm, self.qkv)
        if self.qk_norm is not None:
            yield self.qk_norm
        yield from (self.output, self.mlp_norm, self.gate_up, self.down)

    def __call__(
        self,
        hidden: Tensor,  # [T, hidden_size], changed in place
        rotation: tuple[Tensor, Tensor],
        inputs: StepInputs,
        attention: AttentionBackend,
    ) -> None:
        new = self.project(hidden, rotation)
        self.add_rest(hidden, self.attend(new, inputs, attention))

    def project(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> NewTokens:
        """Queries, keys and values of all tokens, before their rotation."""
        weight = self.qk_norm.weight if self.qk_norm is not None else None
        return NewTokens(self.qkv(hidden), rotation, weight)

    def attend(self, new: NewTokens, inputs: StepInputs, attention: AttentionBackend) -> Tensor:
        """[T, num_heads * head_dim]; keys and values are in the cache then."""
        return attention.attend_new(self.index, new, self.attention_spec, inputs)

    def add_rest(self, hidden: Tensor, attended: Tensor) -> None:
        """Add to `hidden`, for any rows of a step, what follows from their attention."""
        self.output.add_to(hidden, attended)
        self.down.add_to(hidden, self.gate_up(hidden))


class Decoder:
    """A whole model (engine/models/base.py). Built without weights; the loader brings them.

    fused: the layers' products take in what surrounds them (engine/ops/fused_product.py).
    """

    def __init__(
        self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device, fused: bool = False
    ) -> None:
        self.spec = spec
        self.num_layers = spec.num_layers
        self.vocab_size = spec.vocab_size
        self.max_model_len = spec.max_model_len
        self.embedding = Embedding("model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.rotary = Rotary(spec.rope, spec.head_dim, spec.max_model_len, dtype, device)
        self.layers = [DecoderLayer(spec, index, fused) for index in range(spec.num_layers)]
        self.norm = RmsNorm("model.norm", spec.hidden_size, spec.rms_norm_eps)
        self.head = OutputHead("lm_head", self.embedding, tied=spec.tied_head)
        self.attention_specs = [layer.attention_spec for layer in self.layers]
        self.kv_scales: list[KVScales] = [(1.0, 1.0)] * spec.num_layers  # the loader's to change

    def weighted_layers(self) -> Iterator[WeightedLayer]:
        """All layers with weights, in the order in which they are loaded."""
        yield self.embedding
        for layer in self.layers:
            yield from layer.weighted_layers()
        yield from (self.norm, self.head)

    def forward(
        self, inputs: StepInputs, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        """See engine/models/base.py."""
        if wanted is None or len(wanted):
            return self.finish(*self.attend_all(inputs, attention), wanted)
        hidden, new = self.to_last_layer(inputs, attention)
        last = self.layers[-1]
        rotate_and_store(attention.kv, last.index, new, last.attention_spec, inputs)
        return hidden[:0]

    def attend_all(self, inputs: StepInputs, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """See engine/models/base.py."""
        hidden, new = self.to_last_layer(inputs, attention)
        return hidden, self.layers[-1].attend(new, inputs, attention)

    def to_last_layer(
        self, inputs: StepInputs, attention: AttentionBackend
    ) -> tuple[Tensor, NewTokens]:
        """Hidden states in front of the last layer, and what its attention gets."""
        assert self.embedding.table is not None, "the embedding has no weights yet"
        hidden, angles = embed_tokens(
            inputs.input_ids, inputs.positions, self.embedding.table, self.rotary.table
        )
        rotation = self.rotary.of_rows(angles)
        *others, last = self.layers
        for layer in others:
            layer(hidden, rotation, inputs, attention)
        return hidden, last.project(hidden, rotation)

    def finish(self, hidden: Tensor, attended: Tensor, wanted: Tensor | None = None) -> Tensor:
        """See engine/models/base.py."""
        if wanted is not None:
            hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
        self.layers[-1].add_rest(hidden, attended)
        return self.norm(hidden)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """See engine/models/base.py."""
        return self.head(hidden, out)


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, fused: bool | None = None
) -> Decoder:
    """The model that `config` describes, without weights; `fused` by default on GPUs in 16-bit dtypes."""
    family = importlib.import_module(ARCHITECTURES[config.architecture])
    if fused is None:
        fused = device.type == "cuda" and dtype.itemsize == 2
    return Decoder(family.decoder_spec(config), dtype, device, fused)
