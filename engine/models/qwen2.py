"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and windows on some layers if asked for."""

from engine.api.config import ConfigError
from engine.models.config import ModelConfig
from engine.models.decoder import DecoderSpec

DEFAULT_MAX_WINDOW_LAYERS = 28


def decoder_spec(config: ModelConfig) -> DecoderSpec:
    return DecoderSpec.from_config(config, qkv_bias=True, sliding_windows=sliding_windows(config))


def sliding_windows(config: ModelConfig) -> tuple[int | None, ...]:
    """The window of each layer: `layer_types` says it, or all layers from `max_window_layers` on.

    Both only count with `use_sliding_window`; `sliding_window` alone is a relic in many configs.
    """
    raw = config.raw
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first else None for layer in range(config.num_layers))
    if len(layer_types) != config.num_layers:
        raise ConfigError(
            f"{config.path}: layer_types has {len(layer_types)} entries for {config.num_layers} layers"
        )
    known = {"full_attention": None, "sliding_attention": window}
    for kind in layer_types:
        if kind not in known:
            raise ConfigError(
                f"{config.path}: layer type {kind!r} is not supported; supported: {', '.join(known)}"
            )
    return tuple(known[kind] for kind in layer_types)
