"""Chat templates of every habit: what they see, what they refuse, and that none can hold us up."""

import os
import signal
import threading
import time

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from engine.api.messages import ChatPrompt
from tests.unit.tokenizers_for_tests import byte_level
from tokenizer_proc import chat as chat_module
from tokenizer_proc.chat import ChatRenderer, templates_of
from tokenizer_proc.errors import PromptError, TokenizerLoadError
from tokenizer_proc.templates import TemplateError, TemplateRenderer, TemplateTimeout

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": [1, "é"]}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>é</b>"}}]


def render(template, messages=HI, **fields):
    renderer = ChatRenderer(byte_level(chat_template=template))
    return renderer.render(ChatPrompt(messages=messages, **fields))


def refused(template, messages=HI, **fields):
    with pytest.raises(PromptError) as caught:
        render(template, messages, **fields)
    return caught.value


@pytest.fixture
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


# --- what a template refuses ------------------------------------------------------------------------

STRICT = """
{%- set ns = namespace(last='') -%}
{%- for m in messages -%}
  {%- if m.role == 'system' and not loop.first -%}
    {{ raise_exception('System message must be at the beginning.') }}
  {%- elif m.role == 'assistant' and ns.last not in ('user', 'tool') -%}
    {{ raise_exception('Roles must alternate, got ' ~ m.role ~ ' after ' ~ ns.last) }}
  {%- endif -%}
  {%- set ns.last = m.role -%}
[{{ m.role }}] {{ m.content }}
{%- endfor -%}
{%- if reasoning_effort and reasoning_effort not in ('low', 'high') -%}
  {{ raise_exception('Unknown effort: ' ~ reasoning_effort) }}
{%- endif -%}
"""


@pytest.mark.parametrize(
    ("roles", "fields", "words"),
    [
        (["user", "system"], {}, "System message must be at the beginning."),
        (["system", "system"], {}, "System message must be at the beginning."),
        (["system", "developer"], {}, "System message must be at the beginning."),
        (["assistant"], {}, "Roles must alternate, got assistant after"),
        (["user", "assistant", "assistant"], {}, "got assistant after assistant"),
        (["user"], {"chat_template_kwargs": {"reasoning_effort": "huge"}}, "Unknown effort: huge"),
    ],
)
def test_what_a_template_raises_is_a_400_in_its_own_words(roles, fields, words):
    error = refused(STRICT, [{"role": role, "content": "x"} for role in roles], **fields)
    assert (error.status, error.code, error.param) == (400, "invalid_messages", "messages")
    assert words in error.message


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content.x }}",
        "{{ 1 // 0 }}",
        "{{ nothing() }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages | unknown }}{{ messages[0].content }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_whatever_else_goes_wrong_is_a_400(template):
    if "unknown" in template:  # no template at all: refused at the start
        with pytest.raises(Exception, match="line 1"):
            render(template)
    else:
        assert refused(template).code == "invalid_messages"


# --- time and memory ------------------------------------------------------------------------------------

