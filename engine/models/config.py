"""What config.json (or a GGUF header) says of a model, checked, without importing torch."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError
from engine.layers.rope_config import MOST_POSITIONS, RopeConfig, in_range
from engine.models import ARCHITECTURES

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_FILE = "model.safetensors"
LFS_MARK = (
    b"version https://git-lfs"  # begins what git has in place of a file until that is fetched
)
# Far beyond any model: a damaged config.json is to be told from a large model.
MOST_LAYERS = 2**12
MOST_WIDTH = 2**20
MOST_TOKENS = 2**24  # of the vocabulary
ACTIVATIONS = ("silu", "swish")  # two names of one function


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model, and what serving it needs to know.

    `raw` keeps all keys, for the few that only one family has (engine/models/<family>.py reads them).
    """

    path: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int  # positions the model is made for, rope scaling included
    eos_token_ids: list[int]  # of generation_config.json, then of config.json
    bos_token_id: int | None
    dtype: str  # of the checkpoint: "float32", "bfloat16", "float16"
    tie_word_embeddings: bool
    rms_norm_eps: float
    rope: RopeConfig
    raw: dict[str, Any] = field(repr=False)

    @classmethod
    def from_directory(cls, path: str) -> "ModelConfig":
        """Read a Hugging Face model directory, or a .gguf file.

        Raises ConfigError (exit code 2) with one line that names the path and what is wrong with it.
        """
        if Path(path).is_file():
            return cls.from_gguf(path)
        file = config_file(path)
        generation = read_json(Path(path) / "generation_config.json", required=False)
        return cls.from_dict(read_json(file), generation, path, str(file))

    @classmethod
    def from_gguf(cls, path: str) -> "ModelConfig":
        """Read the header of a GGUF file."""
        from engine.weights.gguf_file import read_gguf
        from engine.weights.gguf_model import hf_config, stop_token_ids

        gguf = read_gguf(path)
        return cls.from_dict(hf_config(gguf), {"eos_token_id": stop_token_ids(gguf)}, path, path)

    @classmethod
    def from_dict(
        cls, raw: dict[str, Any], generation: dict[str, Any], path: str, where: str
    ) -> "ModelConfig":
        """Check the contents of config.json (`where` in errors) and of generation_config.json."""
        reject_quantization(raw, where)
        hidden_size = positive_int(raw, "hidden_size", where)
        num_heads = positive_int(raw, "num_attention_heads", where)
        num_kv_heads = positive_int(raw, "num_key_value_heads", where, default=num_heads)
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"{where}: num_attention_heads {num_heads} is no multiple of num_key_value_heads "
                f"{num_kv_heads}"
            )
        head_dim = positive_int(raw, "head_dim", where, default=hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"{where}: head_dim {head_dim} is odd; rotary embedding needs pairs")
        hidden_act = raw.get("hidden_act", "silu")
        if hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"{where}: hidden_act {hidden_act!r} is not supported; supported: "
                f"{', '.join(ACTIVATIONS)}"
            )
        positions = positive_int(raw, "max_position_embeddings", where, most=MOST_POSITIONS)
        rope = RopeConfig.from_dict(raw, head_dim, positions, where)
        max_model_len = rope.max_positions(positions)
        if max_model_len > MOST_POSITIONS:
            raise ConfigError(
                f"{where}: max_position_embeddings {positions} and rope factor {rope.factor:g} make "
                f"{max_model_len} positions; at most {MOST_POSITIONS} can be served"
            )
        if raw.get("sliding_window"):
            positive_int(raw, "sliding_window", where, most=2**31 - 1)
        beside = str(Path(path) / "generation_config.json")
        eos_token_ids = token_ids(generation, "eos_token_id", beside)
        eos_token_ids += token_ids(raw, "eos_token_id", where)
        return cls(
            path=path,
            architecture=choose_architecture(raw, where),
            hidden_size=hidden_size,
            intermediate_size=positive_int(raw, "intermediate_size", where),
            num_layers=positive_int(raw, "num_hidden_layers", where, most=MOST_LAYERS),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=positive_int(raw, "vocab_size", where, most=MOST_TOKENS),
            max_model_len=max_model_len,
            eos_token_ids=list(dict.fromkeys(eos_token_ids)),
            bos_token_id=next(iter(token_ids(raw, "bos_token_id", where)), None),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rms_norm_eps=in_range(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where, 0, 1),
            rope=rope,
            raw=raw,
        )


