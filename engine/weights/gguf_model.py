"""What a GGUF model file means in Hugging Face terms: config.json keys, tensor names, permutations."""

import re
from typing import Any

from engine.api.config import ConfigError
from engine.weights.gguf_file import Float32Array, GgufFile

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),  # Mistral files are of this architecture, too
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
EMBEDDING = "token_embd.weight"
TOP_LEVEL_NAMES = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency scaling, as a list of divisors


def hf_config(gguf: GgufFile) -> dict[str, Any]:
    """The contents of config.json for this file. Raises ConfigError for other architectures."""
    arch = gguf.architecture
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{gguf.path}: GGUF architecture {arch!r} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    num_parts = gguf.metadata.get("split.count", 1)
    if num_parts > 1:
        raise ConfigError(
            f"{gguf.path}: this is one of {num_parts} parts; join them first (llama-gguf-split --merge)"
        )
    if EMBEDDING not in gguf.tensors:
        raise ConfigError(f"{gguf.path}: no tensor {EMBEDDING}; is this a language model?")
    if gguf.metadata.get(f"{arch}.expert_count", 0):
        raise ConfigError(f"{gguf.path}: mixture-of-experts GGUF models are not supported yet")
    architecture, model_type = ARCHITECTURES[arch]
    hidden_size = gguf.require(f"{arch}.embedding_length")
    num_heads = gguf.require(f"{arch}.attention.head_count")
    special = special_token_ids(gguf)
    head_dim = gguf.metadata.get(
        f"{arch}.attention.key_length",
        gguf.metadata.get(f"{arch}.rope.dimension_count", hidden_size // num_heads),
    )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": gguf.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": gguf.require(f"{arch}.feed_forward_length"),
        "num_hidden_layers": gguf.require(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": gguf.metadata.get(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": gguf.require(f"{arch}.context_length"),
        "rms_norm_eps": shortest(gguf.require(f"{arch}.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(gguf.metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(gguf, head_dim),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": special.get("bos"),
        "eos_token_id": special.get("eos"),
        "pad_token_id": special.get("pad"),
    }


def rope_scaling(gguf: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """The file's rotary scaling as a Hugging Face `rope_scaling` entry, or None."""
    arch = gguf.architecture
    if ROPE_FACTORS in gguf.tensors:
        # Divisors without the formula behind them are exactly longrope with one list for all
        # lengths and no attention scaling.
        factors = [shortest(x) for x in gguf.tensors[ROPE_FACTORS].to_float32().tolist()]
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": gguf.require(f"{arch}.context_length"),
        }
    prefix = f"{arch}.rope.scaling"
    kind = gguf.metadata.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{gguf.path}: rope scaling {kind!r} is not supported for GGUF files; "
            "supported: none, linear, yarn, and Llama 3's frequency list"
        )
    scaling = {"rope_type": kind, "factor": shortest(gguf.require(f"{prefix}.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.require(
            f"{prefix}.original_context_length"
        )
    return scaling


def special_token_ids(gguf: GgufFile) -> dict[str, int]:
    """Ids of the bos, eos, pad and unk tokens that the file names."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {
        name: gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()
    }
    return {name: int(token_id) for name, token_id in found.items() if token_id is not None}


def stop_token_ids(gguf: GgufFile) -> list[int]:
    """The end-of-sequence token, and the end-of-turn token where the file names another one."""
    ids = [gguf.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def hf_names(gguf: GgufFile) -> dict[str, str]:
    """Hugging Face name -> GGUF name of every weight. Raises ConfigError for an unknown tensor."""
    names = {}
    for name in gguf.tensors:
        if name == ROPE_FACTORS:
            continue  # part of the config
        match = LAYER_TENSOR.fullmatch(name)
        if name in TOP_LEVEL_NAMES:
            names[TOP_LEVEL_NAMES[name]] = name
        elif match and match[2] in LAYER_NAMES:
            names[f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"] = name
        else:
            raise ConfigError(
                f"{gguf.path}: tensor {name} has no known meaning in a {gguf.architecture} model"
            )
    return names


def hf_values(gguf: GgufFile, name: str) -> Float32Array:
    """Values of the GGUF tensor `name` as a Hugging Face checkpoint holds them, float32.

    Files of architecture llama store the rows of q and k with each head's two rotary halves
    interleaved (row 2i and 2i + 1 are rotated together); Hugging Face keeps the halves apart.
    """
    values = gguf.tensors[name].to_float32()
    match = LAYER_TENSOR.fullmatch(name)
    if gguf.architecture != "llama" or not match or match[2] not in ("attn_q", "attn_k"):
        return values
    num_heads = gguf.require("llama.attention.head_count")
    if match[2] == "attn_k":
        num_heads = gguf.metadata.get("llama.attention.head_count_kv", num_heads)
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def shortest(value: float) -> float:
    """A float32 from the file as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
