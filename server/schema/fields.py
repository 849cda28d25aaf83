"""Small validators: each takes a JSON value and its path, and returns the value to use.

A request is described by a table from field name to validator. `decode` walks the body in document
order, so that the first error reported is the first one in the text.
"""

import logging
from collections.abc import Callable, Collection
from typing import Any

from server.errors import invalid_type, invalid_value, unsupported

logger = logging.getLogger(__name__)

Validator = Callable[[Any, str], Any]
Table = dict[str, Validator]

INT64_MAX = 2**63 - 1
MAX_REPORTED_IGNORED = 20  # names of unknown fields in the X-Ignored-Fields header


class IgnoredFields:
    """Remembers unknown field names so that each is logged once."""

    MAX_REMEMBERED = 1000  # names come from clients

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def report(self, names: list[str]) -> None:
        for name in names:
            if name not in self._seen and len(self._seen) < self.MAX_REMEMBERED:
                self._seen.add(name)
                logger.warning("ignoring unknown request field %r (said once)", name[:80])


def decode(
    body: dict[str, Any], table: Table, prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """Validated values of the known fields, and the names of unknown ones. null means absent.

    `prefix` is put before the names in error paths, for objects inside the body.
    """
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        validator = table.get(name)
        if validator is None:
            unknown.append(name)
        elif value is not None:
            values[name] = validator(value, prefix + name)
    return values, unknown


def ignored_header(names: list[str]) -> dict[str, str]:
    """The X-Ignored-Fields header; only names that can stand in a header are listed."""
    shown = [n for n in names if n and n.isascii() and n.isprintable() and "," not in n]
    if not shown:
        return {}
    return {"X-Ignored-Fields": ",".join(n[:80] for n in shown[:MAX_REPORTED_IGNORED])}


def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(path, "true or false", value)
    return value


def number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(path, "a number", value)
    return value


def integer(value: Any, path: str) -> int:
    """JSON integers, and floats without a fraction."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(path, "an integer", value)
    if not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise invalid_value(path, f"{path} must fit into 64 bits, got {value}")
    return value


def integer_between(low: int, high: int) -> Validator:
    def validate(value: Any, path: str) -> int:
        result = integer(value, path)
        if not low <= result <= high:
            raise invalid_value(path, f"{path} must be between {low} and {high}, got {result}")
        return result

    return validate


def string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(path, "a string", value)
    return value


def string_of_length(low: int, high: int) -> Validator:
    def validate(value: Any, path: str) -> str:
        text = string(value, path)
        if not low <= len(text) <= high:
            raise invalid_value(
                path, f"{path} must have {low} to {high} characters, got {len(text)}"
            )
        return text

    return validate


def json_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    return value


def list_of(item: Validator) -> Validator:
    def validate(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise invalid_type(path, "a list", value)
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(value)]

    return validate


def string_or_strings(value: Any, path: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of strings", value)
    return [string(entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def no_effect(value: Any, path: str) -> None:
    """A field that clients send and that changes nothing here."""


def only(*accepted: Any, because: str = "") -> Validator:
    """A field of a feature that this server does not have: only its neutral values pass."""

    def validate(value: Any, path: str) -> None:
        # Types must match too: Python says that 1 == True.
        if not any(type(value) is type(a) and value == a for a in accepted):
            reason = f": {because}" if because else ""
            raise unsupported(path, f"{path} is not supported by this server{reason}")

    return validate


def refused_fields(names: Collection[str], *accepted: Any) -> Table:
    return {name: only(*accepted) for name in names}
