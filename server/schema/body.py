"""Bytes of a request body -> a JSON object, with the errors that clients can act on."""

import json
from typing import Any

import orjson

from server.errors import ApiError, describe

MAX_DEPTH = 128
# In texts as well, which to tell apart would take as long. 32 MiB of empty lists held the event loop for 5 s.
MAX_BRACKETS = 500_000


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """Raises ApiError 400: empty_body, invalid_json or invalid_unicode."""
    if not body or body.isspace():
        raise ApiError(400, "empty_body", "The request body is empty; send a JSON object.")
    brackets = body.count(b"[") + body.count(b"{")
    if brackets > MAX_BRACKETS:
        raise ApiError(
            400,
            "invalid_json",
            f"The request body has {brackets} opening brackets, those in texts included; at most "
            f"{MAX_BRACKETS} are taken. Send less at a time.",
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


def find_surrogate(value: Any, path: str = "") -> str | None:
    """Path of the first string with a lone surrogate; "" is not a path, so None means none."""
    if isinstance(value, str):
        return path if any("\ud800" <= c <= "\udfff" for c in value) else None
    children: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key, child in value.items():
            if find_surrogate(key, "key") is not None:
                return path or "body"
            children.append((f"{path}.{key}" if path else key, child))
    elif isinstance(value, list):
        children = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    for child_path, child in children:
        found = find_surrogate(child, child_path)
        if found is not None:
            return found
    return None
