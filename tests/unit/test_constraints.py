"""Grammars checked in a child process, and bad words spelt in tokens."""

import json
import os
import signal
import time

import pytest

from engine.api.sampling import SamplingParams, StructuredOutput
from tests.unit.test_encode import limits
from tests.unit.tokenizers_for_tests import byte_fallback, byte_level, word_piece
from tokenizer_proc.constraints import Constraints
from tokenizer_proc.errors import PromptError
from tokenizer_proc.vocabulary import Vocabulary

VOCABULARY = Vocabulary(byte_level())


def make(vocabulary: Vocabulary = VOCABULARY) -> Constraints:
    return Constraints(vocabulary, limits(vocab_size=len(vocabulary)))


@pytest.fixture(scope="module")
def constraints():
    made = make()
    yield made
    made.checker.close()


def error_of(constraints: Constraints, kind: str, value: str) -> PromptError:
    form = StructuredOutput(kind, value, "guided_x")  # type: ignore[arg-type]
    with pytest.raises(PromptError) as caught:
        constraints.resolve(SamplingParams(structured=form))
    return caught.value


GOOD = [
    ("json", "{}"),
    ("json", json.dumps({"type": "array", "items": {"type": "number"}, "minItems": 2})),
    ("json", json.dumps({"$defs": {"a": {"type": "null"}}, "$ref": "#/$defs/a"})),
    ("regex", r"a/b\/c\d+|\n"),
    ("choice", json.dumps(["yes", 'a "quoted" \\ one', "\u00e9\U0001f600\n"])),
    ("grammar", 'start: "a" rest\nrest: %json {"type": "object"} | /[0-9]+/'),
]


@pytest.mark.parametrize(("kind", "value"), GOOD)
def test_good_forms_pass(constraints, kind, value):
    form = StructuredOutput(kind, value, "guided_x")
    assert not constraints.is_known(form)
    params = constraints.resolve(SamplingParams(structured=form))
    assert params.structured == StructuredOutput(kind, value), "without the field's name"
    assert constraints.is_known(form)


BAD = [
    ("regex", "(", "unclosed group"),
    ("regex", "(?=a)a", "look-around"),
    ("regex", "", "empty"),
    ("json", '{"type": "strin"}', "Invalid type"),
    ("json", '{"$ref": "#/$defs/none"}', "/$defs/none"),
    ("json", '{"$ref": "#"}', "no text satisfies it"),
    ("json", '{"not": {"type": "string"}}', "not"),
    ("json", "[]", "object"),
    ("json", '{"a": ', "no JSON"),
    ("json", '{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    ("json", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
    ("json", json.dumps({"x-guidance": 3}), "x-guidance"),
    ("choice", "[]", "nothing to choose"),
    ("choice", '[""]', "nothing to choose"),
    ("choice", '["a", 1]', "strings"),
    ("grammar", "start: missing", 'unknown name: "missing"'),
    ("grammar", "root ::= a", "1("),
    ("grammar", "start: " + "(" * 2000 + '"a"' + ")" * 2000, "nested"),
    ("regex", "a" * 300_000, "bytes"),
]


@pytest.mark.parametrize(("kind", "value", "why"), BAD)
def test_bad_forms_are_explained(constraints, kind, value, why):
    error = error_of(constraints, kind, value)
    assert (error.status, error.code, error.param) == (400, "invalid_schema", "guided_x")
    assert error.message.startswith("guided_x cannot be used as ")
    assert why in error.message
    assert "no_forcing" not in error.message, "ours, not theirs"
    assert len(error.message) < 400


def test_what_would_take_too_long_ends_in_time(constraints):
    started = time.monotonic()
    error = error_of(constraints, "regex", "(?:a|b)?" * 25_000)
    assert time.monotonic() - started < 5
    assert "to compile" in error.message
    good = StructuredOutput("regex", "after[0-9]")
    assert constraints.resolve(SamplingParams(structured=good)).structured == good


def test_a_child_that_dies_is_replaced(constraints):
    constraints.resolve(SamplingParams(structured=StructuredOutput("regex", "before")))
    pid = constraints.checker.process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    constraints.resolve(SamplingParams(structured=StructuredOutput("regex", "afterwards")))
    assert constraints.checker.process.pid != pid


def test_deep_recursion_is_survived(constraints):
    """Chains of rules are followed on the stack, thousands deep."""
    rules = "".join(f'a{i}: "x" a{i + 1}\n' for i in range(8000))
    form = StructuredOutput("grammar", f'start: a0\n{rules}a8000: "x"\n')
    constraints.checker.check(form)


def test_no_process_is_started_for_nothing():
    made = make()
    made.resolve(SamplingParams(bad_words=["dog"]))
    assert made.checker.process is None


def test_vocabularies_without_bytes_are_refused():
    error = error_of(make(Vocabulary(word_piece())), "regex", "a")
    assert (error.code, error.param) == ("unsupported_value", "guided_x")


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback(), byte_fallback(strip=False)])
@pytest.mark.parametrize("word", ["dog", " dog", "Straße", "😀", "the lazy dog"])
def test_bad_words_are_spelt_with_and_without_a_space(tokenizer, word):
    vocabulary = Vocabulary(tokenizer)
    spellings = make(vocabulary).spellings(word)
    pieces = vocabulary.everything.pieces
    texts = {b"".join(pieces[t] for t in ids).decode() for ids in spellings}
    assert texts == ({word} if word.startswith(" ") else {word, " " + word})
    params = make(vocabulary).resolve(SamplingParams(bad_words=[word]))
    assert params.bad_word_ids == spellings


def test_nothing_left_to_allow_is_refused():
    made = make()
    eos = limits().eos_token_ids[0]
    for params in (
        SamplingParams(allowed_token_ids=[eos], min_tokens=1),
        SamplingParams(allowed_token_ids=[300], stop_token_ids=[300], min_tokens=2),
    ):
        with pytest.raises(PromptError) as caught:
            made.resolve(params)
        assert caught.value.param == "allowed_token_ids"
    made.resolve(SamplingParams(allowed_token_ids=[eos]))
