"""Rows with grammars, allowed ids and bad words: what comes out, and that nobody else notices."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.api.messages import FinishReason, TokenPieces
from engine.api.sampling import StructuredOutput
from tests.engine_cpu.harness import Collected, Harness
from tests.engine_cpu.tiny_models import EOS_ID, VOCAB_SIZE, make_tiny
from tokenizer_proc.vocabulary import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "kind": {"enum": ["x", "y"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None},
}
JSON = StructuredOutput("json", json.dumps(SCHEMA))
REGEX = StructuredOutput("regex", r"[a-f]{2,30}-\d{3}")
CHOICE = StructuredOutput("choice", '["yes", "no", "perhaps", "\u00e9t\u00e9 \\"q\\""]')
CALL = StructuredOutput(
    "grammar",
    'start: "<call>" arguments "</call>"\n'
    'arguments: %json {"type": "object", "properties": {"n": {"type": "integer"}}, '
    '"required": ["n"], "additionalProperties": false}\n',
)
LETTERS = StructuredOutput("regex", "[a-z]+")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def vocabulary(model: str) -> Vocabulary:
    return Vocabulary(AutoTokenizer.from_pretrained(model), VOCAB_SIZE)


@pytest.fixture
def start(model: str, vocabulary: Vocabulary):
    """Makes an engine that knows the vocabulary."""

    def build(**settings: object) -> Harness:
        harness = Harness(Path(model), **settings)
        pieces, special = vocabulary.everything.pieces, sorted(vocabulary.special_ids)
        harness.loop.take([TokenPieces(pieces=pieces, special_ids=special)])
        return harness

    return build


@pytest.fixture
def text_of(vocabulary: Vocabulary):
    def text(result: Collected) -> str:
        ids = [t for t in result.token_ids if t != EOS_ID]
        return b"".join(vocabulary.everything.pieces[t] for t in ids).decode()

    return text


def add_mixed(harness: Harness, count: int, **params: Any) -> None:
    """Requests of all kinds, each with its own seed; every fifth is free."""
    forms = [JSON, REGEX, CHOICE, CALL, None]
    for i in range(count):
        more = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 60, **params}
        harness.add(i + 1, [5, 6, 7 + i % 3, 9], seed=i, structured=forms[i % 5], **more)


def check_valid(text: str, kind: int) -> None:
    if kind == 0:
        value = json.loads(text)
        assert set(value) == {"id", "kind"}
        assert isinstance(value["id"], int)
        assert value["kind"] in ("x", "y")
    elif kind == 1:
        assert re.fullmatch(REGEX.value, text), text
    elif kind == 2:
        assert text in json.loads(CHOICE.value)
    else:
        found = re.fullmatch(r"<call>(.*)</call>", text, re.DOTALL)
        assert found, text
        assert list(json.loads(found[1])) == ["n"]


def test_texts_have_the_form_asked_for(start, text_of):
    """At temperature 1 on a random model: whatever it says, the form holds."""
    harness = start(max_num_seqs=16)
    add_mixed(harness, 60, max_tokens=100)
    results = harness.run()
    kinds = set()
    for req_id, result in results.items():
        kind = (req_id - 1) % 5
        if kind == 4:
            continue
        if result.finish is FinishReason.LENGTH:  # a long number, or much white space
            assert len(result.token_ids) == 100
            continue
        assert result.finish is FinishReason.STOP
        check_valid(text_of(result), kind)
        kinds.add(kind)
    assert kinds == {0, 1, 2, 3}
    texts = {text_of(results[i]) for i in range(2, 61, 5)}
    assert len(texts) >= 3, "different seeds, different texts"


def outcomes(harness: Harness) -> dict[int, tuple[list[int], FinishReason | None]]:
    return {i: (r.token_ids, r.finish) for i, r in harness.run().items()}


def test_order_of_computing_changes_nothing(start):
    def run(**settings: object) -> tuple[dict[int, Any], Harness]:
        harness = start(**{"max_num_seqs": 8, **settings})
        add_mixed(harness, 20, bad_word_ids=[[40], [41, 42]])
        return outcomes(harness), harness

    undisturbed, _ = run(overlap="off")
    overlapped, _ = run(overlap="on")
    assert overlapped == undisturbed
    chunked, _ = run(overlap="on", max_num_batched_tokens=8, max_num_seqs=3)
    assert chunked == undisturbed
    for overlap in ("on", "off"):
        few = {"num_blocks": 14, "block_size": 8, "admission": "greedy"}
        preempted, harness = run(overlap=overlap, **few)
        assert harness.scheduler.preemptions > 3
        assert preempted == undisturbed


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_neighbours_notice_nothing(start, overlap):
    def neighbours(structured: StructuredOutput | None) -> list[Collected]:
        harness = start(overlap=overlap, max_num_seqs=8)
        for i in range(6):
            mine = {"structured": structured} if i % 2 else {}
            harness.add(i + 1, [9, 8, 7, i + 3], temperature=i / 4, seed=i, logprobs=2, **mine)
        results = harness.run()
        return [results[i] for i in (1, 3, 5)]

    alone, beside = neighbours(None), neighbours(LETTERS)
    for one, other in zip(alone, beside, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == other.logprobs


def test_log_probabilities_are_those_of_the_model(start):
    harness = start()
    free = harness.generate([5, 6, 7], logprobs=3, max_tokens=1)
    bound = harness.generate([5, 6, 7], logprobs=3, max_tokens=1, structured=REGEX)
    assert bound.top_logprobs == free.top_logprobs
    assert bound.logprobs[0] <= free.logprobs[0]


def test_the_end_of_a_text(start, text_of):
    harness = start()
    sample = {"temperature": 1.0, "ignore_eos": False, "structured": LETTERS}
    ends = [harness.generate([5, 6, 7], seed=s, max_tokens=200, **sample) for s in range(10)]
    assert any(r.finish is FinishReason.STOP for r in ends), "it may end after each letter"
    assert all(re.fullmatch(r"[a-z]+", text_of(r)) for r in ends)
    bias = {EOS_ID: 100.0}
    late = harness.generate([5, 6, 7], min_tokens=9, max_tokens=20, logit_bias=bias, **sample)
    assert len(late.token_ids) == 10
    assert late.token_ids[-1] == EOS_ID
    endless = harness.generate(
        [5, 6, 7], max_tokens=20, logit_bias=bias, **{**sample, "ignore_eos": True}
    )
    assert endless.finish is FinishReason.LENGTH
    assert EOS_ID not in endless.token_ids
    complete = harness.generate([5, 6, 7], min_tokens=50, max_tokens=60, structured=CHOICE)
    assert complete.finish is FinishReason.STOP, "nothing may follow, whatever min_tokens says"
    assert text_of(complete) in json.loads(CHOICE.value)


def test_allowed_token_ids(start):
    harness = start()
    result = harness.generate(
        [5, 6], temperature=1.0, allowed_token_ids=[40, 77, 511], max_tokens=30
    )
    assert set(result.token_ids) <= {40, 77, 511}
    assert len(set(result.token_ids)) > 1
    one = harness.generate([5, 6], allowed_token_ids=[77], max_tokens=5)
    assert one.token_ids == [77] * 5


def test_contradictions_end_the_text(start):
    """Without anything that may follow the text is over; that is no error of the model's."""
    harness = start()
    digits_only = [t for t in range(VOCAB_SIZE) if t in (20, 21)]
    result = harness.generate([5, 6], allowed_token_ids=digits_only, structured=LETTERS)
    assert (result.finish, result.token_ids) == (FinishReason.STOP, [])
    pair = harness.generate([5, 6], allowed_token_ids=[40], bad_word_ids=[[40, 40]])
    assert (pair.finish, pair.token_ids) == (FinishReason.STOP, [40])
    assert harness.loop.nan_events == 0


