"""Prompts from a file: each line is checked before anything is sent."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.loadtest.foreign import decode

BOM = b"\xef\xbb\xbf"
MOST_ID = 2**31 - 1  # of a token: servers keep ids in 32 bits
MOST_TOKENS = 10_000_000  # of a prompt or an answer: beyond any model


@dataclass(frozen=True)
class Row:
    """One prompt of a dataset: exactly one of `prompt` and `messages` is set."""

    prompt: str | list[int] | None
    messages: list[dict[str, Any]] | None
    max_tokens: int | None


def read_dataset(path: Path) -> list[Row]:
    """JSON lines with `prompt` (text or token ids) or `messages`, and maybe `max_tokens`.

    Raises ValueError that names the line, OSError if the file cannot be read.
    """
    rows = []
    # not `splitlines`: JSON may hold U+2028 and others of its line ends as they are
    for number, line in enumerate(path.read_bytes().removeprefix(BOM).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(read_row(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} holds no prompts: give one JSON object a line")
    return rows


def read_row(line: bytes) -> Row:
    """Raises ValueError with advice."""
    try:
        item = decode(line.decode("utf-8"), strict=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}): save the file as UTF-8") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(item, dict) or ("prompt" in item) == ("messages" in item):
        raise ValueError("give an object with either `prompt` or `messages`")
    if "prompt" in item:
        check(item, "prompt", is_prompt, "text or a list of token ids")
    else:
        check(item, "messages", is_messages, "a list of objects, each with a `role`")
    if item.get("max_tokens") is not None:
        check(item, "max_tokens", is_length, f"a whole number from 1 to {MOST_TOKENS:,}")
    return Row(item.get("prompt"), item.get("messages"), item.get("max_tokens"))


def check(item: dict[str, Any], name: str, is_right: Callable[[Any], bool], wanted: str) -> None:
    if not is_right(item[name]):
        shown = repr(item[name])
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ValueError(f"`{name}` is {shown}: give {wanted}")


def is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    # type(): True is an int, too
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one <= MOST_ID for one in value)
    )


def is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in value)
    )


def is_length(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST_TOKENS
