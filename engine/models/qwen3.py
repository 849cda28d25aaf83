"""Qwen3: per-head RMS norms on q and k instead of Qwen2's biases."""

from engine.models.config import ModelConfig
from engine.models.decoder import DecoderSpec
from engine.models.qwen2 import sliding_windows


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    has_attention_bias = bool(config.raw.get("attention_bias", False))
    return DecoderSpec.from_config(
        config,
        qkv_bias=has_attention_bias,
        output_bias=has_attention_bias,
        qk_norm=True,
        sliding_windows=sliding_windows(config),
    )
