"""What the runner asks of a model."""

from typing import Protocol

from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionSpec, KVScales, StepInputs


class Model(Protocol):
    """A decoder-only language model. Weights are in place once the loader has run."""

    num_layers: int
    vocab_size: int  # rows of the output head
    max_model_len: int  # as config.json and rope scaling allow
    attention_specs: list[AttentionSpec]  # one per layer
    kv_scales: list[KVScales]  # one per layer, for a KV cache of 8 bits

    def forward(
        self, inputs: StepInputs, attention: AttentionBackend, wanted: Tensor | None = None
    ) -> Tensor:
        """Write the KV cache; return hidden states after the final norm, [S, hidden_size].

        They are those of the tokens `wanted` (int64 [S], may be none), or of all T without it. What only
        the others need is not computed.
        """

    def attend_all(self, inputs: StepInputs, attention: AttentionBackend) -> tuple[Tensor, Tensor]:
        """The first part of `forward`: what all tokens of a step need, whoever samples.

        Writes the KV cache; returns hidden states [T, hidden_size] in front of the last layer, and its
        attention [T, num_heads * head_dim].
        """

    def finish(self, hidden: Tensor, attended: Tensor, wanted: Tensor | None = None) -> Tensor:
        """The rest of `forward`, from the results of `attend_all`. Without `wanted` it changes `hidden`."""

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [S, vocab_size] for hidden states [S, hidden_size]. On a GPU in `out`, if given."""
