"""The notations in which models write tool calls, as data. `CallParser` reads them all.

name          looks like
hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>
llama3_json   {"name": "f", "parameters": {...}}; {...}      perhaps after <|python_tag|>
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]   or   [TOOL_CALLS]f[ARGS]{...}
json          {"name": "f", "arguments": {...}}   or a list of such
"""

import json
import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from server.answer.call_json import Begun, Complete, Incomplete, NotACall, read_call, skip_space

Reader = Callable[[str, int, bool], Begun | Complete]


@dataclass(frozen=True)
class CallFormat:
    name: str
    begin: tuple[str, ...] = ()  # marks that announce calls, anywhere in the text
    end: str = ""  # mark behind each call
    bare: str = ""  # characters with which an unannounced call begins, at the start of an answer
    separators: str = ""  # characters that may stand between calls
    special: tuple[str, ...] = ()  # marks that are special tokens, which text otherwise leaves out
    read: Reader = read_call
    # How calls are written where they are forced, or where a template has no words for them.
    arguments_key: str = "arguments"
    before_all: str = ""
    before_each: str = ""
    after_each: str = ""
    between: str = ""
    after_all: str = ""
    id_length: int = 0  # of alphanumeric call ids, where templates insist on one; 0: any id

    def new_id(self) -> str:
        if self.id_length:
            letters = string.ascii_letters + string.digits
            return "".join(secrets.choice(letters) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"

    def head(self, name: str) -> str:
        """What stands before the arguments of a call."""
        return f'{self.before_each}{{"name": {json.dumps(name)}, "{self.arguments_key}": '

    @property
    def tail(self) -> str:
        """What stands behind the arguments of a call."""
        return "}" + self.after_each

    def instructions(self, tools: list[dict[str, Any]]) -> str:
        """For a system message, where the model's template does not present tools itself."""
        example = self.head("NAME") + "ARGUMENTS" + self.tail
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "You can call functions. These exist, described by JSON, one in a line:\n"
            f"{listed}\n"
            "To call one, answer in exactly this form, where NAME is the function's name and "
            "ARGUMENTS a JSON object that fits its parameters:\n"
            f"{self.before_all}{example}{self.after_all}"
        )


NAME = re.compile(r"[\w.-]+\s*")
CALL_ID, ARGS = "[CALL_ID]", "[ARGS]"


def read_mistral(text: str, at: int, is_marked: bool) -> Begun | Complete:
    """Newer models write `name[ARGS]{...}` where older ones write a list of JSON objects.

    Some have `[CALL_ID]` and an id before `[ARGS]`.
    """
    if at < len(text) and text[at] == "{":
        return read_call(text, at, is_marked)
    found = NAME.match(text, at)
    if found is None:
        raise Incomplete if at >= len(text) else NotACall
    at = found.end()
    if text.startswith(CALL_ID, at):
        at = text.find("[", at + len(CALL_ID))
        if at < 0:
            raise Incomplete
    if text.startswith(ARGS, at):
        at = skip_space(text, at + len(ARGS))
    if text.startswith("{", at):
        return Begun(found[0].rstrip(), at, is_member=False)
    rest = text[at:]
    if CALL_ID.startswith(rest) or ARGS.startswith(rest):
        raise Incomplete
    raise NotACall


HERMES = CallFormat(
    "hermes",
    begin=("<tool_call>",),
    end="</tool_call>",
    special=("<tool_call>", "</tool_call>"),
    before_each="<tool_call>\n",
    after_each="\n</tool_call>",
    between="\n",
)
LLAMA3_JSON = CallFormat(
    "llama3_json",
    begin=("<|python_tag|>",),
    bare="{",
    separators=";",
    special=("<|python_tag|>",),
    arguments_key="parameters",
    between="; ",
)
MISTRAL = CallFormat(
    "mistral",
    begin=("[TOOL_CALLS]",),
    special=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    read=read_mistral,
    before_all="[TOOL_CALLS][",
    between=", ",
    after_all="]",
    id_length=9,
)
JSON = CallFormat("json", bare="{[", before_all="[", between=", ", after_all="]")

HERMES_EXAMPLES = (  # as templates show them to the model
    '{"name": <function-name>, "arguments": <args-json-object>}',
    '{"arguments": <args-dict>, "name": <function-name>}',
    '{"name": <function-name>, "arguments": <args-dict>}',
)
FORMATS = {fmt.name: fmt for fmt in (HERMES, LLAMA3_JSON, MISTRAL, JSON)}


@lru_cache(8)
def detect(template: str) -> CallFormat | None:
    """The format that a chat template asks of its model, if that is beyond doubt."""
    plain = template.replace("\\", "")  # of escapes in its strings
    if "tools" not in plain:
        return None
    found = []
    if "<tool_call>" in plain and any(example in plain for example in HERMES_EXAMPLES):
        found.append(HERMES)
    if "[TOOL_CALLS]" in plain and "[AVAILABLE_TOOLS]" in plain:
        found.append(MISTRAL)
    if '{"name": function name, "parameters": dictionary of argument name' in plain:
        found.append(LLAMA3_JSON)
    return found[0] if len(found) == 1 else None
