"""What the tokenizer process is told at its start, as a JSON file."""

from pathlib import Path

import msgspec


class TokenizerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokenizer_dir: str  # holds tokenizer.json, tokenizer_config.json and perhaps a chat template
    run_dir: str  # the server's private directory, where the sockets are
    epoch: int = 0  # which start of the engine this process belongs to
    chat_template: str = ""  # path of a Jinja file that replaces the tokenizer's own; "": keep it
    parent_pid: int = 0  # die with this process; 0: with none
    log_level: str = "info"
    seed: int = 0  # for requests that name no seed; 0: a fresh random one each


def read_config(path: str) -> TokenizerConfig:
    """Raises OSError, or msgspec.ValidationError (a ValueError) naming the field."""
    return msgspec.json.decode(Path(path).read_bytes(), type=TokenizerConfig)


def write_config(config: TokenizerConfig, path: str) -> None:
    Path(path).write_bytes(msgspec.json.encode(config))
