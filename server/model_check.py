"""Is there a model where --model says? Looked at without torch, in milliseconds.

What the files mean is the engine's to judge; here they only have to be present and readable.
"""

import json
import logging
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError, EngineConfig
from engine.api.sampling import ParamError, SamplingParams
from server.schema.sampling import SamplingDefaults

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SAMPLING_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
DIGEST_BYTES = 4096  # of each file
MAX_NAMED = 3  # missing shards named in an error


def check_model(engine: EngineConfig) -> None:
    """Raises ConfigError naming the path and what was looked for."""
    if engine.tokenizer:
        check_tokenizer(Path(engine.tokenizer), "--tokenizer")
    if not engine.model:
        return
    path = Path(engine.model)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(
                f"--model {path}: is a file; expected a directory of Hugging Face weights "
                "(config.json and *.safetensors) or a .gguf file"
            )
        check_gguf(path)
        return
    if path.suffix == ".gguf" and not path.exists():
        raise ConfigError(f"--model {path}: no such file")
    if not path.is_dir():
        raise ConfigError(
            f"--model {path}: no such directory; looked for config.json, *.safetensors and a "
            "tokenizer in it. Models are read from local directories, never downloaded by name"
        )
    config = read_object(path / "config.json")
    if engine.load_format != "dummy":
        check_weights(path)
    if not engine.tokenizer:
        check_tokenizer(path, "--model")
    check_vocabulary(Path(engine.tokenizer or engine.model), config.get("vocab_size"))


def check_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"--model {path}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ConfigError(
            f"--model {path}: is not a GGUF file: it begins with {magic!r} where GGUF is expected; "
            "was it downloaded completely?"
        )


def weight_files(folder: Path) -> list[Path]:
    """In order; a folder or a pipe of such a name is none."""
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def check_weights(path: Path) -> None:
    if not (path / INDEX).is_file():
        check_link(path / "model.safetensors")
        if weight_files(path):
            return
        for file in sorted(path.glob("*.safetensors")):
            check_link(file)
        others = [p.name for pattern in ("*.bin", "*.pth", "*.gguf") for p in path.glob(pattern)]
        found = f"; it holds {others[0]}, which is another format" if others else ""
        raise ConfigError(
            f"--model {path}: no *.safetensors (nor {INDEX}) in this directory{found}"
        )
    weight_map = read_object(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{path / INDEX}: has no weight_map; is the file complete?")
    shards = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in shards if not (path / name).is_file()]
    if missing:
        check_link(path / missing[0])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        raise ConfigError(
            f"--model {path}: {', '.join(missing[:MAX_NAMED])}{more} missing "
            f"({len(missing)} of {len(shards)} files named in {INDEX})"
        )


def check_link(file: Path) -> None:
    """Raise ConfigError if `file` is a link to nothing, as a moved or cleaned cache leaves them."""
    if file.is_symlink() and not file.exists():
        raise ConfigError(f"--model {file}: is a link to {os.readlink(file)}, which is not there")


def check_tokenizer(path: Path, flag: str) -> None:
    if not path.is_dir():
        raise ConfigError(f"{flag} {path}: no such directory; looked for {TOKENIZER_FILES[0]}")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"{flag} {path}: no tokenizer here; looked for {' and '.join(TOKENIZER_FILES)}. "
            "If it is elsewhere, say so with --tokenizer DIR"
        )


def check_vocabulary(tokenizer: Path, embedded: Any) -> None:
    """Raise ConfigError if the tokenizer has ordinary tokens that the model does not embed.

    A first look at the commonest file format; tokenizer_proc compares every kind once it is loaded.
    """
    file = tokenizer / "tokenizer.json"
    if not file.is_file() or not isinstance(embedded, int):
        return
    model = read_object(file).get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        last = max((i for i in vocab.values() if isinstance(i, int)), default=-1)
    elif isinstance(vocab, list):
        last = len(vocab) - 1
    else:
        return
    if last >= embedded:
        raise ConfigError(
            f"{file}: has token ids up to {last}, but the model embeds only {embedded} (vocab_size in "
            "config.json); use the tokenizer that belongs to the model"
        )


def read_object(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError naming the file."""
    if not file.is_file():
        raise ConfigError(f"--model {file.parent}: no {file.name} in this directory")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"{file}: cannot be read as JSON: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must hold a JSON object")
    return value


def model_digest(model_dir: str) -> str:
    """Tells models apart without reading gigabytes: by config.json, and the ends of all weights."""
    folder = Path(model_dir)
    config = folder / "config.json"
    digest = blake2b(config.read_bytes() if config.is_file() else b"", digest_size=8)
    for file in weight_files(folder):
        with file.open("rb") as weights:
            size = weights.seek(0, os.SEEK_END)
            weights.seek(max(0, size - DIGEST_BYTES))
            digest.update(f"{file.name} {size} ".encode() + weights.read())
    return digest.hexdigest()


def sampling_defaults(model_dir: str) -> SamplingDefaults:
    """What generation_config.json says of requests that do not say; values out of range
    are left out. `do_sample: false` is not read as greedy: servers sample at 1 by default."""
    file = Path(model_dir) / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    config = read_object(file)

    values = {name: config[name] for name in SAMPLING_NAMES if is_usable(name, config.get(name))}
    max_new_tokens = config.get("max_new_tokens")
    return SamplingDefaults(
        values, max_new_tokens if isinstance(max_new_tokens, int) and max_new_tokens > 0 else None
    )


def is_usable(name: str, value: Any) -> bool:
    """May `value` be the default of every request? Files are found with all kinds of values."""
    if value is None:
        return False
    try:
        SamplingParams(**{name: value})
    except ParamError as error:
        logger.warning("generation_config.json: %s; left out", error)
        return False
    return True
