"""What the operator allows a request to ask for, beyond what the API itself does.

Bodies were decoded before, so their fields have the right types here; null means absent.
"""

import math
from collections.abc import Collection
from typing import Any

from server.config import ServerConfig
from server.errors import ApiError, invalid_value
from server.schema.fields import number, takes

# Fields whose greatest value (or length) an operator may lower: the flag, and its setting.
LIMITED = {
    "n": ("--max-n", "max_n"),
    "best_of": ("--max-n", "max_n"),
    "stop": ("--max-stop", "max_stop"),
    "logprobs": ("--max-logprobs", "max_logprobs"),
    "top_logprobs": ("--max-logprobs", "max_logprobs"),
    "prompt_logprobs": ("--max-logprobs", "max_logprobs"),
}


def check_limits(body: dict[str, Any], config: ServerConfig, ignored: Collection[str] = ()) -> None:
    """Raises ApiError 400 for the first field, in document order, that is above a limit.

    `ignored`: fields that this endpoint does not know, whose values nobody has looked at.
    """
    for name, value in body.items():
        if name not in LIMITED or name in ignored or value is None or isinstance(value, bool):
            continue
        flag, setting = LIMITED[name]
        most = getattr(config, setting)
        asked = size_of(value)
        if asked > most:
            raise invalid_value(
                name, f"{name} is limited to {most} by this server ({flag}), got {asked:g}"
            )


def size_of(value: Any) -> float:
    if isinstance(value, str):
        return 1
    return len(value) if isinstance(value, list) else value


@takes({"type": "number", "exclusiveMinimum": 0})
def timeout(value: Any, path: str) -> float:
    """The field `timeout`: seconds."""
    seconds = number(value, path)
    if not 0 < seconds < math.inf:
        raise invalid_value(path, f"{path} must be above 0 (seconds), got {seconds:.15g}")
    return seconds


def allowed_seconds(body: dict[str, Any], config: ServerConfig) -> float:
    """How long a request may take; 0: any time. Raises ApiError 400 above --request-timeout."""
    wanted = body.get("timeout")
    if wanted is None:
        return config.request_timeout
    if config.request_timeout and wanted > config.request_timeout:
        raise invalid_value(
            "timeout",
            f"timeout is limited to {config.request_timeout:.15g} s by this server "
            f"(--request-timeout), got {wanted:.15g}",
        )
    return float(wanted)


def refuse_unknown(names: list[str]) -> None:
    """Raises ApiError 400 if there are any: --strict-fields."""
    if names:
        shown = names[0][:80]
        raise ApiError(
            400,
            "unknown_field",
            f"{shown} is no field of this request, and the server refuses unknown ones "
            "(--strict-fields); check its spelling",
            shown,
        )
