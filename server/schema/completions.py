"""POST /v1/completions: the body."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.api.messages import Prompt, TextPrompt, TokenPrompt
from engine.api.sampling import SamplingParams
from server.errors import ApiError, invalid_type, invalid_value, missing, unsupported
from server.schema.fields import Table, boolean, decode, integer, only, refused_fields
from server.schema.sampling import (
    COMMON_FIELDS,
    INT32_MAX,
    SamplingDefaults,
    StreamOptions,
    build_params,
    check_stream_options,
)

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 20

if TYPE_CHECKING:
    TokenIds = array[int]  # int32
else:
    TokenIds = array  # not subscriptable before Python 3.12


def token_ids(value: list[Any], path: str) -> TokenIds:
    """A list of token ids. Errors name the position."""
    for i, token_id in enumerate(value):
        if type(token_id) is int and 0 <= token_id <= INT32_MAX:
            continue
        where = f"{path}[{i}]"
        if isinstance(token_id, float) and token_id.is_integer():
            value[i] = token_id = int(token_id)
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise invalid_type(where, "a token id", token_id)
        if not 0 <= token_id <= INT32_MAX:
            raise ApiError(
                400, "invalid_token_id", f"{where} is {token_id}, which is no token id", where
            )
    return array("i", value)


def prompts(value: Any, path: str) -> list[str | TokenIds]:
    """Text, token ids, or a list of either."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise invalid_type(path, "a string, a list of strings or lists of token ids", value)
    if not value:
        raise ApiError(
            400, "empty_prompt", f"{path} is an empty list; give at least one prompt", path
        )
    first = value[0]
    if not isinstance(first, str | list):
        return [token_ids(value, path)]
    if len(value) > MAX_PROMPTS:
        raise invalid_value(path, f"{path} takes at most {MAX_PROMPTS} prompts, got {len(value)}")
    result: list[str | TokenIds] = []
    for i, entry in enumerate(value):
        where = f"{path}[{i}]"
        if type(entry) is not type(first):
            expected = "a string" if isinstance(first, str) else "a list of token ids"
            raise invalid_type(where, f"{expected}, like the first prompt", entry)
        if not entry and isinstance(entry, list):
            raise ApiError(400, "empty_prompt", f"{where} is empty; give at least one token", where)
        result.append(entry if isinstance(entry, str) else token_ids(entry, where))
    return result


def logprobs(value: Any, path: str) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    result = integer(value, path)
    if not 0 <= result <= MAX_LOGPROBS:
        raise invalid_value(path, f"{path} must be between 0 and {MAX_LOGPROBS}, got {result}")
    return result


COMPLETION_FIELDS: Table = {
    **COMMON_FIELDS,
    "prompt": prompts,
    "echo": boolean,
    "logprobs": logprobs,
    "add_special_tokens": boolean,
    "suffix": only("", because="this model has no fill-in-the-middle tokens"),
    "best_of": integer,
    **refused_fields(("prompt_embeds",)),
}


@dataclass(frozen=True)
class CompletionRequest:
    model: str | None
    prompts: list[Prompt]
    is_batch: bool  # written as a list of prompts, even if of one
    params: SamplingParams
    stream: bool
    stream_options: StreamOptions
    echo: bool
    priority: int
    cache_salt: str
    request_id: str
    ignored: list[str]


def parse_completion(body: dict[str, Any], defaults: SamplingDefaults) -> CompletionRequest:
    """Raises ApiError 400 for the first mistake in the body."""
    values, ignored = decode(body, COMPLETION_FIELDS)
    if "prompt" not in values:
        raise missing("prompt")
    wanted = values.get("logprobs")
    params = build_params(
        values,
        defaults,
        max_tokens=values.get("max_tokens", DEFAULT_MAX_TOKENS),
        logprobs=wanted,
    )
    echo = values.get("echo", False)
    if echo and wanted is not None:
        raise unsupported("logprobs", "logprobs together with echo is not supported by this server")
    check_best_of(values.get("best_of"), params.n)
    add_special_tokens = values.get("add_special_tokens", True)
    return CompletionRequest(
        model=values.get("model"),
        prompts=[as_prompt(entry, add_special_tokens) for entry in values["prompt"]],
        is_batch=isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str | list),
        params=params,
        stream=values.get("stream", False),
        stream_options=check_stream_options(values),
        echo=echo,
        priority=values.get("priority", 0),
        cache_salt=values.get("cache_salt", ""),
        request_id=values.get("request_id", ""),
        ignored=ignored,
    )


def as_prompt(entry: str | TokenIds, add_special_tokens: bool) -> Prompt:
    if isinstance(entry, str):
        return TextPrompt(text=entry, add_special_tokens=add_special_tokens)
    return TokenPrompt(token_ids=entry.tobytes())


def check_best_of(best_of: int | None, n: int) -> None:
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise invalid_value("best_of", f"best_of must be at least n = {n}, got {best_of}")
    raise unsupported("best_of", f"best_of above n is not supported by this server (n = {n})")
