"""POST /v1/chat/completions: the body."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine.api.messages import ChatPrompt
from engine.api.sampling import INTEGERS, StructuredOutput
from server.answer.call_format import JSON
from server.answer.parser import AnswerFormat
from server.errors import invalid_value, unsupported
from server.schema.chat_rules import ChatRules
from server.schema.fields import (
    INT64_MAX,
    Table,
    boolean,
    decode,
    integer_between,
    json_object,
    list_of,
    only,
    refused_fields,
    string,
    takes,
)
from server.schema.messages import chat_messages
from server.schema.sampling import (
    COMMON_FIELDS,
    CommonRequest,
    SamplingDefaults,
    build_params,
    common_request,
    token_details,
)
from server.schema.tool_text import as_text, with_tools_as_text
from server.schema.tools import (
    ForcedCall,
    Tools,
    call_format,
    chosen_tools,
    function_call,
    functions,
    no_parser,
    tool_choice,
    tools,
)

RESERVED = ("messages", "tools", "chat_template", "tokenize")  # set by the server


@takes(json_object.schema | {"propertyNames": {"not": {"enum": list(RESERVED)}}})
def template_kwargs(value: Any, path: str) -> dict[str, Any]:
    values: dict[str, Any] = json_object(value, path)
    for name in RESERVED:
        if name in values:
            raise unsupported(f"{path}.{name}", f"{path} cannot set {name!r}")
    return values


# Read by the template; /tokenize takes the same ones.
TEMPLATE_FIELDS: Table = {
    "messages": chat_messages,
    "add_generation_prompt": boolean,
    "continue_final_message": boolean.or_else(False),
    "add_special_tokens": boolean,
    "chat_template_kwargs": template_kwargs,
    "reasoning_effort": string,
    "chat_template": string,
    "documents": list_of(json_object),
    "tools": tools,
    "tool_choice": tool_choice,
    "functions": functions,
    "function_call": function_call,
    "parallel_tool_calls": boolean.or_else(True),
}

CHAT_FIELDS: Table = {
    **COMMON_FIELDS,
    **TEMPLATE_FIELDS,
    "messages": chat_messages.required(),
    "max_tokens": integer_between(1, INT64_MAX),
    "max_completion_tokens": integer_between(1, INT64_MAX),
    "logprobs": boolean.or_else(False),
    "top_logprobs": integer_between(*INTEGERS["logprobs"]),
    "echo": boolean.or_else(False),
    "modalities": only(["text"], because="this model writes text only"),
    **refused_fields(("audio", "web_search_options", "best_of", "suffix")),
}


@dataclass(frozen=True)
class ChatRequest:
    common: CommonRequest
    prompt: ChatPrompt
    answer: AnswerFormat
    structured_after_mark: StructuredOutput | None  # where the template opened the reasoning
    echo_text: str  # stands before the answer


def parse_chat(body: dict[str, Any], defaults: SamplingDefaults, rules: ChatRules) -> ChatRequest:
    """Raises ApiError 400 for the first mistake in the body."""
    values, ignored = decode(body, CHAT_FIELDS)
    found = chosen_tools(values)
    prompt = build_chat_prompt(values, found, rules)
    answer = answer_format(found, rules)
    max_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    is_default = max_tokens is None
    if is_default:
        max_tokens = defaults.max_new_tokens
    params = build_params(values, defaults, max_tokens=max_tokens, logprobs=wanted_logprobs(values))
    forced = ForcedCall.of(found, rules)
    if forced.structured is not None:
        if params.structured is not None:
            raise invalid_value(
                "tool_choice",
                "tool_choice forces a tool call, which no other structure of the answer can hold; "
                "leave out response_format and structured_outputs",
            )
        params = msgspec.structs.replace(params, structured=forced.structured)
    details = token_details(values, params.logprobs)
    return ChatRequest(
        common=common_request(values, ignored, params, details, is_default),
        prompt=prompt,
        answer=answer,
        structured_after_mark=forced.after_mark,
        echo_text=echo_text(prompt) if values["echo"] else "",
    )


def answer_format(found: Tools | None, rules: ChatRules) -> AnswerFormat:
    """Raises ApiError if nobody knows how this model writes calls."""
    if found is None:
        return AnswerFormat(reasoning=rules.reasoning)
    calls = call_format(found, rules)
    if calls is None:
        raise no_parser()
    return AnswerFormat(
        calls=calls,
        names=frozenset(found.names),
        max_calls=None if found.parallel else 1,
        reasoning=rules.reasoning,
    )


def echo_text(prompt: ChatPrompt) -> str:
    """The text of an assistant message at the end, which the answer goes on with."""
    last = prompt.messages[-1]
    if last["role"] != "assistant":
        return ""
    return as_text(last["content"])


def build_chat_prompt(values: dict[str, Any], found: Tools | None, rules: ChatRules) -> ChatPrompt:
    """The prompt of decoded TEMPLATE_FIELDS."""
    messages = values["messages"]
    continue_final = values["continue_final_message"]
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
    kwargs = dict(values.get("chat_template_kwargs", {}))
    if "reasoning_effort" in values:
        kwargs.setdefault("reasoning_effort", values["reasoning_effort"])
    if "chat_template" in values and not rules.trusts_templates:
        raise unsupported(
            "chat_template",
            "chat_template is not supported by this server: it runs templates of requests only "
            "when started with --trust-request-chat-template",
        )
    template = values.get("chat_template") or rules.template
    if values.get("documents") and "documents" not in template:
        raise unsupported(
            "documents",
            "documents cannot be shown to this model: its chat template has no place "
            "for them; put them into a message",
        )
    listed = found.listed if found else []
    calls = (call_format(found, rules) if found else rules.calls) or JSON
    return ChatPrompt(
        messages=with_tools_as_text(messages, listed, calls, template),
        add_generation_prompt=add_generation,
        continue_final_message=continue_final,
        add_special_tokens=values.get("add_special_tokens", False),
        chat_template_kwargs=kwargs,
        tools=listed,
        documents=values.get("documents", []),
        chat_template=values.get("chat_template", ""),
    )


def wanted_logprobs(values: dict[str, Any]) -> int | None:
    top = values.get("top_logprobs")
    if values["logprobs"]:
        return top or 0
    if top is not None:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true")
    return None
