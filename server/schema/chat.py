"""POST /v1/chat/completions: the body."""

from dataclasses import dataclass
from typing import Any

from engine.api.messages import ChatPrompt
from engine.api.sampling import SamplingParams
from server.errors import invalid_value, missing, unsupported
from server.schema.fields import (
    Table,
    boolean,
    decode,
    integer,
    integer_between,
    json_object,
    only,
    refused_fields,
    string,
)
from server.schema.messages import chat_messages
from server.schema.sampling import (
    COMMON_FIELDS,
    SamplingDefaults,
    StreamOptions,
    build_params,
    check_stream_options,
    sampling_field,
)

# Read by the template; /tokenize takes the same ones.
TEMPLATE_FIELDS: Table = {
    "messages": chat_messages,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean,
    "add_special_tokens": boolean,
    "chat_template_kwargs": json_object,
    "reasoning_effort": string,
    "chat_template": only(because="the server's own template is used"),
    "documents": only([]),
    **refused_fields(("tools", "functions", "function_call")),
}

CHAT_FIELDS: Table = {
    **COMMON_FIELDS,
    **TEMPLATE_FIELDS,
    "max_completion_tokens": sampling_field(integer, "max_tokens"),
    "logprobs": boolean,
    "top_logprobs": integer_between(0, 20),
    "echo": only(False),
    "tool_choice": only("none", because="there are no tools in this request"),
    "parallel_tool_calls": boolean,
    "modalities": only(["text"], because="this model writes text only"),
    **refused_fields(("audio", "web_search_options", "best_of", "suffix")),
}


@dataclass(frozen=True)
class ChatRequest:
    model: str | None
    prompt: ChatPrompt
    params: SamplingParams
    stream: bool
    stream_options: StreamOptions
    top_logprobs: int | None  # None: no log-probabilities
    priority: int
    cache_salt: str
    request_id: str
    ignored: list[str]


def parse_chat(body: dict[str, Any], defaults: SamplingDefaults) -> ChatRequest:
    """Raises ApiError 400 for the first mistake in the body."""
    values, ignored = decode(body, CHAT_FIELDS)
    prompt = build_chat_prompt(values)
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if max_tokens is None:
        max_tokens = defaults.max_new_tokens
    params = build_params(values, defaults, max_tokens=max_tokens, logprobs=wanted_logprobs(values))
    return ChatRequest(
        model=values.get("model"),
        prompt=prompt,
        params=params,
        stream=values.get("stream", False),
        stream_options=check_stream_options(values),
        top_logprobs=params.logprobs,
        priority=values.get("priority", 0),
        cache_salt=values.get("cache_salt", ""),
        request_id=values.get("request_id", ""),
        ignored=ignored,
    )


def build_chat_prompt(values: dict[str, Any]) -> ChatPrompt:
    """The prompt of decoded TEMPLATE_FIELDS."""
    messages = values.get("messages")
    if messages is None:
        raise missing("messages")
    continue_final = values.get("continue_final_message", False)
    add_generation = values.get("add_generation_prompt", not continue_final)
    if continue_final and add_generation:
        raise invalid_value(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other",
        )
    if continue_final and messages[-1]["role"] != "assistant":
        raise invalid_value(
            "continue_final_message",
            "continue_final_message needs an assistant message at the end of messages",
        )
    template_kwargs = dict(values.get("chat_template_kwargs", {}))
    if "reasoning_effort" in values:
        template_kwargs.setdefault("reasoning_effort", values["reasoning_effort"])
    for reserved in ("messages", "tools", "chat_template", "tokenize"):
        if reserved in template_kwargs:
            raise unsupported(
                f"chat_template_kwargs.{reserved}",
                f"chat_template_kwargs cannot set {reserved!r}",
            )
    return ChatPrompt(
        messages=messages,
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        add_special_tokens=values.get("add_special_tokens", False),
        chat_template_kwargs=template_kwargs,
    )


def wanted_logprobs(values: dict[str, Any]) -> int | None:
    top = values.get("top_logprobs")
    if values.get("logprobs"):
        return top or 0
    if top is not None:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true")
    return None
