"""POST /v1/completions: the body."""

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.api.messages import Prompt, TextPrompt, TokenPrompt
from engine.api.sampling import INTEGERS, SamplingParams
from server.errors import ApiError, invalid_type, invalid_value, unsupported
from server.schema.fields import (
    BEYOND_64_BITS,
    INT32_MAX,
    INT64_MAX,
    Table,
    any_of,
    boolean,
    decode,
    integer,
    integer_between,
    is_beyond_64_bits,
    refused_fields,
    string,
    takes,
)
from server.schema.sampling import (
    COMMON_FIELDS,
    CommonRequest,
    SamplingDefaults,
    TokenDetails,
    build_params,
    common_request,
    token_details,
)

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = INTEGERS["n"][1]
MAX_LOGPROBS = INTEGERS["logprobs"][1]
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}

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
        if is_beyond_64_bits(token_id):
            message = f"{where} is no token id: {BEYOND_64_BITS}"
            raise ApiError(400, "invalid_token_id", message, where)
        if isinstance(token_id, float) and token_id.is_integer():
            value[i] = token_id = int(token_id)
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise invalid_type(where, "a token id", token_id)
        if not 0 <= token_id <= INT32_MAX:
            raise ApiError(
                400, "invalid_token_id", f"{where} is {token_id}, which is no token id", where
            )
    return array("i", value)


SOME = {"minItems": 1, "maxItems": MAX_PROMPTS}


@takes(
    any_of(
        string.schema,
        {"type": "array", "items": string.schema, **SOME},
        {**TOKEN_IDS, "minItems": 1},
        {"type": "array", "items": {**TOKEN_IDS, "minItems": 1}, **SOME},
    )
)
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


@takes({"type": "integer", "minimum": 0, "maximum": INT64_MAX})
def max_tokens(value: Any, path: str) -> int:
    """0 is for `echo` alone, as `parse_completion` checks."""
    result = integer(value, path)
    if result < 0:
        raise too_few_tokens(result)
    return result


def too_few_tokens(got: int) -> ApiError:
    message = f"max_tokens must be at least 1, or with echo 0 to get the prompt alone, got {got}"
    return invalid_value("max_tokens", message)


@takes(any_of(boolean.schema, {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}))
def logprobs(value: Any, path: str) -> int | None:
    if isinstance(value, bool):
        return 1 if value else None
    result = integer(value, path)
    if not 0 <= result <= MAX_LOGPROBS:
        raise invalid_value(path, f"{path} must be between 0 and {MAX_LOGPROBS}, got {result}")
    return result


COMPLETION_FIELDS: Table = {
    **COMMON_FIELDS,
    "max_tokens": max_tokens.or_else(DEFAULT_MAX_TOKENS),
    "prompt": prompts.required(),
    "echo": boolean.or_else(False),
    "logprobs": logprobs,
    "add_special_tokens": boolean.or_else(True),
    "suffix": string.or_else(""),
    "best_of": integer_between(1, MAX_CHOICES),
    **refused_fields(("prompt_embeds",)),
}


@dataclass(frozen=True)
class CompletionRequest:
    common: CommonRequest
    prompts: list[Prompt]
    is_batch: bool  # written as a list of prompts, even if of one
    n: int  # choices to return of each prompt
    echo: bool


def parse_completion(body: dict[str, Any], defaults: SamplingDefaults) -> CompletionRequest:
    """Raises ApiError 400 for the first mistake in the body."""
    values, ignored = decode(body, COMPLETION_FIELDS)
    details = token_details(values, values.get("logprobs"))
    echo = values["echo"]
    params = build_params(
        values,
        defaults,
        logprobs=details.num_top,
        prompt_logprobs=wanted_of_prompt(details, echo),
    )
    if params.max_tokens == 0 and not echo:
        raise too_few_tokens(0)
    suffix = values["suffix"]
    if suffix:
        check_suffix(values)
    n = params.n
    params = with_candidates(params, values)
    is_default = body.get("max_tokens") is None
    return CompletionRequest(
        common=common_request(values, ignored, params, details, is_default),
        prompts=[
            as_prompt(entry, values["add_special_tokens"], suffix) for entry in values["prompt"]
        ],
        is_batch=isinstance(body["prompt"], list) and isinstance(body["prompt"][0], str | list),
        n=n,
        echo=echo,
    )


def as_prompt(entry: str | TokenIds, add_special_tokens: bool, suffix: str = "") -> Prompt:
    if isinstance(entry, str):
        return TextPrompt(text=entry, add_special_tokens=add_special_tokens, suffix=suffix)
    return TokenPrompt(token_ids=entry.tobytes())


def check_suffix(values: dict[str, Any]) -> None:
    """Raises ApiError 400 for what cannot be asked for beside a suffix.

    Whether the model can fill in the middle is for tokenizer_proc to say, which knows its vocabulary.
    """
    if not isinstance(values["prompt"][0], str):
        raise unsupported(
            "suffix",
            "suffix needs a prompt of text; in token ids write the suffix where it belongs",
        )
    if values["echo"]:
        raise unsupported(
            "suffix",
            "suffix and echo cannot be combined, as the completion is between the two texts",
        )
    if values.get("truncate_prompt_tokens") is not None:
        raise unsupported(
            "suffix",
            "suffix and truncate_prompt_tokens cannot be combined, as the cut would take the mark at "
            "the beginning; shorten prompt and suffix",
        )


def wanted_of_prompt(details: TokenDetails, echo: bool) -> int | None:
    """How many of the best the engine reports for each prompt token; None: it need not look."""
    asked = [details.num_prompt_top, details.num_top if echo else None]
    return max((k for k in asked if k is not None), default=None)


def with_candidates(params: SamplingParams, values: dict[str, Any]) -> SamplingParams:
    """`best_of` candidates instead of n, with the log-probabilities by which to choose.

    Candidates that cannot differ are not made. Raises ApiError 400.
    """
    best_of, n = values.get("best_of"), params.n
    if best_of is None or best_of == n:
        return params
    if best_of < n:
        raise invalid_value("best_of", f"best_of must be at least n = {n}, got {best_of}")
    if values["stream"]:
        raise invalid_value(
            "best_of",
            f"best_of above n = {n} cannot be streamed, as the best are known at the end; leave "
            "out stream or best_of",
        )
    if params.is_deterministic:
        return params
    logprobs = 0 if params.logprobs is None else params.logprobs
    return msgspec.structs.replace(params, n=best_of, logprobs=logprobs)
