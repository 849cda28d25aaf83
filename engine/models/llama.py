"""Llama 2, 3 and everything shaped like them (SmolLM2, TinyLlama, ...)."""

from engine.models.config import ModelConfig
from engine.models.decoder import DecoderSpec


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    has_attention_bias = bool(config.raw.get("attention_bias", False))
    return DecoderSpec.from_config(
        config,
        qkv_bias=has_attention_bias,
        output_bias=has_attention_bias,
        mlp_bias=bool(config.raw.get("mlp_bias", False)),
    )
