"""Tools of a chat request: which exist, which the model must call, and how a forced call is written."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from engine.api.sampling import StructuredOutput
from server.answer.call_format import JSON, CallFormat
from server.errors import ApiError, invalid_type, invalid_value, missing, unsupported
from server.schema.chat_rules import ChatRules
from server.schema.fields import Schema, any_of, boolean, json_object, object_with, string, takes

MAX_TOOLS = 1024
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MODES = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolChoice:
    mode: Literal["none", "auto", "required", "named"]
    name: str = ""  # of the one function to call, for "named"


# --- fields ---------------------------------------------------------------------------------------


PARAMETERS: Schema = {"type": "object", "properties": {"type": {"const": "object"}}}
FUNCTION = object_with(
    {"name": {"type": "string", "pattern": f"^{NAME.pattern}$"}},
    {"description": string.schema, "parameters": PARAMETERS, "strict": boolean.schema},
)
NAMED = object_with({"name": string.schema})
ONE_KIND: Schema = {"const": "function"}


def lists(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_TOOLS}


@takes(lists(object_with({"type": ONE_KIND, "function": FUNCTION})))
def tools(value: Any, path: str) -> list[dict[str, Any]]:
    """A list of {type: "function", function: {...}}."""

    def tool(value: Any, path: str) -> dict[str, Any]:
        entry = json_object(value, path)
        if entry.get("type") is None:
            raise missing(f"{path}.type")
        check_function_type(entry, path)
        if entry.get("function") is None:
            raise missing(f"{path}.function")
        return {"type": "function", "function": function(entry["function"], f"{path}.function")}

    return tool_list(value, path, tool, "function.name")


@takes(lists(FUNCTION))
def functions(value: Any, path: str) -> list[dict[str, Any]]:
    """The deprecated spelling: functions without an envelope."""

    def tool(value: Any, path: str) -> dict[str, Any]:
        return {"type": "function", "function": function(value, path)}

    return tool_list(value, path, tool, "name")


def tool_list(value: Any, path: str, tool: Any, name_path: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise invalid_type(path, "a list", value)
    if not value:
        raise invalid_value(path, f"{path} is empty; name at least one, or leave {path} out")
    if len(value) > MAX_TOOLS:
        raise invalid_value(path, f"{path} takes at most {MAX_TOOLS} entries, got {len(value)}")
    result, names = [], set()
    for i, entry in enumerate(value):
        checked = tool(entry, f"{path}[{i}]")
        name = checked["function"]["name"]
        if name in names:
            where = f"{path}[{i}].{name_path}"
            raise invalid_value(where, f"{where} is {name!r} a second time; names must be unique")
        names.add(name)
        result.append(checked)
    return result


def function(value: Any, path: str) -> dict[str, Any]:
    """name, and where given description, parameters (a JSON schema) and strict."""
    entry = json_object(value, path)
    if entry.get("name") is None:
        raise missing(f"{path}.name")
    name = string(entry["name"], f"{path}.name")
    if not NAME.fullmatch(name):
        raise invalid_value(
            f"{path}.name",
            f"{path}.name must have 1 to 64 letters, digits, _ or -, got {name!r:.80}",
        )
    result: dict[str, Any] = {"name": name}
    for key, check in (
        ("description", string),
        ("parameters", parameters),
        ("strict", boolean),
    ):
        if entry.get(key) is not None:
            result[key] = check(entry[key], f"{path}.{key}")
    return result


def parameters(value: Any, path: str) -> dict[str, Any]:
    schema = json_object(value, path)
    if schema.get("type", "object") != "object":
        raise invalid_value(
            f"{path}.type", f"{path}.type must be 'object', as arguments are named, not a list"
        )
    return schema


@takes(
    any_of(
        {"enum": list(MODES)},
        {
            "type": "object",
            "properties": {"type": ONE_KIND, "function": NAMED},
            "required": ["function"],
        },
    )
)
def tool_choice(value: Any, path: str) -> ToolChoice:
    if isinstance(value, dict):
        check_function_type(value, path)
        if value.get("function") is None:
            raise missing(f"{path}.function")
        chosen = json_object(value["function"], f"{path}.function")
        return named_choice(chosen, f"{path}.function")
    mode = string(value, path) if isinstance(value, str) else None
    match mode:
        case "none" | "auto" | "required":
            return ToolChoice(mode)
        case None:
            raise invalid_type(path, "a string or an object that names a function", value)
    raise invalid_value(
        path, f"{path} must be one of {', '.join(MODES)}, or an object, got {mode!r:.80}"
    )


@takes(any_of({"enum": [mode for mode in MODES if mode != "required"]}, NAMED))
def function_call(value: Any, path: str) -> ToolChoice:
    """The deprecated spelling of tool_choice."""
    if isinstance(value, dict):
        return named_choice(value, path)
    choice = tool_choice(value, path)
    if choice.mode == "required":
        raise invalid_value(path, f"{path} must be none, auto, or an object with a name")
    return choice


def named_choice(value: dict[str, Any], path: str) -> ToolChoice:
    if value.get("name") is None:
        raise missing(f"{path}.name")
    return ToolChoice("named", string(value["name"], f"{path}.name"))


def check_function_type(value: dict[str, Any], path: str) -> None:
    kind = value.get("type", "function")
    if kind != "function":
        raise unsupported(
            f"{path}.type", f"{path}.type must be 'function', the only kind here, got {kind!r:.80}"
        )


# --- the request as a whole ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Tools:
    """The tools that the model is told of, and whether it has to call one."""

    listed: list[dict[str, Any]]
    choice: ToolChoice
    parallel: bool = True

    @property
    def names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.listed]

    @property
    def is_forced(self) -> bool:
        return self.choice.mode in ("required", "named")


def call_format(tools: Tools, rules: ChatRules) -> CallFormat | None:
    """How calls are read. A forced call can be had from any model, so the simplest format will do."""
    return rules.calls or (JSON if tools.is_forced else None)


@dataclass(frozen=True)
class Before:
    """A part of a grammar: what may come before the calls, and the rules that it names."""

    start: str = ""
    rules: str = ""


@dataclass(frozen=True)
class ForcedCall:
    """What a forced answer may be: calls in the model's own notation, perhaps after reasoning."""

    structured: StructuredOutput | None = None
    after_mark: StructuredOutput | None = None  # if the prompt has opened the reasoning

    @classmethod
    def of(cls, tools: Tools | None, rules: ChatRules) -> "ForcedCall":
        if tools is None or not tools.is_forced:
            return cls()
        fmt, marks = call_format(tools, rules) or JSON, rules.reasoning

        def grammar(before: Before) -> StructuredOutput:
            return StructuredOutput("grammar", lark(tools, fmt, before), "tools")

        if marks is None:
            return cls(grammar(Before()))
        end = literal(marks.end)
        reasoning = f"reasoning[suffix={end}]: /(?s:.*)/\nspace: /\\s+/"
        inside = Before("reasoning space?", reasoning)
        marked = Before(f"({literal(marks.begin)} {inside.start})?", reasoning)
        return cls(grammar(inside if marks.is_unmarked else marked), grammar(inside))


