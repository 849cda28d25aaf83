"""Bytes of a request body -> a JSON object, with the errors that clients can act on."""

import json
import re
from typing import Any

import orjson

from server.errors import ApiError, describe

MAX_DEPTH = 128
# Most of each, texts included, as to tell them apart would take as long. 32 MiB of empty lists held the event loop
# for 5 s, of numbers for 1.5.
MAX_BRACKETS = 500_000
MAX_COLONS = 500_000
MAX_COMMAS = 2_000_000
EXPLAINED_BYTES = 1 << 20  # of a body, up to which it is read again to say what is wrong
SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError 400: empty_body, invalid_json or invalid_unicode."""
    if not body or body.isspace():
        raise ApiError(400, "empty_body", "The request body is empty; send a JSON object.")
    brackets = body.count(b"[") + body.count(b"{")
    for what, number, most in (
        ("opening brackets", brackets, MAX_BRACKETS),
        ("colons", body.count(b":"), MAX_COLONS),
        ("commas", body.count(b","), MAX_COMMAS),
    ):
        if number > most:
            raise ApiError(
                400,
                "invalid_json",
                f"The request body has {number} {what}, those in texts included; at most {most} are "
                "taken. Send less at a time.",
            )
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise explain_failure(body, error) from None
    if not isinstance(value, dict):
        raise ApiError(
            400, "invalid_json", f"The request body must be a JSON object, got {describe(value)}."
        )
    # Brackets inside strings count here too, so this only decides whether to look closer.
    if brackets > MAX_DEPTH and is_deeper_than(value, MAX_DEPTH):
        raise too_deep()
    return value


def explain_failure(body: bytes | bytearray, error: orjson.JSONDecodeError) -> ApiError:
    """Find out what the fast parser refused: a lone surrogate is a different mistake from bad JSON."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as bad:
        message = f"The request body is not valid UTF-8 (byte {bad.start})."
        return ApiError(400, "invalid_json", message)
    if len(body) > EXPLAINED_BYTES:
        return ApiError(400, "invalid_json", f"The request body is not valid JSON: {error}")
    try:
        value = json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        return too_deep()
    except ValueError as bad:
        return ApiError(400, "invalid_json", f"The request body is not valid JSON: {bad}")
    if is_deeper_than(value, MAX_DEPTH):
        return too_deep()
    path = find_surrogate(value)
    if path is not None:
        path = path or "body"
        message = f"{path} contains a lone surrogate (half of a \\uD800-\\uDFFF pair)"
        return ApiError(400, "invalid_unicode", message, path)
    return ApiError(400, "invalid_json", f"The request body is not valid JSON: {error}")


def refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def too_deep() -> ApiError:
    return ApiError(
        400, "invalid_json", f"The request body is nested deeper than {MAX_DEPTH} levels."
    )


def is_deeper_than(value: Any, limit: int) -> bool:
    """Level by level rather than recursively, so that depth cannot exhaust the stack."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def find_surrogate(value: Any) -> str | None:
    """Path of the first text with a lone surrogate, of an object for its keys; None if there is none."""
    if isinstance(value, str):
        return "" if SURROGATE.search(value) else None
    if isinstance(value, dict):
        for key, child in value.items():
            if SURROGATE.search(key):
                return ""
            below = find_surrogate(child)
            if below is not None:
                return f"{key}.{below}" if below and below[0] != "[" else key + below
    elif isinstance(value, list):
        for i, child in enumerate(value):
            below = find_surrogate(child)
            if below is not None:
                return f"[{i}].{below}" if below and below[0] != "[" else f"[{i}]{below}"
    return None
