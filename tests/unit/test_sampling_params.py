"""SamplingParams refuses what it cannot mean, naming the field."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from engine.api.grammar import GrammarError, to_lark
from engine.api.sampling import ParamError, SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n", 0, "n must be between 1 and 128, got 0"),
        ("n", 1.5, "n must be an integer, got 1.5"),
        ("temperature", float("nan"), "temperature must be between 0.0 and 2.0, got nan"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("temperature", True, "temperature must be a number, got True"),
        ("top_p", 1.01, "top_p must be between 0.0 and 1.0, got 1.01"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("top_k", 2.0, "top_k must be an integer, got 2.0"),
        (
            "repetition_penalty",
            0.0,
            "repetition_penalty must be above 0.0 and at most 10.0, got 0.0",
        ),
        ("max_tokens", -1, "max_tokens must be at least 0, got -1"),
        ("max_tokens", 10**400, "max_tokens must be between 0 and 9223372036854775807, got"),
        ("min_tokens", 17, "min_tokens must be between 0 and 16, got 17"),
        ("seed", 2**63, "seed must be between"),
        ("logprobs", 21, "logprobs must be between 0 and 20, got 21"),
        ("prompt_logprobs", 21, "prompt_logprobs must be between 0 and 20, got 21"),
        ("truncate_prompt_tokens", -2, "truncate_prompt_tokens must be at least 1, or -1 for as"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens must be at least 1, or -1 for as"),
        ("truncate_prompt_tokens", -1.0, "truncate_prompt_tokens must be an integer, got -1.0"),
        ("stop", [""], "each stop string must have 1 to 256 characters, got ''"),
        ("stop_token_ids", [3, -1], "each of stop_token_ids must be at least 0, got -1"),
        ("stop_token_ids", ["a"], "each of stop_token_ids must be an integer, got 'a'"),
        ("logit_bias", {3: 101.0}, "logit_bias must be between -100.0 and 100.0, got 101.0"),
        ("logit_bias", {"3": 1.0}, "each token id of logit_bias must be an integer, got '3'"),
        ("logit_bias", {-3: 1.0}, "each token id of logit_bias must be at least 0, got -3"),
        ("stop", ["\ud800"], r"each stop string must be text, which holds no lone surrogate: '\ud"),
        ("stop", 5, "stop must be a list, got 5"),
        ("stop_token_ids", 5, "stop_token_ids must be a list, got 5"),
        ("bad_words", "abc", "bad_words must be a list, got 'abc'"),
        ("bad_words", ["a\udfff"], "each of bad_words must be text, which holds no lone"),
        ("allowed_token_ids", 5, "allowed_token_ids must be a list, got 5"),
        ("logit_bias", [3], "logit_bias must be a dict of token ids and numbers, got [3]"),
    ],
)
def test_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ParamError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(message)


def test_integers_are_numbers_where_numbers_are_wanted() -> None:
    params = SamplingParams(temperature=1, top_p=0, frequency_penalty=-2, logit_bias={5: 3})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_none_is_the_same_as_empty() -> None:
    names = ("stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids")
    params = SamplingParams(**dict.fromkeys(names))
    assert params == SamplingParams()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_without_max_tokens_min_tokens_has_no_bound() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**9).min_tokens == 10**9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SamplingParams(structured={"json": "{}"}), "must be a StructuredOutput"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("jsn", "{}"), "kind must be one of json, regex"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("json", {"type": "object"}), "json.dumps"),  # type: ignore[arg-type]
        (lambda: StructuredOutput("choice", ["a", "b"]), "must be text"),  # type: ignore[arg-type]
    ],
)
def test_structured_output_of_a_wrong_form_is_told_at_once(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(ParamError, match=words):
        make()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", '{"const": "a\ud800"}'),
        ("regex", "[a-z]\udfff"),
        ("choice", '["a", "\ud800"]'),
        ("grammar", 'start: "\ud800"'),
    ],
)
def test_structured_output_with_a_lone_surrogate_names_field_and_remedy(
    kind: Any, value: str
) -> None:
    with pytest.raises(ParamError, match=r"lone surrogate.*remove it") as caught:
        StructuredOutput(kind, value)
    assert caught.value.param == "structured"
    assert str(caught.value).startswith("structured: ")


@pytest.mark.parametrize(
    ("kind", "value", "is_lone"),
    [
        ("json", '{"const": "a\\ud800"}', True),  # as json.dumps writes it
        ("json", '{"const": "\\\\\\uDFFFb"}', True),
        ("json", '{"const": "\\ud83d", "title": "\\ude00"}', True),
        ("choice", '["a", "\\ud800"]', True),
        ("json", '{"const": "a\\ud800"', False),  # cut short: that is told first
        ("json", "[" * 100_000, False),
    ],
)
def test_lone_surrogates_that_json_spells_are_named(kind: Any, value: str, is_lone: bool) -> None:
    with pytest.raises(GrammarError) as caught:
        to_lark(StructuredOutput(kind, value))
    assert ("lone surrogate" in str(caught.value)) == is_lone
    assert ("remove it" in str(caught.value)) == is_lone


def test_surrogate_pairs_and_their_letters_are_text() -> None:
    """A pair is one character; behind two backslashes they are six letters."""
    for value in ('{"const": "\\ud83d\\ude00"}', '{"const": "\\\\ud800"}'):
        assert to_lark(StructuredOutput("json", value))
