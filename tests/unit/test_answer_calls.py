"""Tool calls and reasoning in a model's text: each format, whole and in any pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.answer.call_format import FORMATS, HERMES, JSON, LLAMA3_JSON, MISTRAL, detect
from server.answer.events import CallArguments, CallBegin, Event, Reasoning, Text, merged
from server.answer.parser import AnswerFormat
from server.answer.reasoning import REASONING_FORMATS

NAMES = ("weather", "now")
QWEN3, R1 = REASONING_FORMATS["qwen3"], REASONING_FORMATS["deepseek_r1"]


def read(fmt: AnswerFormat, pieces: list[str], prompt_end: str = "") -> list[Event]:
    parser = fmt.parser(prompt_end)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merged(events + parser.finish())


def parts(fmt: Any, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call."""
    events = read(AnswerFormat(calls=fmt, names=NAMES), [text])
    content = "".join(e.text for e in events if isinstance(e, Text))
    calls = [[e.name, ""] for e in events if isinstance(e, CallBegin)]
    for event in events:
        if isinstance(event, CallArguments):
            calls[event.index][1] += event.text
    return content, [(name, arguments) for name, arguments in calls]


OSLO = '{"city": "Oslo"}'
TWO = [("weather", OSLO), ("now", "{}")]


@pytest.mark.parametrize(
    ("fmt", "text", "content", "calls"),
    [
        (
            HERMES,
            f'<tool_call>\n{{"name": "weather", "arguments": {OSLO}}}\n</tool_call>',
            "",
            TWO[:1],
        ),
        (
            HERMES,
            f'Wait.\n\n<tool_call>{{"name": "weather", "arguments": {OSLO}}}</tool_call>\n'
            '<tool_call>\n{"name": "now"}\n</tool_call>\n',
            "Wait.",
            TWO,
        ),
        (
            HERMES,
            '<tool_call>{"name": "now", "arguments": null}</tool_call> Done.',
            "Done.",
            TWO[1:],
        ),
        (HERMES, f'<tool_call>{{"arguments": {OSLO}, "name": "weather"}}</tool_call>', "", TWO[:1]),
        (HERMES, '<tool_call>{"name": "now", "arguments": "{}", "id": 7}', "", TWO[1:]),
        (LLAMA3_JSON, f'{{"name": "weather", "parameters": {OSLO}}}', "", TWO[:1]),
        (
            LLAMA3_JSON,
            f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {OSLO}}}; '
            '{"name": "now", "parameters": {}}',
            "",
            TWO,
        ),
        (
            MISTRAL,
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {OSLO}}}, '
            '{"name": "now", "arguments": {}}]',
            "",
            TWO,
        ),
        (MISTRAL, f"Hm.[TOOL_CALLS]weather[ARGS]{OSLO}[TOOL_CALLS]now{{}}", "Hm.", TWO),
        (MISTRAL, f"[TOOL_CALLS]weather[CALL_ID]aB3[ARGS] {OSLO}", "", TWO[:1]),
        (JSON, '{"name": "now"}', "", TWO[1:]),
        (
            JSON,
            f'\n[{{"name": "weather", "arguments": {OSLO}}}, {{"name": "now", "arguments": {{}}}}]\n',
            "",
            TWO,
        ),
    ],
)
def test_each_format(fmt: Any, text: str, content: str, calls: Any) -> None:
    assert parts(fmt, text) == (content, calls)


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (HERMES, "<tool_call> is how a call begins.\n"),
        (HERMES, '<tool_call>\n{"name": "weather", "argu'),  # cut by max_tokens
        (HERMES, '<tool_call>{"arguments": {"city": "Oslo"}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, "1 <tool < <tool_call  \n"),
        (HERMES, '{"name": "weather", "arguments": {}}'),
        (LLAMA3_JSON, '{"name": "Ada", "parameters": {}}'),  # no tool of this name
        (LLAMA3_JSON, '<|python_tag|>print("hi")'),
        (LLAMA3_JSON, 'See {"name": "weather", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] what"),
        (MISTRAL, "[TOOL_CALLS][]"),
        (JSON, '{"answer": {"name": "weather", "arguments": {}}}'),
        (JSON, "[1, 2, 3] \n"),
        (JSON, "  \n"),
        (JSON, '{"name": "Bob", "age": 7}'),
    ],
)
def test_what_only_looks_like_a_call_is_text_to_the_byte(fmt: Any, text: str) -> None:
    assert parts(fmt, text) == (text, [])