def test_bad_words(start):
    harness = start()
    free = harness.generate([5, 6, 7], max_tokens=30)
    first, (a, b) = free.token_ids[0], free.token_ids[3:5]
    bound = harness.generate([5, 6, 7], max_tokens=30, bad_word_ids=[[first]])
    assert first not in bound.token_ids
    bound = harness.generate([5, 6, 7], max_tokens=30, bad_word_ids=[[a, b]])
    assert bound.token_ids[:4] == free.token_ids[:4], "only what would complete it is forbidden"
    assert bound.token_ids[4] != b
    for i in range(len(bound.token_ids) - 1):
        assert bound.token_ids[i : i + 2] != [a, b]


def test_a_grammar_that_gives_up_fails_alone(start):
    """Each token doubles what has to be remembered, until a limit of the compiler is reached."""
    ambiguous = StructuredOutput("grammar", 'start: ((("a"{1,1000}){1,1000}){1,1000}){1,1000}\n')
    harness = start(overlap="on")
    harness.add(1, [5, 6, 7], structured=ambiguous, max_tokens=400)
    harness.add(2, [5, 6, 7], max_tokens=50)
    results = harness.run()
    assert (results[1].finish, results[1].rejected) == (None, "invalid_schema")
    assert results[2].finish is FinishReason.LENGTH
    assert harness.loop.nan_events == 0
    harness.assert_empty()


