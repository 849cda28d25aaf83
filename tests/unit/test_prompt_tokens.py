"""Prompts beside their text: tokens with log-probabilities, truncation, choices computed once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.messages import AddRequest, FinishReason, PromptLogprobs, TextPrompt
from engine.api.sampling import SamplingParams
from tests.unit.test_encode import ENCODER, LIMITS, error_of, limits, make, tokens
from tests.unit.test_output import EOS, TOKENIZER, VOCABULARY, ids_of, step
from tests.unit.test_token_logprobs import entry
from tests.unit.tokenizers_for_tests import byte_fallback, byte_level, word_piece
from tokenizer_proc.encode import Encoder
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.prompt_tokens import PromptTokens, token_texts
from tokenizer_proc.vocabulary import Vocabulary

# --- texts of tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("make_tokenizer", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", ["hello  world", " a", "👩‍👩‍👧 über 东京\n", "naïve 🇩🇪", "x"])
def test_texts_of_tokens_are_the_text(make_tokenizer, text):
    tokenizer = make_tokenizer()
    encoded = Encoder(tokenizer).encode(TextPrompt(text=text))
    texts = token_texts(Vocabulary(tokenizer), encoded.token_ids, encoded.added)
    assert len(texts) == len(encoded)
    assert "".join(texts) == text


def test_added_tokens_have_no_text_but_written_ones_do():
    tokenizer = byte_fallback()
    encoded = Encoder(tokenizer).encode(TextPrompt(text="the</s>"))
    assert encoded.added == (0,)
    texts = token_texts(Vocabulary(tokenizer), encoded.token_ids, encoded.added)
    assert (texts[0], texts[-1]) == ("", "</s>")
    assert Encoder(tokenizer).encode(TextPrompt(text="the", add_special_tokens=False)).added == ()


def test_other_vocabularies_spell_as_their_own_decoder():
    tokenizer = word_piece()
    ids = np.array(tokenizer.encode("The dog sleeps; the fox"), np.int32)
    assert "".join(token_texts(Vocabulary(tokenizer), ids)) == tokenizer.decode(ids)


def test_a_character_belongs_to_the_token_that_completes_it():
    ids = np.array(TOKENIZER.convert_tokens_to_ids(list("ðŁĳ©")), np.int32)
    assert token_texts(VOCABULARY, ids) == ["", "", "", "👩"]
    assert token_texts(VOCABULARY, ids[:2]) == ["", "\ufffd"]


# --- entries ------------------------------------------------------------------------------------------


def columns(first, count, k=1, req_id=1):
    """The engine's numbers: the token in place p has logprob -p, and p % 7 is the best there."""
    places = np.arange(first, first + count)
    return PromptLogprobs(
        req_id=req_id,
        first=first,
        logprobs=(-places).astype(np.float32).tobytes(),
        ranks=(places + 1).astype(np.int32).tobytes(),
        top_ids=np.repeat(places % 7, k).astype(np.int32).tobytes(),
        top_logprobs=np.full(count * k, -0.5, np.float32).tobytes(),
    )


def prompt_tokens(texts=None):
    return PromptTokens(VOCABULARY, np.arange(10, 30, dtype=np.int32), texts)


@pytest.mark.parametrize("k", [0, 1, 3])
def test_entries_come_in_order_the_first_without_numbers(k):
    texts = [f"t{i}" for i in range(20)]
    prompt = prompt_tokens(texts)
    entries = prompt.take(columns(1, 7, k)) + prompt.take(columns(8, 12, k))
    assert [e.chosen.token_id for e in entries] == list(range(10, 30))
    assert [e.text for e in entries] == texts
    assert [e.rank for e in entries] == [0, *range(2, 21)]
    assert [e.chosen.logprob for e in entries[1:]] == [-float(p) for p in range(1, 20)]
    assert [[t.token_id for t in e.top] for e in entries[1:]] == [[p % 7] * k for p in range(1, 20)]
    assert entries[0].top == []


def test_what_is_told_again_is_given_out_once():
    prompt = prompt_tokens()
    assert [e.rank for e in prompt.first()] == [0]
    assert prompt.first() == []
    assert [e.chosen.token_id for e in prompt.take(columns(1, 5))] == [11, 12, 13, 14, 15]
    assert prompt.take(columns(1, 3)) == []
    assert [e.chosen.token_id for e in prompt.take(columns(4, 4))] == [16, 17]


def test_ranked_lists_the_best_and_the_token_itself_once():
    [found] = prompt_tokens().take(columns(1, 1, k=2))[1:]
    assert [(rank, e.token_id) for rank, e in found.ranked(2)] == [(1, 1), (2, 1), (2, 11)]
    found.top = [found.chosen]
    assert [(rank, e.token_id) for rank, e in found.ranked(1)] == [(2, 11)]  # equals share a rank
    assert [(rank, e.token_id) for rank, e in found.ranked(0)] == [(2, 11)]


