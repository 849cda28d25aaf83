"""Sampling fields, shared by chat and completions: names, types and ranges -> SamplingParams."""

from dataclasses import dataclass, field
from typing import Any

from engine.api.sampling import (
    BIAS,
    INTEGERS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP,
    MAX_STOP_IDS,
    MAX_TEXT,
    REALS,
    ParamError,
    SamplingParams,
)
from server.errors import ApiError, invalid_type, invalid_value
from server.schema.fields import (
    INT32_MAX,
    Field,
    Schema,
    Table,
    any_of,
    boolean,
    decode,
    integer,
    integer_between,
    json_object,
    list_of,
    no_effect,
    number,
    only,
    schema_of,
    string,
    string_of_length,
    string_or_strings,
    takes,
)
from server.schema.limits import timeout
from server.schema.structured import STRUCTURED_FIELDS, structured_output


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults from the model's generation_config.json; a request's own values win."""

    values: dict[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None  # for requests that name no max_tokens

    def describe(self) -> str:
        """For the log: why a model answers as it does without parameters."""
        values = dict(self.values)
        if self.max_new_tokens is not None:
            values["max_tokens"] = self.max_new_tokens
        if not values:
            return "generation_config.json sets none"
        pairs = ", ".join(f"{name} {value}" for name, value in values.items())
        return f"{pairs} (generation_config.json; --generation-config none for neutral ones)"


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclass(frozen=True)
class TokenDetails:
    """What a response tells of tokens beside their text."""

    num_top: int | None = None  # log-probabilities of the generated and the k best; None: off
    num_prompt_top: int | None = None  # the same of the prompt's
    token_ids: bool = False
    names_are_ids: bool = False  # tokens are written as `token_id:N`


def sampling_field(name: str, kind: Field, **bounds: Any) -> Field:
    """A field of SamplingParams: its type by `kind`, its range by SamplingParams itself.

    `bounds` describe that range as members of the JSON schema; those of a plain number are known.
    """
    if name in REALS or name in INTEGERS:
        low, high = REALS[name] if name in REALS else INTEGERS[name]
        bounds = {"minimum": low, "maximum": high} | bounds

    @takes({key: value for key, value in (kind.schema | bounds).items() if value is not None})
    def validate(value: Any, path: str) -> Any:
        result = kind(value, path)
        try:
            SamplingParams(**{name: result})
        except ParamError as error:
            raise invalid_value(path, str(error).replace(name, path)) from None
        return result

    return validate


@takes(
    {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": BIAS[0], "maximum": BIAS[1]},
    }
)
def logit_bias(value: Any, path: str) -> dict[int, float]:
    """{"decimal token id": bias}; every error names the field, whose keys are no paths."""
    result = {}
    for key, bias in json_object(value, path).items():
        if not (key.isascii() and key.isdigit()) or len(key) > 10:
            raise invalid_value(
                path, f"{path} keys must be token ids such as '42', got {key!r:.40}"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise invalid_type(path, f"numbers only (token {key})", bias)
        result[int(key)] = float(bias)
    return result


@takes(integer.schema)
def seed(value: Any, path: str) -> int | None:
    result = integer(value, path)
    return None if result == -1 else result


STREAM_OPTIONS: Table = {
    "include_usage": boolean.or_else(False),
    "continuous_usage_stats": boolean.or_else(False),
    "include_obfuscation": no_effect,
}


@takes(schema_of(STREAM_OPTIONS))
def stream_options(value: Any, path: str) -> StreamOptions:
    values, _ = decode(json_object(value, path), STREAM_OPTIONS, prefix=f"{path}.")
    return StreamOptions(values["include_usage"], values["continuous_usage_stats"])


def texts(most: int, **more: Any) -> Schema:
    """A list of up to `most` texts that are neither empty nor long."""
    text = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
    return {"type": "array", "items": text, "maxItems": most, **more}


STOP = any_of({"type": "string", "minLength": 1, "maxLength": MAX_TEXT}, texts(MAX_STOP))

# Their defaults are those of SamplingParams, or of the model.
SAMPLING_FIELDS: Table = {
    "n": sampling_field("n", integer),
    "temperature": sampling_field("temperature", number),
    "top_p": sampling_field("top_p", number),
    "top_k": sampling_field("top_k", integer),
    "min_p": sampling_field("min_p", number),
    "presence_penalty": sampling_field("presence_penalty", number),
    "frequency_penalty": sampling_field("frequency_penalty", number),
    "repetition_penalty": sampling_field(
        "repetition_penalty", number, minimum=None, exclusiveMinimum=0
    ),
    "seed": seed,
    "max_tokens": integer,  # each endpoint has bounds of its own
    "min_tokens": integer_between(0, INT32_MAX),  # and at most max_tokens
    "stop": sampling_field("stop", string_or_strings, **STOP),
    "stop_token_ids": sampling_field(
        "stop_token_ids", list_of(integer_between(0, INT32_MAX)), maxItems=MAX_STOP_IDS
    ),
    "ignore_eos": boolean,
    "include_stop_str_in_output": boolean,
    "logit_bias": sampling_field("logit_bias", logit_bias, maxProperties=MAX_BIASES),
    "skip_special_tokens": boolean,
    "allowed_token_ids": sampling_field(
        "allowed_token_ids", list_of(integer_between(0, INT32_MAX)), minItems=1
    ),
    "bad_words": sampling_field("bad_words", list_of(string), **texts(MAX_BAD_WORDS)),
    "prompt_logprobs": sampling_field("prompt_logprobs", integer),
    "truncate_prompt_tokens": sampling_field(
        "truncate_prompt_tokens", integer, **{"not": {"const": 0}}
    ),
}

NO_EFFECT_FIELDS = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "verbosity",
    "prediction",
    "mm_processor_kwargs",
]

COMMON_FIELDS: Table = {
    **SAMPLING_FIELDS,
    **STRUCTURED_FIELDS,
    "model": string,
    "stream": boolean.or_else(False),
    "stream_options": stream_options,
    "timeout": timeout,
    "priority": integer_between(-INT32_MAX - 1, INT32_MAX).or_else(0),
    "cache_salt": string_of_length(1, 256),
    "request_id": string_of_length(0, 128),
    "return_token_ids": boolean.or_else(False),
    "return_tokens_as_token_ids": boolean.or_else(False),
    "spaces_between_special_tokens": boolean,  # decoders of fast tokenizers put none
    **dict.fromkeys(NO_EFFECT_FIELDS, no_effect),
    # Features that other servers have and this one does not (yet): refused, never ignored.
    "use_beam_search": only(False),
    "early_stopping": only(False),
    "length_penalty": only(1, 1.0, because="it belongs to beam search"),
    "logits_processors": only([], because="code in a request is never run"),
}


def build_params(
    values: dict[str, Any], defaults: SamplingDefaults, **fixed: Any
) -> SamplingParams:
    """SamplingParams of a decoded body. Raises ApiError for what only shows in combination."""
    chosen = {name: values[name] for name in SAMPLING_FIELDS if values.get(name) is not None}
    chosen["structured"] = structured_output(values)
    try:
        return SamplingParams(**{**defaults.values, **chosen, **fixed})
    except ParamError as error:
        raise ApiError(400, "invalid_value", str(error), error.param) from None


def token_details(values: dict[str, Any], num_top: int | None) -> TokenDetails:
    """Raises ApiError for what a stream has no place for."""
    num_prompt_top = values.get("prompt_logprobs")
    if num_prompt_top is not None and values["stream"]:
        raise invalid_value(
            "prompt_logprobs",
            "prompt_logprobs cannot be streamed; leave out stream, or for completions use echo "
            "with logprobs",
        )
    return TokenDetails(
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        token_ids=values["return_token_ids"],
        names_are_ids=values["return_tokens_as_token_ids"],
    )


@dataclass(frozen=True)
class CommonRequest:
    """What a body of either endpoint asks for, but for its prompt."""

    model: str | None
    params: SamplingParams  # n counts all candidates of best_of
    clamp_max_tokens: bool  # it is a default
    details: TokenDetails
    stream: bool
    stream_options: StreamOptions
    priority: int
    cache_salt: str
    request_id: str
    ignored: list[str]


def common_request(
    values: dict[str, Any],
    ignored: list[str],
    params: SamplingParams,
    details: TokenDetails,
    clamp_max_tokens: bool,
) -> CommonRequest:
    """From decoded COMMON_FIELDS and what was made of them. Raises ApiError."""
    return CommonRequest(
        model=values.get("model"),
        params=params,
        clamp_max_tokens=clamp_max_tokens,
        details=details,
        stream=values["stream"],
        stream_options=check_stream_options(values),
        priority=values["priority"],
        cache_salt=values.get("cache_salt", ""),
        request_id=values.get("request_id", ""),
        ignored=ignored,
    )


def check_stream_options(values: dict[str, Any]) -> StreamOptions:
    options: StreamOptions | None = values.get("stream_options")
    if options is None:
        return StreamOptions()
    if not values["stream"]:
        raise invalid_value("stream_options", "stream_options needs stream: true")
    return options
