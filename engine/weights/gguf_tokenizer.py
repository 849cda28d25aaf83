"""The tokenizer inside a GGUF file, as the files a Hugging Face directory has.

Only byte-level BPE vocabularies ("gpt2"), and only pre-tokenizers whose rule is known exactly: a
tokenizer that splits text slightly differently works almost always, and is wrong silently.
"""

from typing import Any

from engine.api.config import ConfigError
from engine.weights.gguf_file import GgufFile
from engine.weights.gguf_model import special_token_ids

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_files(gguf: GgufFile) -> dict[str, dict[str, Any]]:
    """File name -> contents: tokenizer.json, tokenizer_config.json, special_tokens_map.json."""
    kind = gguf.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"{gguf.path}: tokenizer of kind {kind!r} cannot be taken from a GGUF file (only gpt2, "
            "byte-level BPE); pass the directory of the original tokenizer with --tokenizer"
        )
    tokens = gguf.require("tokenizer.ggml.tokens")
    types = gguf.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    added = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    template = gguf.metadata.get("tokenizer.chat_template")
    named = {f"{name}_token": tokens[i] for name, i in special_token_ids(gguf).items()}
    return {
        "tokenizer.json": _tokenizer_json(gguf, tokens, added),
        "tokenizer_config.json": {
            **named,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added
            },
            **({"chat_template": template} if template else {}),
            "clean_up_tokenization_spaces": False,
            "model_max_length": gguf.metadata.get(f"{gguf.architecture}.context_length"),
        },
        "special_tokens_map.json": named,
    }


def _tokenizer_json(
    gguf: GgufFile, tokens: list[str], added: list[dict[str, Any]]
) -> dict[str, Any]:
    pre = gguf.metadata.get("tokenizer.ggml.pre", "")
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": _splitters(gguf, pre, byte_level),
        },
        "post_processor": _bos_template(gguf, tokens, pre),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [m.split(" ", 1) for m in gguf.require("tokenizer.ggml.merges")],
        },
    }


def _splitters(gguf: GgufFile, pre: str, byte_level: dict[str, Any]) -> list[dict[str, Any]]:
    """How text is cut before merging, for the file's `tokenizer.ggml.pre`."""

    def split(pattern: str) -> dict[str, Any]:
        return {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }

    gpt2 = {**byte_level, "use_regex": True}
    rules = {
        "gpt-2": [gpt2],
        "smollm": [{"type": "Digits", "individual_digits": True}, gpt2],
        "llama-bpe": [split(LLAMA3_PATTERN), byte_level],
        "qwen2": [split(QWEN2_PATTERN), byte_level],
    }
    if pre not in rules:
        raise ConfigError(
            f"{gguf.path}: pre-tokenizer {pre or '(none given)'!r} is not known exactly; known: "
            f"{', '.join(rules)}. Pass the directory of the original tokenizer with --tokenizer"
        )
    return rules[pre]


def _bos_template(gguf: GgufFile, tokens: list[str], pre: str) -> dict[str, Any] | None:
    """A post-processor that puts the bos token first, if the file asks for that."""
    bos = special_token_ids(gguf).get("bos")
    if bos is None or not gguf.metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return None
    token = tokens[bos]
    first = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [bos], "tokens": [token]}},
    }