def test_json_that_is_no_call_is_not_held_back() -> None:
    parser = AnswerFormat(calls=JSON, names=NAMES).parser("")
    assert parser.feed('{"answer"') == []
    assert parser.feed(":") == [Text('{"answer":')]
    assert parser.feed(' "long') == [Text(' "long')]


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = AnswerFormat(calls=HERMES, names=NAMES).parser("")
    assert parser.feed("I look. <tool_") == [Text("I look.")]
    assert parser.feed('call>{"name": "weather", "arguments": ') == []
    assert parser.feed('{"city') == [CallBegin(0, "weather"), CallArguments(0, '{"city')]
    assert parser.feed('": "}</tool_call>"') == [CallArguments(0, '": "}</tool_call>"')]
    assert parser.feed("}}</tool_") == [CallArguments(0, "}")]
    assert parser.feed("call>") == []
    assert parser.finish() == []


def test_a_call_cut_in_its_arguments_keeps_what_there_is() -> None:
    assert parts(HERMES, '<tool_call>{"name": "weather", "arguments": {"city": "Os') == (
        "",
        [("weather", '{"city": "Os')],
    )


def test_broken_arguments_end_with_the_mark() -> None:
    text = '<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call>bye'
    assert parts(HERMES, text) == ("bye", [("now", "{'a': 1}}")])
    unclosed = '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call>bye'
    assert parts(HERMES, unclosed) == ("bye", [("now", '{"a": 1')])


def test_escapes_and_unicode_pass_through_untouched() -> None:
    arguments = r'{"a": "\"\\}{\u00e9é😀\n", "b": [{"c": "</tool_call>"}], "d": -1.5e3}'
    json.loads(arguments)
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
    assert parts(HERMES, text) == ("", [("now", arguments)])


def test_half_a_surrogate_pair_makes_no_name_and_no_arguments() -> None:
    for text in (
        r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>',
        r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\ud83d\"}"}</tool_call>',
    ):
        content, calls = parts(HERMES, text)
        assert (content + "".join(arguments for _, arguments in calls)).encode()
        assert calls == []


def test_max_calls_leaves_out_the_others() -> None:
    text = '<tool_call>{"name": "now"}</tool_call><tool_call>{"name": "weather"}</tool_call>'
    events = read(AnswerFormat(calls=HERMES, names=NAMES, max_calls=1), [text])
    assert events == [CallBegin(0, "now"), CallArguments(0, "{}")]


# --- reasoning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "prompt_end", "text", "events"),
    [
        (QWEN3, "", "<think>\nHm.\n</think>\n\nHi", [Reasoning("Hm."), Text("Hi")]),
        (QWEN3, "<think>\n", "Hm.\n</think>\n\nHi", [Reasoning("Hm."), Text("Hi")]),
        (QWEN3, "<think>\n\n</think>\n\n", "Hi", [Text("Hi")]),
        (QWEN3, "", "Hi <think>x</think>", [Text("Hi <think>x</think>")]),
        (QWEN3, "", "<think>\n\n</think>\n\nHi", [Text("Hi")]),
        (QWEN3, "", "<think>cut </thi", [Reasoning("cut </thi")]),
        (QWEN3, "", "<thi", [Text("<thi")]),
        (R1, "", "Hm.</think>Hi", [Reasoning("Hm."), Text("Hi")]),
        (R1, "", "<think>Hm.</think>Hi", [Reasoning("Hm."), Text("Hi")]),
        (R1, "</think>", "Hi", [Text("Hi")]),
    ],
)
def test_reasoning(fmt: Any, prompt_end: str, text: str, events: list[Event]) -> None:
    assert read(AnswerFormat(reasoning=fmt), [text], prompt_end) == events