def config_file(path: str) -> Path:
    """config.json of a model directory; raises ConfigError saying what is there instead."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"{path}: no such directory. Pass a directory with config.json and *.safetensors, or a "
            ".gguf file; models are not downloaded by name"
        )
    file = directory / "config.json"
    if not file.is_file():
        found = [f.name for f in sorted(directory.glob("*.gguf"))]
        hint = f"; it holds {found[0]}: pass that file instead" if found else ""
        raise ConfigError(f"{path}: no config.json in this directory{hint}")
    return file


def read_json(file: Path, required: bool = True) -> dict[str, Any]:
    """The object in a JSON file; {} if it may be absent and is. Raises ConfigError if malformed."""
    if not required and not file.is_file():
        return {}
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(contents).__name__}")
    return contents


def choose_architecture(raw: dict[str, Any], where: str) -> str:
    """The first entry of `architectures` that can be served; raises ConfigError listing those."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where}: architectures must be a list of names, got {names!r:.80}")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    named = ", ".join(map(str, names)) or "(none given)"
    raise ConfigError(
        f"{where}: architecture {named} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def reject_quantization(raw: dict[str, Any], where: str) -> None:
    """Quantized weights would load as nonsense; say so before anything else is looked at."""
    for key in ("quantization_config", "compression_config"):
        quantization = raw.get(key)
        if not quantization and not isinstance(quantization, list):
            continue
        if not isinstance(quantization, dict | str):
            raise ConfigError(f"{where}: {key} must be an object, got {quantization!r:.80}")
        method: object = quantization
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        said = f"{key} names no quant_method, and quantized weights are"
        if method is not None:
            said = f"quantization method {method!r:.80} is"
        raise ConfigError(
            f"{where}: {said} not supported yet; use the unquantized checkpoint, or a GGUF file, which "
            "is dequantized when loaded"
        )


def positive_int(
    raw: dict[str, Any], key: str, where: str, default: int | None = None, most: int = MOST_WIDTH
) -> int:
    """`raw[key]`, or `default` where the key is absent or null. Raises ConfigError naming the key."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{where}: {key} is missing; is this the config of a language model?")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{where}: {key} must be a positive integer, got {value!r:.80}")
    if value > most:
        raise ConfigError(f"{where}: {key} is {value}, more than any model has; at most {most}")
    return value


def token_ids(raw: dict[str, Any], key: str, where: str) -> list[int]:
    """`raw[key]`, one id or a list of them, as a list. Raises ConfigError naming the key."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for one in ids:
        if isinstance(one, bool) or not isinstance(one, int) or abs(one) > MOST_TOKENS:
            raise ConfigError(f"{where}: {key} must be a token id or a list, got {value!r:.80}")
    return list(ids)


def find_weight_files(path: str) -> list[str]:
    """The safetensors files of a model directory, those of the index if there is one.

    Raises ConfigError if there are none, or if one that the index names is missing.
    """
    directory = Path(path)
    index = directory / INDEX_FILE
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"{index}: weight_map must be an object, got {weight_map!r:.80}")
        for tensor, name in weight_map.items():
            if not isinstance(name, str):
                raise ConfigError(
                    f"{index}: weight_map must give each tensor a file name, got {name!r:.80} for "
                    f"{tensor:.80}"
                )
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (directory / name).is_file()]
        if missing:
            check_link(directory / missing[0])
            raise ConfigError(
                f"{path}: {len(missing)} of {len(shards)} weight files listed in {INDEX_FILE} are "
                f"missing, first {missing[0]}; is the download complete?"
            )
        if not shards:
            raise ConfigError(f"{index}: lists no weight files (weight_map is empty)")
        return [str(directory / name) for name in shards]
    check_link(directory / WEIGHT_FILE)
    if (directory / WEIGHT_FILE).is_file():
        return [str(directory / WEIGHT_FILE)]
    files = sorted(f for f in directory.glob("*.safetensors") if f.is_file())
    # consolidated*.safetensors repeat the same weights under other names
    files = [f for f in files if not f.name.startswith("consolidated")] or files
    if not files:
        for file in sorted(directory.glob("*.safetensors")):
            check_link(file)
        others = [f.name for f in sorted(directory.glob("*.bin"))]
        hint = f"; {others[0]} is not read, convert it to safetensors" if others else ""
        raise ConfigError(f"{path}: no *.safetensors in this directory{hint}")
    return [str(f) for f in files]


def check_link(file: Path) -> None:
    """Raise ConfigError if `file` is a link to nothing, as a moved or cleaned cache leaves them."""
    if file.is_symlink() and not file.exists():
        raise ConfigError(f"{file}: is a link to {os.readlink(file)}, which is not there")