def chosen_tools(values: dict[str, Any]) -> Tools | None:
    """From decoded fields; None if the model shall know of no tools. Raises ApiError."""
    if "tools" in values and "functions" in values:
        raise invalid_value("functions", "functions is the old name of tools: give only tools")
    old = "functions" in values
    listed = values.get("functions" if old else "tools")
    field = "function_call" if old and "function_call" in values else "tool_choice"
    choice: ToolChoice | None = values.get(field)
    if listed is None:
        for name in ("tool_choice", "function_call"):
            if name in values and values[name].mode != "none":
                raise invalid_value(name, f"{name} needs tools, and this request has none")
        return None
    if choice is None:
        choice = ToolChoice("auto")
    if choice.mode == "none":
        return None
    found = Tools(listed, choice, values["parallel_tool_calls"])
    if choice.mode == "named" and choice.name not in found.names:
        path = "function_call.name" if field == "function_call" else "tool_choice.function.name"
        raise invalid_value(
            path, f"{path} is {choice.name!r:.80}, but tools has {', '.join(found.names):.400}"
        )
    return found


def no_parser() -> ApiError:
    return unsupported(
        "tools",
        "tools need to know how this model writes calls, which its chat template does not tell: "
        "start the server with --tool-call-parser NAME (hermes, llama3_json, mistral, json), or "
        'send tool_choice "none"',
    )


def lark(tools: Tools, fmt: CallFormat, before: Before) -> str:
    """A Lark grammar. Each function's schema is a rule of its own, so its references keep their root."""
    names = [tools.choice.name] if tools.choice.mode == "named" else tools.names
    allowed = [tool["function"] for tool in tools.listed if tool["function"]["name"] in names]
    several = tools.parallel and tools.choice.mode == "required"
    calls = "call" + (f" ({literal(fmt.between)} call)*" if several else "")
    parts = [before.start, literal(fmt.before_all), calls, literal(fmt.after_all)]
    rules = ["start: " + " ".join(part for part in parts if part)]
    if before.rules:
        rules.append(before.rules)
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(allowed))))
    for i, one in enumerate(allowed):
        schema = {"type": "object", **one.get("parameters", {})}
        rules.append(f"call_{i}: {literal(fmt.head(one['name']))} args_{i} {literal(fmt.tail)}")
        rules.append(f"args_{i}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"


def literal(text: str) -> str:
    """A string of Lark's; nothing for nothing."""
    return json.dumps(text) if text else ""
