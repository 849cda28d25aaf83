"""Mistral: Llama with a sliding window on every layer, where the config has one."""

from engine.models.config import ModelConfig
from engine.models.decoder import DecoderSpec


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    window = config.raw.get("sliding_window")
    return DecoderSpec.from_config(config, sliding_windows=(window,) * config.num_layers)