ENDLESS = {
    "loops": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "one operation": "{% set n = 10 ** (10 ** 9) %}",
    "text": "{{ ('a' * 30) | replace('a', 'b' * 99999999) }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_ended(renderer, template):
    began = time.monotonic()
    with pytest.raises(TemplateError):  # too long, or too large
        renderer.render(template, {}, 0.3)
    assert time.monotonic() - began < 20
    assert renderer.render("fine {{ x }}", {"x": 1}, 5.0) == "fine 1"


def test_others_are_not_held_up(renderer):
    errors = []

    def spin():
        try:
            renderer.render(ENDLESS["one operation"], {}, 1.5)
        except TemplateTimeout as error:
            errors.append(error)

    thread = threading.Thread(target=spin)
    thread.start()
    texts = [renderer.render("{{ i }}", {"i": i}, 5.0) for i in range(20)]
    assert thread.is_alive()
    thread.join()
    assert texts == [str(i) for i in range(20)]
    assert "1.5 s" in str(errors[0])


def test_a_process_that_has_died_is_replaced(renderer):
    assert renderer.render("a", {}, 5.0) == "a"
    [worker] = renderer._idle
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert renderer.render("b", {}, 5.0) == "b"


def test_large_messages_pass(renderer):
    text = "é" * 3_000_000
    assert renderer.render("{{ x }}", {"x": text}, 10.0) == text


def test_a_template_of_a_request_has_less_time(monkeypatch):
    monkeypatch.setattr(chat_module, "REQUEST_TEMPLATE_SECONDS", 0.3)
    error = refused("{{ messages[0].content }}", chat_template=ENDLESS["loops"])
    assert (error.status, error.param) == (400, "chat_template")
    assert "0.3 s" in error.message
    assert refused("x", chat_template="{% if %}").param == "chat_template"
    text = render(None, chat_template="Q {{ messages[0].content }}{{ eos_token }}")
    assert text == "Q hi<|im_end|>"


# --- what a template sees ---------------------------------------------------------------------------------


def test_tools_and_documents_are_lists_or_nothing():
    template = "{{ tools | tojson }} {{ documents is none }}{{ messages[0].content }}"
    assert render(template) == "null Truehi"
    expected = '[{"type": "function", "function": {"name": "f", "description": "<b>é</b>"}}]'
    assert render(template, tools=TOOLS, documents=[{"text": "d"}]) == f"{expected} Falsehi"


def test_null_content_beside_calls_is_null_only_for_templates_that_ask():
    call = [{"role": "assistant", "content": None, "tool_calls": [CALL]}]
    assert render("{% for m in messages %}{{ m['content'] + '|' }}{% endfor %}", call) == "|"
    asks = (
        "{% for m in messages %}{% if m['content'] is none %}CALL{% else %}x{% endif %}{% endfor %}"
    )
    assert render(asks, call) == "CALL"
    assert render(asks, [{"role": "assistant", "content": None}]) == "x"


def test_reasoning_of_the_history_has_the_names_that_templates_read():
    message = [{"role": "assistant", "content": "x", "reasoning_content": "because"}]
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert render("{{ messages[0]." + name + " }}", message) == "because"


@pytest.mark.parametrize("value", [5, True, {"a": 1}, ["x"], "half \ud800", {"tool_use": "\udfff"}])
def test_what_is_no_template_is_named_at_the_start(value):
    with pytest.raises(
        TokenizerLoadError, match=r"is no text but .*--chat-template FILE"
    ) as caught:
        templates_of(value)
    assert str(caught.value).isascii()


def test_a_template_for_tools_is_taken_with_tools_only():
    both = {"default": "D {{ messages[0].content }}", "tool_use": "T {{ messages[0].content }}"}
    assert render(both) == "D hi"
    assert render(both, tools=TOOLS) == "T hi"


def test_a_continued_message_keeps_its_spaces_and_must_appear():
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    assert render(template, messages, **fields) == "<user>hi</><assistant>Well, "
    parts = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]
    assert render(template, parts, **fields) == "<user>hi</><assistant>Well, "
    error = refused("{{ messages[0].content }}", messages, **fields)
    assert "continue_final_message" in error.message


def test_the_environment_is_that_of_transformers():
    template = (
        "{%- for m in messages %}\n"
        "    {%- if loop.first %}{% continue %}{% endif %}\n"
        "  {% generation %}{{ m.content | trim }}{% endgeneration %}\n"
        "{{ m | tojson(indent=2) }}{{ tools | tojson }}\n"
        "{%- endfor %}\n"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1).a }}\n"
        "{{ strftime_now('%Y')[:2] }}{{ bos_token is defined }}{% if add_generation_prompt %}go{% endif %}\n"
    )
    messages = [*HI, {"role": "assistant", "content": " <é> 'x' ", "tool_calls": [CALL]}]
    ours = render(template, messages, tools=TOOLS)
    adapted = [*HI, messages[1]]
    theirs, _ = render_jinja_template(
        [adapted], tools=TOOLS, chat_template=template, add_generation_prompt=True
    )
    assert ours == theirs[0]
