"""Chat messages: roles, content parts and tool calls, checked and brought to one shape.

What comes out is what chat templates read: `role`, `content` (string or list of text parts) and,
where present, `name`, `tool_calls`, `tool_call_id`, `reasoning_content`.
"""

from typing import Any

import orjson

from server.errors import ApiError, describe, invalid_type, invalid_value, missing
from server.schema.body import MAX_DEPTH, is_deeper_than
from server.schema.fields import Schema, any_of, json_object, object_with, string, takes

MAX_MESSAGES = 4096
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
OTHER_MODALITIES = frozenset(
    [
        "image_url",
        "input_image",
        "image",
        "input_audio",
        "audio",
        "audio_url",
        "video",
        "video_url",
        "file",
        "input_file",
    ]
)


TEXT_PART = any_of(
    *(
        object_with(
            {
                "type": {"enum": [kind for kind, key in TEXT_PARTS.items() if key == text]},
                text: string.schema,
            }
        )
        for text in dict.fromkeys(TEXT_PARTS.values())
    )
)
CONTENT = any_of(string.schema, {"type": "array", "items": TEXT_PART})
CALLED = object_with(
    {"name": string.schema}, {"arguments": any_of(string.schema, json_object.schema)}
)
CALL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "id": {"type": ["string", "null"]},
        "function": CALLED,
    },
    "required": ["function"],
}
OF_ANY_ROLE = dict.fromkeys(
    ("name", "tool_call_id", "reasoning_content", "reasoning"), string.schema
)
MESSAGE = any_of(
    object_with(
        {"role": {"enum": ["system", "developer", "user", "function"]}, "content": CONTENT},
        OF_ANY_ROLE,
    ),
    object_with(
        {"role": {"const": "assistant"}},
        {
            **OF_ANY_ROLE,
            "content": CONTENT,
            "tool_calls": {"type": "array", "items": CALL},
            "function_call": CALLED,
        },
        # content may be absent only beside one of the others
        anyOf=[
            {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
            {
                "required": ["tool_calls"],
                "properties": {"tool_calls": {"type": "array", "minItems": 1}},
            },
            {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
            {"required": ["refusal"], "properties": {"refusal": string.schema}},
        ],
    ),
    object_with(
        {"role": {"const": "tool"}, "content": CONTENT, "tool_call_id": string.schema}, OF_ANY_ROLE
    ),
)


@takes({"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES})
def chat_messages(value: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid_type(path, "a list of messages", value)
    if not value:
        raise missing(path, f"{path} is empty; send at least one message")
    if len(value) > MAX_MESSAGES:
        raise invalid_value(path, f"{path} takes at most {MAX_MESSAGES} entries, got {len(value)}")
    return [chat_message(entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def chat_message(value: Any, path: str) -> dict[str, Any]:
    entry = json_object(value, path)
    if entry.get("role") is None:
        raise missing(f"{path}.role")
    role = string(entry["role"], f"{path}.role")
    role = "tool" if role == "function" else role
    if role not in ROLES:
        raise invalid_value(
            f"{path}.role", f"{path}.role must be one of {', '.join(ROLES)}, got {role!r:.80}"
        )
    message: dict[str, Any] = {"role": role}
    for name, item in entry.items():
        if item is None:
            continue
        item_path = f"{path}.{name}"
        if name == "content":
            message["content"] = content(item, item_path)
        elif name == "tool_calls" and role == "assistant":
            if calls := tool_calls(item, item_path):
                message["tool_calls"] = calls
        elif name == "function_call" and role == "assistant":
            message.setdefault("tool_calls", [tool_call(item, item_path)])
        elif name in ("name", "tool_call_id"):
            message[name] = string(item, item_path)
        elif name in ("reasoning_content", "reasoning"):
            message["reasoning_content"] = string(item, item_path)
    check_complete(message, entry, role, path)
    return message


def check_complete(message: dict[str, Any], entry: dict[str, Any], role: str, path: str) -> None:
    """Only an assistant message with a tool call or a refusal may lack content."""
    if "content" not in message:
        refusal = entry.get("refusal")
        if role == "assistant" and isinstance(refusal, str):
            message["content"] = refusal
        elif "tool_calls" in message:
            message["content"] = None
        elif "content" in entry:
            raise invalid_type(f"{path}.content", "a string or a list of parts", None)
        else:
            raise missing(f"{path}.content")
    if role == "tool" and entry.get("role") == "tool" and "tool_call_id" not in message:
        raise missing(f"{path}.tool_call_id")


def content(value: Any, path: str) -> str | list[dict[str, str]]:
    """A string, or a list of text parts (the tokenizer joins them where a template wants that)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid_type(path, "a string or a list of parts", value)
    if not value:
        return ""
    return [content_part(part, f"{path}[{i}]") for i, part in enumerate(value)]


def content_part(value: Any, path: str) -> dict[str, str]:
    part = json_object(value, path)
    kind = part.get("type")
    if kind is None:
        raise missing(f"{path}.type")
    kind = string(kind, f"{path}.type")
    if kind in OTHER_MODALITIES:
        raise ApiError(
            400,
            "unsupported_content_type",
            f"{path}.type is {kind!r}, but this model takes text only",
            f"{path}.type",
        )
    key = TEXT_PARTS.get(kind)
    if key is None:
        raise invalid_value(f"{path}.type", f"{path}.type must be 'text', got {kind!r:.80}")
    if part.get(key) is None:
        raise missing(f"{path}.{key}")
    return {"type": "text", "text": string(part[key], f"{path}.{key}")}


def tool_calls(value: Any, path: str) -> list[dict[str, Any]]:
    """Earlier calls of the assistant. Templates want the arguments as an object, not as JSON text."""
    if not isinstance(value, list):
        raise invalid_type(path, "a list", value)
    calls = []
    for i, entry in enumerate(value):
        call_path = f"{path}[{i}]"
        call = json_object(entry, call_path)
        if call.get("type", "function") != "function":
            raise invalid_value(
                f"{call_path}.type",
                f"{call_path}.type must be 'function', got {describe(call['type'])}",
            )
        if call.get("function") is None:
            raise missing(f"{call_path}.function")
        call_id = "" if call.get("id") is None else string(call["id"], f"{call_path}.id")
        calls.append(tool_call(call["function"], f"{call_path}.function", call_id))
    return calls


def tool_call(value: Any, path: str, call_id: str = "") -> dict[str, Any]:
    """An earlier call from its function, which is also the deprecated `function_call`."""
    function = json_object(value, path)
    if function.get("name") is None:
        raise missing(f"{path}.name")
    name = string(function["name"], f"{path}.name")
    arguments = tool_arguments(function.get("arguments"), f"{path}.arguments")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool_arguments(value: Any, path: str) -> Any:
    """The object; or the text as it is, if that is no object of at most MAX_DEPTH levels."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    text = string(value, path)
    try:
        parsed = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    # Deeper text stays text, as what reads it later may work recursively.
    if not isinstance(parsed, dict) or is_deeper_than(parsed, MAX_DEPTH):
        return text
    return parsed
