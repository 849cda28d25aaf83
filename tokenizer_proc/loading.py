"""Loads a tokenizer directory; every failure says which path and which files were looked at."""

import logging
import os
from pathlib import Path
from typing import Any

from tokenizer_proc.errors import TokenizerLoadError

# The wording of transformers' own progress and advice is of no use in a server's log.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

logger = logging.getLogger(__name__)

# transformers ships no types that mypy could follow; the tokenizer is used through few methods.
Tokenizer = Any

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(tokenizer_dir: str, chat_template: str = "") -> Tokenizer:
    """The tokenizer in `tokenizer_dir`, with the chat template file `chat_template` if one is named.

    Runs no code from the directory and asks no network. Raises TokenizerLoadError.
    """
    directory = Path(tokenizer_dir)
    if not directory.is_dir():
        raise TokenizerLoadError(
            f"tokenizer {tokenizer_dir}: no such directory; --tokenizer (or --model) must name one "
            f"that holds tokenizer.json"
        )
    if not any((directory / name).is_file() for name in VOCABULARY_FILES):
        raise TokenizerLoadError(
            f"tokenizer {tokenizer_dir}: found none of {', '.join(VOCABULARY_FILES)}; copy them "
            f"from the original model or name their directory with --tokenizer"
        )
    template = read_template(chat_template) if chat_template else None

    from transformers import AutoTokenizer  # takes seconds, so after the cheap checks

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            tokenizer_dir, use_fast=True, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise TokenizerLoadError(
            f"tokenizer {tokenizer_dir}: cannot be loaded ({one_line(error)}); files there: "
            f"{present_files(directory)}"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerLoadError(
            f"tokenizer {tokenizer_dir}: {type(tokenizer).__name__} has no tokenizer.json form, "
            f"which this server needs; files there: {present_files(directory)}"
        )
    backend.no_truncation()  # some files carry a training-time limit, which would cut prompts
    backend.no_padding()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerLoadError(
            f"--chat-template {path}: cannot be read ({one_line(error)})"
        ) from error


def check_fits_model(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise TokenizerLoadError if ordinary tokens lack an embedding row: the wrong tokenizer.

    Added tokens may lie beyond the embedding, as the image placeholder of the text-only Gemma 3
    does. Nothing but a prompt can bring those, and such a prompt is refused.
    """
    num_ordinary = vocabulary_size(tokenizer, with_added_tokens=False)
    num_ids = vocabulary_size(tokenizer)
    if num_ordinary > vocab_size:
        raise TokenizerLoadError(
            f"the tokenizer has {num_ordinary} token ids but the model embeds only {vocab_size}: "
            f"ids {vocab_size} to {num_ordinary - 1} would read beyond the embedding; use the "
            f"tokenizer that belongs to the model"
        )
    if num_ids > vocab_size:
        logger.warning(
            "added tokens %d to %d of the tokenizer have no embedding in the model (%d rows); "
            "prompts that hold them are refused",
            vocab_size,
            num_ids - 1,
            vocab_size,
        )


def vocabulary_size(tokenizer: Tokenizer, with_added_tokens: bool = True) -> int:
    """Largest id plus one (ids may have holes)."""
    vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=with_added_tokens)
    return 1 + max(vocabulary.values(), default=-1)


def present_files(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if "token" in path.name)
    return ", ".join(names) or "no tokenizer files"


def one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
