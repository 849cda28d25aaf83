"""Scales of an 8-bit KV cache, where a checkpoint has them.

A calibrated checkpoint says for each layer what its keys and values are to be divided by, so that they
use the range of 8 bits. Tools write them under two kinds of names:

    model.layers.3.self_attn.k_scale           model.layers.3.self_attn.v_scale
    model.layers.3.self_attn.k_proj.k_scale    model.layers.3.self_attn.v_proj.v_scale

They have a place in every model, whether its cache has 8 bits or not.
"""

import math

from engine.api.config import ConfigError
from engine.weights.checkpoint import Checkpoint
from engine.weights.slots import Source

Scales = tuple[float, float]  # of a layer's keys and values


def scale_names(layer: int, kind: str) -> tuple[str, str]:
    """The names under which a scale may stand; `kind` is "k" or "v"."""
    attention = f"model.layers.{layer}.self_attn"
    return f"{attention}.{kind}_scale", f"{attention}.{kind}_proj.{kind}_scale"


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> tuple[list[Scales], list[str]]:
    """By layer, 1 where the checkpoint has none; and the names of the tensors that were used.

    Of a scale for each head the largest is taken: it keeps every head within range.
    Raises ConfigError for a scale that no number can be divided by.
    """
    used: list[str] = []

    def scale(layer: int, kind: str) -> float:
        name = next((n for n in scale_names(layer, kind) if n in checkpoint.files), None)
        if name is None:
            return 1.0
        used.append(name)
        shape, _ = checkpoint.describe(name)
        value = float(checkpoint.read(Source(name, shape)).float().max())
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} in {checkpoint.files[name]} is {value:g}; a scale of the KV cache must be a "
                "positive number; fetch the file again, or remove the tensor"
            )
        return value

    scales = [(scale(layer, "k"), scale(layer, "v")) for layer in range(num_layers)]
    return scales, used