def optional_properties(count: int) -> StructuredOutput:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(count)}}
    return StructuredOutput("json", json.dumps({**schema, "additionalProperties": False}))


def test_how_many_optional_properties_an_object_may_have(start, text_of, caplog):
    """Each may come next, all are followed at once, and the time that takes has a bound."""
    harness = start()
    params = {"temperature": 1.0, "max_tokens": 60}
    result = harness.generate([5, 6, 7], structured=optional_properties(700), **params)
    assert (result.rejected, text_of(result)[:1]) == (None, "{")
    result = harness.generate([5, 6, 7], structured=optional_properties(2000), **params)
    assert result.rejected == "invalid_schema"
    assert "a grammar gave up: Parser Error: Current row has 7999 items" in caplog.text
    harness.assert_empty()


def test_unusable_grammars_are_refused(start):
    harness = start()
    for i, value in enumerate(("(", "x", "(?=a)")):
        harness.add(i + 1, [5, 6], structured=StructuredOutput("regex", value), max_tokens=3)
    results = harness.run()
    assert [results[i].rejected for i in (1, 2, 3)] == ["invalid_schema", None, "invalid_schema"]
    assert len(results[2].token_ids) == 1


class Panic(BaseException):
    """As bindings to Rust raise them: no Exception."""


@pytest.mark.parametrize("fault", [MemoryError("no room"), Panic("index out of bounds")])
def test_a_fault_of_ours_while_compiling_is_not_the_client_s(start, fault, caplog, monkeypatch):
    def compile_grammar(*_: object) -> None:
        raise fault

    harness = start()
    with monkeypatch.context() as patched:
        patched.setattr("engine.runner.grammars.compile_grammar", compile_grammar)
        assert harness.generate([5, 6], structured=REGEX, max_tokens=3).rejected == "internal_error"
    assert f"a grammar could not be compiled: {fault!r}" in caplog.text
    again = harness.generate([5, 6], structured=REGEX, max_tokens=3)
    assert (again.rejected, len(again.token_ids)) == (None, 3), "the fault is not remembered"
    harness.assert_empty()


def test_requests_may_be_aborted_while_their_grammar_is_compiled(start):
    slow = StructuredOutput("regex", "(?:a|b)?" * 5000)
    harness = start()
    harness.add(1, [5, 6], structured=slow)
    harness.add(2, [5, 6], max_tokens=5)
    harness.step()
    assert harness.results[2].token_ids, "others do not wait"
    assert not harness.results[1].token_ids
    harness.abort(1)
    results = harness.run()
    assert results[1].finish is FinishReason.ABORT
    assert len(results[2].token_ids) == 5
    assert not harness.loop.gate.held
