"""Tools as plain messages, for chat templates that have no place for them.

    tools                        a part of the system message, which says how to write a call
    assistant with tool_calls    the calls as the model should have written them, in the content
    tool                         a message of the user, between marks

Each is done only where the template does not read what it would replace.
"""

import json
import re
from typing import Any

from server.answer.call_format import CallFormat

Message = dict[str, Any]

READS_TOOLS = re.compile(r"\btools\b")
READS_CALLS = re.compile(r"\btool_calls\b")
READS_TOOL_ROLE = re.compile(r"""["']tool["']""")


def with_tools_as_text(
    messages: list[Message], tools: list[dict[str, Any]], fmt: CallFormat, template: str
) -> list[Message]:
    """The messages in a form that loses nothing in `template`; "": there is none to suit."""
    has_calls = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    if not template or not (tools or has_calls):
        return messages
    if not READS_CALLS.search(template):
        messages = [with_calls_as_text(message, fmt) for message in messages]
    if not READS_TOOL_ROLE.search(template):
        messages = [
            as_user(message) if message["role"] == "tool" else message for message in messages
        ]
    if tools and not READS_TOOLS.search(template):
        messages = with_system_text(messages, fmt.instructions(tools))
    return messages


def with_calls_as_text(message: Message, fmt: CallFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        written.append(fmt.head(call["function"]["name"]) + arguments + fmt.tail)
    text = fmt.before_all + fmt.between.join(written) + fmt.after_all
    before = as_text(message["content"])
    changed = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**changed, "content": f"{before}\n{text}" if before else text}


def as_user(message: Message) -> Message:
    text = as_text(message["content"])
    return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


def with_system_text(messages: list[Message], text: str) -> list[Message]:
    """`text` at the end of the first system message, or as one of its own."""
    first = messages[0]
    if first["role"] not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{as_text(first['content'])}\n\n{text}"}, *messages[1:]]


def as_text(content: str | list[dict[str, str]] | None) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
