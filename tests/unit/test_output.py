"""Engine steps to text: finish reasons, counts, held text; the same however steps group tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.grammar import why_it_gave_up
from engine.api.messages import AddRequest, FinishReason, StepOutput, TokenLogprobs
from engine.api.sampling import SamplingParams
from tests.unit.tokenizers_for_tests import byte_level
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.vocabulary import Vocabulary

TOKENIZER = byte_level()
VOCABULARY = Vocabulary(TOKENIZER)
EOS = TOKENIZER.eos_token_id


def add(processor, req_id=1, **params):
    params = {"max_tokens": 100} | params
    request = AddRequest(
        req_id=req_id,
        token_ids=np.array([5, 6], np.int32).tobytes(),
        block_names=b"",
        params=SamplingParams(**params),
        arrival_ns=0,
    )
    processor.add(request)


def step(rows, **more):
    """rows: {req_id: ids} or {req_id: (ids, reason, stop token)}."""
    out = StepOutput(epoch=0, step_id=0, req_ids=[], counts=[], token_ids=[], finished=[], **more)
    for index, (req_id, row) in enumerate(rows.items()):
        ids, reason, stop = row if isinstance(row, tuple) else (row, None, None)
        out.req_ids.append(req_id)
        out.counts.append(len(ids))
        out.token_ids.extend(ids)
        if reason is not None:
            out.finished.append((index, reason, stop))
    return out


def generate(ids, end=None, groups=None, **params):
    """All of one request: (text, count, finish, aborted). `groups`: tokens per step."""
    processor = OutputProcessor(VOCABULARY)
    add(processor, **params)
    text, count, finished, aborted = "", 0, [], []
    groups = list(groups or [1] * len(ids))
    first = 0
    while first < len(ids):
        size = groups.pop(0) if groups else 1
        part = ids[first : first + size]
        first += size
        is_last = first >= len(ids)
        deltas, abort_ids = processor.process(step({1: (part, *end) if end and is_last else part}))
        aborted += abort_ids
        text += "".join(deltas.texts)
        count += sum(deltas.counts)
        finished += [tuple(row[1:]) for row in deltas.finished]
    if finished:
        assert processor.live == {}
    assert len(finished) <= 1, "at most one terminal message"
    return text, count, finished[0] if finished else None, aborted


def ids_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_end_of_sequence_counts_but_is_not_shown():
    ids = [*ids_of("hello"), EOS]
    for skip in (True, False):
        result = generate(ids, (FinishReason.STOP, EOS), skip_special_tokens=skip)
        assert result == ("hello", len(ids), (FinishReason.STOP, None), [])
    assert generate(ids, (FinishReason.STOP, None))[2] == (FinishReason.STOP, None)


def test_ignored_end_of_sequence_is_an_ordinary_special_token():
    ids = [*ids_of("a"), EOS, *ids_of("b")]
    end = (FinishReason.LENGTH, None)
    assert generate(ids, end, ignore_eos=True)[:2] == ("ab", 3)
    shown = generate(ids, end, ignore_eos=True, skip_special_tokens=False)
    assert shown[:2] == ("a<|im_end|>b", 3)


def test_a_stop_token_of_the_user_is_named_and_shown_only_if_asked():
    stop = ids_of("dog")[-1]
    ids = [*ids_of("hello"), stop]
    end = (FinishReason.STOP, stop)
    hidden = generate(ids, end, stop_token_ids=[stop])
    assert hidden == ("hello", len(ids), (FinishReason.STOP, stop), [])
    shown = generate(ids, end, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown[0] == TOKENIZER.decode(ids)
    assert shown[2] == (FinishReason.STOP, stop)


def test_a_stop_string_ends_the_request_and_tells_the_engine():
    ids = ids_of("one END two")
    text, count, finish, aborted = generate(ids, stop=["END"])
    assert (text, finish, aborted) == ("one ", (FinishReason.STOP, "END"), [1])
    used = next(n for n in range(len(ids)) if "END" in TOKENIZER.decode(ids[:n]))
    assert count == used, "billed up to the token that completed the stop string"


def test_a_stop_string_in_the_last_token_needs_no_abort():
    ids = ids_of("one END")
    result = generate(ids, (FinishReason.LENGTH, None), stop=["END"])
    assert result == ("one ", len(ids), (FinishReason.STOP, "END"), [])


def test_held_text_is_released_when_the_length_ends_it():
    ids = ids_of("one EN")
    result = generate(ids, (FinishReason.LENGTH, None), stop=["END"])
    assert result == ("one EN", len(ids), (FinishReason.LENGTH, None), [])


def test_half_a_character_at_the_end_becomes_a_replacement_character():
    lead = TOKENIZER.convert_tokens_to_ids("ð")
    result = generate([*ids_of("a"), lead], (FinishReason.LENGTH, None))
    assert result[0] == "a\ufffd"


def test_min_tokens_counts_tokens_and_not_text():
    ids = ids_of("a\nb\nc\nd")
    text, count, finish, _ = generate(ids, stop=["\n"], min_tokens=4)
    assert (text, count, finish) == ("a\nb", 4, (FinishReason.STOP, "\n"))


def test_later_tokens_of_a_stopped_request_are_ignored():
    processor = OutputProcessor(VOCABULARY)
    add(processor, stop=["END"])
    processor.process(step({1: ids_of("END")}))
    deltas, abort_ids = processor.process(step({1: (ids_of("more"), FinishReason.ABORT, None)}))
    assert (deltas.req_ids, deltas.finished, abort_ids) == ([], [], [])


def test_unknown_and_forgotten_requests_are_skipped_and_columns_stay_aligned():
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1)
    add(processor, 3)
    add(processor, 4)
    assert processor.forget([4, 99]) == [4]
    rows = {7: ids_of("seven"), 1: ids_of("one"), 4: ids_of("four"), 3: ids_of("three")}
    deltas, _ = processor.process(step(rows, started=[(7, 0, 1), (3, 16, 250), (4, 0, 1)]))
    assert dict(zip(deltas.req_ids, deltas.texts, strict=True)) == {1: "one", 3: "three"}
    assert deltas.counts == [len(ids_of("one")), len(ids_of("three"))]
    assert deltas.started == [(3, 16, 250)]


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_engine_aborts_and_errors_are_terminal(reason):
    processor = OutputProcessor(VOCABULARY)
    add(processor)
    deltas, abort_ids = processor.process(step({1: ([], reason, None)}))
    assert deltas.finished == [(0, reason, None)]
    assert (deltas.counts, deltas.texts, abort_ids) == ([0], [""], [])
    assert processor.live == {}


def test_rejected_requests_become_errors_once():
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1)
    add(processor, 2)
    message = step({}, rejected=[(1, "queue_full", "busy"), (2, "odd", "why"), (9, "x", "y")])
    errors = processor.rejected(message)
    assert [(e.req_id, e.n, e.status, e.code) for e in errors] == [
        (1, 1, 429, "queue_full"),
        (2, 1, 500, "odd"),
    ]
    assert processor.rejected(message) == []


def test_a_form_that_cannot_be_followed_names_its_field():
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1)
    processor.live[1].form_param = "guided_json"
    [error] = processor.rejected(step({}, rejected=[(1, "invalid_schema", "too large")]))
    assert (error.status, error.code, error.param) == (400, "invalid_schema", "guided_json")
    assert error.message == "guided_json: too large"


@pytest.mark.parametrize("copies", [1, 2])
def test_text_that_was_held_comes_before_the_error_of_a_form(copies):
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1, stop=["END"], logprobs=0)
    processor.live[1].copies = copies
    ids = ids_of("the E")
    logprobs = [
        TokenLogprobs(index=i, sampled=-0.5, rank=1, top_ids=b"", top_logprobs=b"")
        for i in range(len(ids))
    ]
    rejected = [(1, "invalid_schema", "too large")]
    deltas, abort_ids = processor.process(step({1: ids}, logprobs=logprobs, rejected=rejected))
    rows = list(zip(deltas.req_ids, deltas.texts, deltas.counts, strict=True))
    held, total = len(deltas.req_ids) - copies, -0.5 * len(ids)
    choices = range(1, copies + 1)
    assert rows[held:] == [(choice, "E", 0) for choice in choices]
    assert deltas.logprob_sums == [(held + i, total) for i in range(copies)]
    for choice in choices:
        assert "".join(text for req_id, text, _ in rows if req_id == choice) == "the E"
        entries = [e for row, e in deltas.logprobs if deltas.req_ids[row] == choice]
        assert sum(map(len, entries)) == len(ids)
    assert (deltas.finished, abort_ids) == ([], []), "the error ends it"
    [error] = processor.rejected(step({}, rejected=rejected))
    assert (error.n, processor.live) == (copies, {})


def test_requests_refused_before_their_first_token_have_no_rest():
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1, stop=["END"], logprobs=0)
    deltas, _ = processor.process(step({}, rejected=[(1, "invalid_value", "too long")]))
    assert (deltas.req_ids, deltas.logprob_sums) == ([], [])


def test_what_is_told_of_a_grammar_that_gave_up():
    error = "Parser Error: Current row has 9 items; max is 8; consider this\n<non-verbose/>"
    assert "to follow (Current row has 9 items; max is 8; consider this); make" in (
        why_it_gave_up(error)
    )
    ours = "Parser Error: token \"e\" doesn't satisfy the grammar; byte 'e' fails parse"
    assert why_it_gave_up(ours) == "", "its mask had ruled the token out"


def test_a_failure_in_one_request_ends_only_that_one(caplog):
    processor = OutputProcessor(VOCABULARY)
    add(processor, 1)
    add(processor, 2)
    rows = {1: [len(VOCABULARY) + 10], 2: ids_of("fine")}  # an id that no table has
    deltas, abort_ids = processor.process(step(rows))
    assert deltas.finished == [(0, FinishReason.ERROR, None)]
    assert deltas.texts[1] == "fine"
    assert abort_ids == [1]
    assert list(processor.live) == [2]


@given(
    ids=st.one_of(
        st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=1, max_size=30),
        st.text("abEND \n漢👩", min_size=1, max_size=20).map(ids_of),
    ),
    groups=st.lists(st.integers(1, 7), max_size=30),
    stop=st.lists(st.text("abEND \n漢", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    end=st.sampled_from([(FinishReason.LENGTH, None), (FinishReason.STOP, EOS)]),
)
@settings(max_examples=400, deadline=None)
def test_grouping_of_tokens_into_steps_changes_nothing(ids, groups, stop, include, min_tokens, end):
    params = {"stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    if end[1] is not None:
        ids = [*ids, EOS]
    one_by_one = generate(ids, end, **params)
    grouped = generate(ids, end, groups, **params)
    assert grouped[:3] == one_by_one[:3]
    if not stop:
        shown = ids[:-1] if end[1] is not None else ids
        assert one_by_one[0] == TOKENIZER.decode(
            shown, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert one_by_one[1] == len(ids)