# --- output -------------------------------------------------------------------------------------------


def add(processor, *, copies=1, wants_token_ids=False, prompt_texts=None, **params):
    request = AddRequest(
        req_id=1,
        token_ids=np.arange(10, 14, dtype=np.int32).tobytes(),
        block_names=b"",
        params=SamplingParams(**{"max_tokens": 100} | params),
        arrival_ns=0,
    )
    processor.add(request, copies, wants_token_ids, prompt_texts)


def test_a_prompt_is_told_of_as_the_engine_gets_on():
    processor = OutputProcessor(VOCABULARY)
    add(processor, prompt_logprobs=1, prompt_texts=["a", "b", "c", "d"])
    rows = [
        step({}, started=[(1, 0, 5)]),
        step({}, prompt_logprobs=[columns(1, 2)]),
        step({1: ids_of("x")}, prompt_logprobs=[columns(3, 1)]),
        step({}, prompt_logprobs=[columns(1, 3, req_id=9)]),
    ]
    told = [processor.process(row)[0].prompt_logprobs for row in rows]
    assert [[(r, [e.text for e in entries]) for r, entries in row] for row in told] == [
        [(1, ["a"])],
        [(1, ["b", "c"])],
        [(1, ["d"])],
        [],
    ]


def test_a_prompt_without_completion_ends_with_no_text():
    processor = OutputProcessor(VOCABULARY)
    add(processor, prompt_logprobs=0, max_tokens=0, logprobs=0)
    end = step({1: ([], FinishReason.LENGTH, None)}, prompt_logprobs=[columns(1, 3)])
    deltas, aborts = processor.process(end)
    assert (deltas.texts, deltas.counts, aborts) == ([""], [0], [])
    assert deltas.finished == [(0, FinishReason.LENGTH, None)]
    assert len(deltas.prompt_logprobs[0][1]) == 4
    assert processor.live == {}


def test_a_prompt_that_cannot_be_told_of_ends_its_request_alone(caplog):
    processor = OutputProcessor(VOCABULARY)
    add(processor, prompt_logprobs=1, copies=2)
    gap = columns(3, 1)  # tokens 1 and 2 are missing
    deltas, aborts = processor.process(step({1: ids_of("x")}, prompt_logprobs=[gap]))
    assert deltas.finished == [(0, FinishReason.ERROR, None), (1, FinishReason.ERROR, None)]
    assert (deltas.req_ids, deltas.texts, aborts) == ([1, 2], ["", ""], [1])
    assert processor.live == {}


def test_copies_get_the_same_under_ids_of_their_own():
    processor = OutputProcessor(VOCABULARY)
    add(processor, copies=3, wants_token_ids=True, logprobs=0)
    [x, y] = ids_of("x") + ids_of("y")
    first, _ = processor.process(step({1: [x]}, logprobs=[entry(0)], started=[(1, 2, 3)]))
    last, _ = processor.process(step({1: ([y], FinishReason.LENGTH, None)}, logprobs=[entry(0)]))
    assert first.started == [(1, 2, 3), (2, 2, 3), (3, 2, 3)]
    for deltas, text, token_id in ((first, "x", x), (last, "y", y)):
        assert (deltas.req_ids, deltas.texts, deltas.counts) == ([1, 2, 3], [text] * 3, [1] * 3)
        assert [row for row, _ in deltas.logprobs] == [0, 1, 2]
        assert deltas.token_ids == [(i, np.int32(token_id).tobytes()) for i in range(3)]
    assert first.finished == first.logprob_sums == []
    assert last.finished == [(i, FinishReason.LENGTH, None) for i in range(3)]
    assert last.logprob_sums == [(i, -1.0) for i in range(3)]
    assert processor.live == {}


def test_copies_end_together_by_stop_string_abort_and_refusal():
    for ending in ("stop", "abort", "rejected"):
        processor = OutputProcessor(VOCABULARY)
        add(processor, copies=2, stop=["x"])
        if ending == "stop":
            deltas, aborts = processor.process(step({1: ids_of("x")}))
            assert (deltas.req_ids, aborts) == ([1, 2], [1])
            assert [(i, s) for i, _, s in deltas.finished] == [(0, "x"), (1, "x")]
        elif ending == "abort":
            assert processor.forget([1, 2]) == [1]
        else:
            [error] = processor.rejected(step({}, rejected=[(1, "queue_full", "later")]))
            assert (error.req_id, error.n) == (1, 2)
        assert processor.live == {}


