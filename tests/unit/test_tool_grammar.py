"""Grammars of forced tool calls: what they let through is what the parser of the format reads."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from server.answer.call_format import FORMATS, HERMES
from server.answer.events import CallArguments, CallBegin, Reasoning, merged
from server.answer.parser import AnswerFormat
from server.answer.reasoning import REASONING_FORMATS
from server.schema.chat_rules import ChatRules
from server.schema.tools import ForcedCall, ToolChoice, Tools

BYTES = LLTokenizer("byte")
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "enum": ["Oslo", 'Rom\n"é😀']}},
}
LISTED = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = ToolChoice("named", "weather")
REQUIRED = ToolChoice("required")
ROME = json.dumps({"city": 'Rom\n"é😀'}, ensure_ascii=False)


def accepts(grammar: Any, text: str) -> bool:
    """May a completion be exactly `text`?"""
    assert grammar.kind == "grammar"
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar.value))
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def forced(
    choice: ToolChoice, fmt: Any = HERMES, reasoning: Any = None, parallel: bool = True
) -> Any:
    return ForcedCall.of(Tools(LISTED, choice, parallel), ChatRules(fmt, reasoning))


def written(fmt: Any, *calls: tuple[str, str]) -> str:
    inner = fmt.between.join(fmt.head(name) + arguments + fmt.tail for name, arguments in calls)
    return str(fmt.before_all + inner + fmt.after_all)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_what_is_forced_is_what_is_read(fmt: Any) -> None:
    grammar = forced(REQUIRED, fmt).structured
    for calls in ([("weather", ROME)], [("now", "{}"), ("weather", '{"city": "Oslo"}')]):
        text = written(fmt, *calls)
        assert accepts(grammar, text)
        parser = AnswerFormat(fmt, ("weather", "now")).parser("")
        events = merged(parser.feed(text) + parser.finish())
        expected = []
        for index, (name, arguments) in enumerate(calls):
            expected += [CallBegin(index, name), CallArguments(index, arguments)]
        assert events == expected
    for wrong in ("", "Hello", written(fmt, ("weather", '{"city": "Paris"}')), ROME):
        assert not accepts(grammar, wrong)
    assert not accepts(grammar, written(fmt, ("other", "{}")))


def test_named_and_not_parallel_allow_one_call() -> None:
    one, two = ("weather", ROME), ("now", "{}")
    named = forced(NAMED).structured
    assert accepts(named, written(HERMES, one))
    assert not accepts(named, written(HERMES, two))
    assert not accepts(named, written(HERMES, one, one))
    single = forced(REQUIRED, parallel=False).structured
    assert accepts(single, written(HERMES, two))
    assert not accepts(single, written(HERMES, one, two))


def test_a_model_without_a_known_format_is_made_to_write_json() -> None:
    assert accepts(forced(NAMED, None).structured, f'[{{"name": "weather", "arguments": {ROME}}}]')
    assert ForcedCall.of(Tools(LISTED, ToolChoice("auto")), ChatRules(HERMES)).structured is None


CALL = written(HERMES, ("now", "{}"))


@pytest.mark.parametrize(
    ("reasoning", "opened", "text", "is_accepted"),
    [
        ("qwen3", False, CALL, True),
        ("qwen3", False, f"<think>\nHm.\n</think>\n\n{CALL}", True),
        ("qwen3", False, f"Hm.</think>{CALL}", False),
        ("qwen3", False, "<think>Hm.</think>", False),
        ("qwen3", True, f"Hm, <tool_call>?\n</think>\n\n{CALL}", True),
        ("qwen3", True, CALL, False),
        ("deepseek_r1", False, f"<think>Hm.</think>{CALL}", True),
        ("deepseek_r1", False, f"Hm.</think>{CALL}", True),
    ],
)
def test_reasoning_is_free_and_comes_first(
    reasoning: str, opened: bool, text: str, is_accepted: bool
) -> None:
    fmt = REASONING_FORMATS[reasoning]
    call = forced(REQUIRED, HERMES, fmt)
    assert accepts(call.after_mark if opened else call.structured, text) is is_accepted
    if is_accepted:
        parser = AnswerFormat(HERMES, ("now",), reasoning=fmt).parser("<think>" if opened else "")
        events = merged(parser.feed(text) + parser.finish())
        calls = [event for event in events if not isinstance(event, Reasoning)]
        if not (reasoning == "qwen3" and text == CALL):
            assert len(events) == 3
        assert calls == [CallBegin(0, "now"), CallArguments(0, "{}")]
