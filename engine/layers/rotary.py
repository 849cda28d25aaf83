"""Rotary position embedding: frequencies of every kind, and a table of cos and sin by position.

Kinds and where they come from:
    default   https://arxiv.org/abs/2104.09864
    linear    positions divided by a factor, https://arxiv.org/abs/2306.15595
    dynamic   the base grown with the length ("NTK-aware"), see YaRN's appendix
    llama3    low frequencies divided, a ramp in between, https://arxiv.org/abs/2407.21783
    yarn      https://arxiv.org/abs/2309.00071
    longrope  a divisor per frequency, https://arxiv.org/abs/2402.13753

Two kinds depend on the length of the sequence in their definition. Keys in a shared cache cannot be
rotated anew when a sequence grows, so the server fixes the length once, at what it was configured for:
dynamic uses the base for `max_model_len`, and longrope takes its long list if `max_model_len` exceeds
the length of pre-training, else the short one.
"""

import math

import torch
from torch import Tensor

from engine.layers.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """Radians per position for each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind == "dynamic":
        return 1.0 / (dynamic_base(rope, head_dim, max_model_len) ** exponents)
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return llama3_frequencies(rope, plain)
    if rope.kind == "yarn":
        return yarn_frequencies(rope, head_dim, exponents)
    if rope.kind == "longrope":
        is_long = max_model_len > rope.original_max_len
        divisors = torch.tensor(rope.long_factors if is_long else rope.short_factors)
        return 1.0 / (divisors * rope.theta**exponents)
    return plain


def dynamic_base(rope: RopeConfig, head_dim: int, length: int) -> float:
    """The base for sequences of `length`, grown so that the slowest pair turns no further."""
    stretch = rope.factor * max(length, rope.original_max_len) / rope.original_max_len
    return rope.theta * (stretch - (rope.factor - 1)) ** (head_dim / (head_dim - 2))


def llama3_frequencies(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Wavelengths beyond the pre-training length are stretched, short ones kept, others mixed."""
    turns = rope.original_max_len * plain / (2 * math.pi)  # in the length of pre-training
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def yarn_frequencies(rope: RopeConfig, head_dim: int, exponents: Tensor) -> Tensor:
    """Pairs that turn often in the pre-training length are kept, slow ones stretched, others mixed."""

    def dimension_of(num_turns: float) -> float:
        wavelength = rope.original_max_len / (num_turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = rope.theta**exponents
    return stretch / (rope.factor * wavelengths) + (1 - stretch) / wavelengths


class Rotary:
    """cos and sin of every position's angles, computed in float32.

    On a CPU they are kept in the model's dtype, as rotation is done in it there; a GPU's kernel rotates
    in float32.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        frequencies = inverse_frequencies(rope, head_dim, max_model_len)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        table = torch.cat((angles.cos(), angles.sin()), -1) * rope.attention_factor
        kept = torch.float32 if device.type == "cuda" else dtype
        self.table = table.to(device, kept)  # [max_model_len, head_dim]: cos, then sin

    def of_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, head_dim] of the table -> cos and sin, as ops.rope_and_cache wants them on this device."""
        cos, sin = rows.unsqueeze(1).chunk(2, -1)
        if rows.is_cuda:
            return cos, sin
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