def test_ids_are_those_that_are_counted_the_end_included():
    processor = OutputProcessor(VOCABULARY)
    add(processor, wants_token_ids=True, logprobs=0, stop=["b"])
    [a, b] = ids_of("a") + ids_of("b")
    deltas, _ = processor.process(step({1: [a, b, a, a]}))
    assert deltas.token_ids == [(0, np.array([a, b], np.int32).tobytes())]
    assert deltas.counts == [2]
    processor = OutputProcessor(VOCABULARY)
    add(processor, wants_token_ids=True, logprobs=0)
    row = step({1: ([a, EOS], FinishReason.STOP, EOS)}, logprobs=[entry(0), entry(1)])
    deltas, _ = processor.process(row)
    assert deltas.token_ids == [(0, np.array([a, EOS], np.int32).tobytes())]
    assert deltas.logprob_sums == [(0, -0.5 - 1.5)]  # what was not shown counts, too
    assert [len(entries) for _, entries in deltas.logprobs] == [1]


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(TOKENIZER) - 1), min_size=1, max_size=24),
    stop=st.lists(st.sampled_from(["e", "he", "\ufffd", " th", "o w"]), max_size=2),
    include=st.booleans(),
    skip_special=st.booleans(),
    group=st.integers(1, 5),
)
def test_texts_of_entries_are_the_text(ids, stop, include, skip_special, group):
    """However tokens are grouped and wherever the text is cut, each piece of text has its entry."""
    processor = OutputProcessor(VOCABULARY)
    add(
        processor,
        logprobs=0,
        stop=stop,
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special,
    )
    text, entries = "", ""
    for first in range(0, len(ids), group):
        part = ids[first : first + group]
        row = (part, FinishReason.LENGTH, None) if first + group >= len(ids) else part
        deltas, _ = processor.process(step({1: row}, logprobs=[entry(i) for i in range(len(part))]))
        text += "".join(deltas.texts)
        entries += "".join(e.text for _, found in deltas.logprobs for e in found)
        assert text.startswith(entries), "an entry came before its text"
    assert entries == text


# --- requests -----------------------------------------------------------------------------------------


def test_equal_choices_are_one_request():
    for params in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}):
        prepared = make(tokens(8), n=3, **params)
        assert (len(prepared.requests), prepared.copies) == (1, 3)
    prepared = make(tokens(8), n=3, temperature=1.0)
    assert (len(prepared.requests), prepared.copies) == (3, 1)


def test_only_the_first_choice_scores_the_prompt():
    requests = make(tokens(8), n=3, temperature=1.0, prompt_logprobs=2).requests
    assert [r.params.prompt_logprobs for r in requests] == [2, None, None]


def test_truncation_keeps_the_last_tokens():
    ids = np.frombuffer(tokens(40).token_ids, np.int32)
    for keep, left in ((5, 5), (-1, 32 - 4), (27, 27)):
        prepared = make(tokens(40), max_tokens=4, truncate_prompt_tokens=keep, want_text=True)
        assert prepared.token_ids.tolist() == ids[-left:].tolist()
        assert prepared.prompt_text == ENCODER.decode(ids[-left:].tolist())
    assert len(make(tokens(40), max_tokens=None, truncate_prompt_tokens=-1).token_ids) == 31
    assert len(make(tokens(40), max_tokens=0, truncate_prompt_tokens=-1).token_ids) == 32
    assert len(make(tokens(9), max_tokens=4, truncate_prompt_tokens=20).token_ids) == 9
    assert error_of(tokens(40), max_tokens=4, truncate_prompt_tokens=30).param == "max_tokens"


def test_truncation_takes_texts_that_are_far_too_long():
    text = "word " * 5000
    prepared = make(TextPrompt(text=text), max_tokens=2, truncate_prompt_tokens=10)
    assert prepared.token_ids.tolist() == TOKENIZER.encode(text)[-10:]
    bos = make(
        TextPrompt(text="the lazy dog"),
        LIMITS,
        Encoder(byte_fallback()),
        max_tokens=2,
        truncate_prompt_tokens=2,
    )
    assert bos.added == ()  # the first token went with the rest


def test_the_prompt_alone_may_be_as_long_as_the_context():
    assert make(tokens(32), max_tokens=0).requests[0].params.max_tokens == 0
    error = error_of(tokens(33), max_tokens=0)
    assert error.code == "context_length_exceeded"
    assert "at least 1 token" in error.message
    small = limits(num_blocks=4)
    assert make(tokens(16), small, max_tokens=0).requests[0].params.max_tokens == 0
    assert error_of(tokens(17), small, max_tokens=0).code == "exceeds_kv_capacity"


def test_a_default_of_max_tokens_is_lowered_to_what_fits():
    small = limits(num_blocks=4)
    for length, where, fits in (
        (10, LIMITS, 16),
        (20, LIMITS, 12),
        (31, LIMITS, 1),
        (10, small, 7),
    ):
        prepared = make(tokens(length), where, clamp=True, max_tokens=16)
        assert prepared.requests[0].params.max_tokens == fits
    assert error_of(tokens(32), clamp=True, max_tokens=16).code == "context_length_exceeded"
    assert error_of(tokens(17), small, clamp=True, max_tokens=16).code == "exceeds_kv_capacity"
