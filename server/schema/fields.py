"""Small validators: each takes a JSON value and its path, and returns the value to use.

A request is described by a table from field name to `Field`: a validator, the JSON schema of what it
takes, and what is used when the field is absent. `decode` walks the body in document order, so that the
first error reported is the first one in the text. /openapi.json is made of the same tables.
"""

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from server.errors import invalid_type, invalid_value, missing, unsupported

logger = logging.getLogger(__name__)

Validator = Callable[[Any, str], Any]
Schema = dict[str, Any]  # JSON schema, draft 2020-12
INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
BEYOND_64_BITS = "the number sent exceeds 64 bits"
MAX_REPORTED_IGNORED = 20  # names of unknown fields in the X-Ignored-Fields header


@dataclass(frozen=True)
class Field:
    """A validator, and the JSON schema that takes the same values as it does."""

    check: Validator
    schema: Schema
    is_required: bool = False
    default: Any = None  # what `decode` puts where the field is absent; None: nothing

    def __call__(self, value: Any, path: str) -> Any:
        return self.check(value, path)

    def required(self) -> "Field":
        return replace(self, is_required=True)

    def or_else(self, default: Any) -> "Field":
        return replace(self, default=default)


Table = dict[str, Field]


def takes(schema: Schema) -> Callable[[Validator], Field]:
    """Decorator: makes a Field of a validator."""
    return lambda check: Field(check, schema)


def any_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def object_with(
    required: dict[str, Schema], optional: dict[str, Schema] | None = None, **more: Any
) -> Schema:
    """Schema of an object that may have other members, too. Of the named ones null is an absent one."""
    properties = {name: nullable(s) for name, s in (optional or {}).items()} | required
    return {"type": "object", "properties": properties, "required": list(required), **more}


def nullable(schema: Schema) -> Schema:
    """The same with null allowed, which means: as if the field were absent."""
    kind = schema.get("type")
    if kind == "null" or not schema:
        return schema
    if schema.keys() == {"anyOf"}:
        return any_of(*schema["anyOf"], {"type": "null"})
    if isinstance(kind, str) and not schema.keys() & {"enum", "const", "anyOf", "oneOf"}:
        return {**schema, "type": [kind, "null"]}
    return any_of(schema, {"type": "null"})


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
    """Validated values of the known fields, defaults of absent ones, and the names of unknown fields.

    null means absent. `prefix` is put before the names in error paths, for objects inside the body.
    Raises ApiError 400 for the first field that is wrong, then for one that is missing.
    """
    values = {name: field.default for name, field in table.items() if field.default is not None}
    unknown: list[str] = []
    for name, value in body.items():
        validator = table.get(name)
        if validator is None:
            unknown.append(name)
        elif value is not None:
            values[name] = validator(value, prefix + name)
    for name, field in table.items():
        if field.is_required and name not in values:
            raise missing(prefix + name)
    return values, unknown


def schema_of(table: Table, **more: Any) -> Schema:
    """The JSON schema of an object with these fields, and perhaps others."""
    properties = {}
    for name, field in table.items():
        schema = field.schema if field.is_required else nullable(field.schema)
        given = {} if field.default is None else {"default": field.default}
        properties[name] = schema | given
    needed = [name for name, field in table.items() if field.is_required]
    return {
        "type": "object",
        "properties": properties,
        **({"required": needed} if needed else {}),
        **more,
    }


def ignored_header(names: list[str]) -> dict[str, str]:
    """The X-Ignored-Fields header; only names that can stand in a header are listed."""
    shown = [n for n in names if n and n.isascii() and n.isprintable() and "," not in n]
    if not shown:
        return {}
    return {"X-Ignored-Fields": ",".join(n[:80] for n in shown[:MAX_REPORTED_IGNORED])}


@takes({"type": "boolean"})
def boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        raise invalid_type(path, "true or false", value)
    return value


@takes({"type": "number"})
def number(value: Any, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid_type(path, "a number", value)
    return value


@takes({"type": "integer", "minimum": -INT64_MAX - 1, "maximum": INT64_MAX})
def integer(value: Any, path: str) -> int:
    """JSON integers, and floats without a fraction.

    The parser makes floats of integers beyond 64 bits, so these are not quoted: they would be rounded.
    """
    if isinstance(value, float) and value.is_integer():
        if is_beyond_64_bits(value):
            raise invalid_value(path, f"{path} must fit into 64 bits, and {BEYOND_64_BITS}")
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid_type(path, "an integer", value)
    if not -INT64_MAX - 1 <= value <= INT64_MAX:
        raise invalid_value(path, f"{path} must fit into 64 bits, got {value}")
    return value


def is_beyond_64_bits(value: Any) -> bool:
    """Of a JSON number as it was parsed: a float, if it was an integer of more than 64 bits."""
    return isinstance(value, float) and not -INT64_MAX - 1 < value < INT64_MAX


def integer_between(low: int, high: int) -> Field:
    bounds = f"at least {low}" if high == INT64_MAX else f"between {low} and {high}"

    @takes({"type": "integer", "minimum": low, "maximum": high})
    def validate(value: Any, path: str) -> int:
        result = integer(value, path)
        if not low <= result <= high:
            raise invalid_value(path, f"{path} must be {bounds}, got {result}")
        return result

    return validate


@takes({"type": "string"})
def string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise invalid_type(path, "a string", value)
    return value


def string_of_length(low: int, high: int) -> Field:
    @takes({"type": "string", "minLength": low, "maxLength": high})
    def validate(value: Any, path: str) -> str:
        text = string(value, path)
        if not low <= len(text) <= high:
            raise invalid_value(
                path, f"{path} must have {low} to {high} characters, got {len(text)}"
            )
        return text

    return validate


@takes({"type": "object"})
def json_object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid_type(path, "an object", value)
    return value


def list_of(item: Field) -> Field:
    @takes({"type": "array", "items": item.schema})
    def validate(value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise invalid_type(path, "a list", value)
        return [item(entry, f"{path}[{i}]") for i, entry in enumerate(value)]

    return validate


@takes(any_of({"type": "string"}, {"type": "array", "items": {"type": "string"}}))
def string_or_strings(value: Any, path: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of strings", value)
    return [string(entry, f"{path}[{i}]") for i, entry in enumerate(value)]


@takes({})
def no_effect(value: Any, path: str) -> None:
    """A field that clients send and that changes nothing here."""


def only(*accepted: Any, because: str = "") -> Field:
    """A field of a feature that this server does not have: only its neutral values pass."""

    @takes({"enum": list(accepted)} if accepted else {"type": "null"})
    def validate(value: Any, path: str) -> None:
        # Types must match too: Python says that 1 == True.
        if not any(type(value) is type(a) and value == a for a in accepted):
            reason = f": {because}" if because else ""
            raise unsupported(path, f"{path} is not supported by this server{reason}")

    return validate


def refused_fields(names: Collection[str], *accepted: Any) -> Table:
    return {name: only(*accepted) for name in names}
