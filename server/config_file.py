"""--config FILE: flags in YAML or TOML, as what would be written on the command line.

Values are the text of the file wherever a flag takes text: YAML by itself would make 42798 of the key
0123456, 3.1 of the name 3.10 and true of the word on.
"""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError
from server.config import flag_name
from server.vllm_flags import FOREIGN_FLAGS, SYNONYMS

ON_WORDS = {"true": True, "1": True, "yes": True, "on": True}
OFF_WORDS = {"false": False, "0": False, "no": False, "off": False}
TRUE_WORDS = ON_WORDS | OFF_WORDS

Actions = Mapping[str, argparse.Action]  # what the parser knows, by flag


def read_config_file(file: Path) -> dict[str, Any]:
    """Flags and values; nothing in an empty file. Raises ConfigError, which does not name the file."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot be read: {reason}") from None
    try:
        is_toml = file.suffix == ".toml"
        values = tomllib.loads(text, parse_float=str) if is_toml else load_yaml(text)
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(str(error).splitlines()[0]) from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError("expected lines like `max-model-len: 8192`")
    return values


def load_yaml(text: str) -> Any:
    """Scalars without a tag are their text, or None. Raises ValueError, also for a key given twice."""
    import yaml  # type: ignore[import-untyped]  # only here: it costs 20 ms

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers = {
            first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith(":null")]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            is_mapping = isinstance(node, yaml.MappingNode)  # a tag may say so of anything
            names = [key.value for key, _ in node.value] if is_mapping else []
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{name} is given twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


def file_tokens(values: dict[str, Any], actions: Actions) -> list[str]:
    """Values of None, and empty lists, are left out. Raises ConfigError naming the line's key."""
    tokens: list[str] = []
    names: dict[str, str] = {}  # by flag
    for name, value in values.items():
        flag = flag_name(str(name))
        if flag in ("--config", "--help", "--version"):
            raise ConfigError(f"{name} belongs on the command line")
        if flag in names:
            raise ConfigError(f"{names[flag]} and {name} are the same flag: keep one of them")
        names[flag] = name
        if isinstance(value, dict):
            raise ConfigError(f"{name} must be a single value, not a section")
        if isinstance(value, list):
            if not takes_list(actions.get(flag)):
                raise ConfigError(f"{name} must be a single value, not a list")
            tokens += [f"{flag}={text_of(name, item, actions.get(flag))}" for item in value]
        elif value is not None:
            tokens += value_tokens(name, flag, value, actions.get(flag))
    return tokens


def takes_list(action: argparse.Action | None) -> bool:
    return action is None or isinstance(action, argparse._AppendAction) or action.nargs == "+"


def value_tokens(name: str, flag: str, value: Any, action: argparse.Action | None) -> list[str]:
    truth = TRUE_WORDS.get(str(value).lower())
    if stands_alone(flag, action):
        if truth is None:
            raise ConfigError(f"{name} is true or false, got {value!r:.80}")
        return [flag] if truth else []
    if action is not None and "off" in (action.choices or ()) and truth is not None:
        return [f"{flag}={'on' if truth else 'off'}"]
    if isinstance(action, argparse.BooleanOptionalAction):
        return [f"{flag}={str(value).lower()}"]
    return [f"{flag}={text_of(name, value, action)}"]


def stands_alone(flag: str, action: argparse.Action | None) -> bool:
    """On the command line it has no value."""
    if action is not None:
        return action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
    return flag in SYNONYMS or (flag in FOREIGN_FLAGS and not FOREIGN_FLAGS[flag].takes_value)


def text_of(name: str, value: Any, action: argparse.Action | None) -> str:
    """A single value as its flag reads it."""
    if isinstance(value, str):
        return value
    takes_text = action is not None and action.type is str and action.choices is None
    if takes_text or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be text, got {value!r:.80}: put it in quotes")
    return str(value)