def test_reasoning_comes_before_calls_and_hides_none() -> None:
    text = '<think>\n<tool_call>?\n</think>\n\n<tool_call>\n{"name": "now"}\n</tool_call>'
    events = read(AnswerFormat(HERMES, NAMES, reasoning=QWEN3), [text])
    assert events == [Reasoning("<tool_call>?"), CallBegin(0, "now"), CallArguments(0, "{}")]


# --- any pieces -----------------------------------------------------------------------------------------

FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "</",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
    ),
    *("<|python_tag|>", '{"name": "weather", ', '"arguments": ', '"parameters": ', OSLO, "{}", "}"),
    *(
        '{"name": "now"}',
        "[",
        "]",
        ",",
        ";",
        "\n",
        "  ",
        '"',
        "\\",
        "'",
        "é",
        "😀",
        "now",
        "12",
        ":",
    ),
    *('"\\ud83d"', "null", "text ", '{"a": {"b": ["c"]}}', '"{\\"a\\": 1}"'),
]
texts = st.one_of(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=6)), max_size=12).map("".join),
)


@settings(max_examples=150, deadline=None)
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 200), max_size=10),
    reasoning=st.sampled_from([None, QWEN3, R1]),
    prompt_end=st.sampled_from(["", "<think>\n", "</think>"]),
)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_pieces_do_not_matter(
    fmt: Any, text: str, cuts: list[int], reasoning: Any, prompt_end: str
) -> None:
    answer = AnswerFormat(fmt, NAMES, reasoning=reasoning)
    whole = read(answer, [text], prompt_end)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert read(answer, pieces, prompt_end) == whole
    assert read(answer, list(text), prompt_end) == whole
    begun = [event.index for event in whole if isinstance(event, CallBegin)]
    assert begun == list(range(len(begun)))


@settings(max_examples=100, deadline=None)
@given(
    arguments=st.dictionaries(
        st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.text(st.characters(exclude_categories=("Cs",)), max_size=12),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=5,
        ),
        max_size=4,
    ),
    ascii_only=st.booleans(),
    before=st.sampled_from(["", "Let me see."]),
)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_any_arguments_come_back(
    fmt: Any, arguments: dict[str, Any], ascii_only: bool, before: str
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    calls = [("weather", written), ("now", "{}")]
    text = fmt.between.join(fmt.head(name) + value + fmt.tail for name, value in calls)
    text = fmt.before_all + text + fmt.after_all
    if fmt.begin and fmt is not LLAMA3_JSON:  # others begin calls at the start only
        text = f"{before}\n{text}" if before else text
        assert parts(fmt, text) == (before, calls)
    else:
        assert parts(fmt, text) == ("", calls)


# --- detection ----------------------------------------------------------------------------------------


def test_a_template_tells_the_format_only_beyond_doubt() -> None:
    hermes = (
        '{%- if tools %}{{- "return a json object within <tool_call></tool_call> XML tags:\\n'
        r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n"
        '</tool_call>" }}{% endif %}'
    )
    llama = (
        '{% if tools %}{{ \'Respond in the format {"name": function name, "parameters": '
        "dictionary of argument name and its value}.' }}{% endif %}"
    )
    mistral = "{% if tools %}[AVAILABLE_TOOLS]{{ tools|tojson }}{% endif %}[TOOL_CALLS]"
    assert detect(hermes) is HERMES
    assert detect(llama) is LLAMA3_JSON
    assert detect(mistral) is MISTRAL
    assert detect(hermes + mistral) is None
    assert detect("{% if tools %}<tool_call><function=x>{% endif %}") is None
    assert detect("{{ messages[0].content }}") is None
    assert detect("") is None


def test_ids_have_the_form_that_templates_want() -> None:
    assert HERMES.new_id().startswith("call_")
    assert len({HERMES.new_id() for _ in range(50)}) == 50
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
