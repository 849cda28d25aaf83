"""Incremental detokenisation equals the tokenizer's own decoding, and never shows half a character."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tokenizers_for_tests import byte_fallback, byte_level, word_piece
from tokenizer_proc.detokenize import ByteStream, WindowStream, text_stream
from tokenizer_proc.vocabulary import Vocabulary, VocabularyKind

BYTE_LEVEL = byte_level()
FALLBACK = byte_fallback()
BYTE_VOCABULARY = Vocabulary(BYTE_LEVEL)
FALLBACK_VOCABULARY = Vocabulary(FALLBACK)

HARD_TEXTS = [
    "plain words, punctuation! and  double   spaces\n\ttabs\r\n",
    "漢字かな交じり文。𠮷野家 㐂 한국어",
    "👩‍👩‍👧‍👦 👨🏽‍🚀 😀😃 🏳️‍🌈",
    "🇩🇪🇯🇵🇧🇷 flags",
    "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 combining",
    "שלום עולם \u200fمرحبا\u200e بالعالم",
    "नमस्ते สวัสดี தமிழ் ខ្មែរ",
    "\u200b\ufeff\u2028 invisible \x00\x01\x7f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \ufffd literal",
    " leading and trailing ",
    "",
]


def stream_text(vocabulary, ids, skip, prompt_ids=()):
    stream = text_stream(vocabulary, skip, prompt_ids)
    return "".join([*map(stream.push, ids), stream.finish()])


def whole_text(tokenizer, ids, skip):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def random_texts(count):
    """Texts over all planes of Unicode, biased towards characters that need several tokens."""
    rng = random.Random(7)
    ranges = [(0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x590, 0x6FF), (0x900, 0x97F)]
    ranges += [(0x4E00, 0x9FFF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF), (0x200B, 0x200F)]
    for _ in range(count):
        picks = rng.choices(ranges, k=rng.randint(1, 30))
        yield "".join(chr(rng.randint(*pick)) for pick in picks)


def test_kinds_are_recognised():
    assert BYTE_VOCABULARY.kind is VocabularyKind.BYTE_LEVEL
    assert FALLBACK_VOCABULARY.kind is VocabularyKind.BYTE_FALLBACK
    assert Vocabulary(word_piece()).kind is VocabularyKind.OTHER
    assert isinstance(text_stream(BYTE_VOCABULARY, True), ByteStream)
    assert isinstance(text_stream(Vocabulary(word_piece()), True), WindowStream)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_hard_texts_come_back_unchanged(text, skip):
    ids = BYTE_LEVEL.encode(text)
    assert stream_text(BYTE_VOCABULARY, ids, skip) == text


def test_300_unicode_texts_come_back_unchanged():
    for text in random_texts(300):
        ids = BYTE_LEVEL.encode(text)
        assert stream_text(BYTE_VOCABULARY, ids, True) == text


@given(ids=st.lists(st.integers(0, len(BYTE_VOCABULARY) - 1), max_size=60), skip=st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_ids_decode_like_the_tokenizer(ids, skip):
    """Random ids are mostly invalid UTF-8, with special and added tokens in between."""
    assert stream_text(BYTE_VOCABULARY, ids, skip) == whole_text(BYTE_LEVEL, ids, skip)


@given(text=st.text(max_size=40), data=st.data())
@settings(max_examples=200, deadline=None)
def test_text_cut_anywhere_decodes_like_the_tokenizer(text, data):
    ids = BYTE_LEVEL.encode(text)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    assert stream_text(BYTE_VOCABULARY, ids, True) == whole_text(BYTE_LEVEL, ids, True)


def test_no_half_character_is_shown_while_it_may_be_completed():
    ids = [BYTE_LEVEL.convert_tokens_to_ids(c) for c in "ðŁĳ©"]  # the four bytes of U+1F469
    assert None not in ids
    stream = text_stream(BYTE_VOCABULARY, True)
    assert [stream.push(i) for i in ids] == ["", "", "", "👩"]
    assert stream.finish() == ""
    stream = text_stream(BYTE_VOCABULARY, True)
    assert [stream.push(i) for i in ids[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"  # cut by max_tokens: the same as decoding the whole


def test_a_skipped_special_token_inside_a_character_does_not_break_it():
    lead, *rest = BYTE_LEVEL.convert_tokens_to_ids(list("ðŁĳ©"))
    ids = [lead, BYTE_LEVEL.eos_token_id, *rest]
    assert stream_text(BYTE_VOCABULARY, ids, True) == "👩" == whole_text(BYTE_LEVEL, ids, True)
    assert stream_text(BYTE_VOCABULARY, ids, False) == whole_text(BYTE_LEVEL, ids, False)


def test_special_tokens_are_shown_or_skipped_and_added_tokens_always_shown():
    ids = BYTE_LEVEL.encode("a<|im_end|>b<tool> call")
    assert stream_text(BYTE_VOCABULARY, ids, True) == "ab<tool> call"
    assert stream_text(BYTE_VOCABULARY, ids, False) == "a<|im_end|>b<tool> call"


def test_ids_of_a_padded_embedding_have_no_text():
    vocabulary = Vocabulary(BYTE_LEVEL, size=len(BYTE_VOCABULARY) + 5)
    ids = [*BYTE_LEVEL.encode("ab"), len(vocabulary) - 1, *BYTE_LEVEL.encode("c")]
    assert stream_text(vocabulary, ids, True) == "abc"


# --- byte fallback --------------------------------------------------------------------------------


@pytest.mark.parametrize("strip", [True, False])
def test_byte_fallback_equals_the_tokenizer_on_valid_text(strip):
    tokenizer = byte_fallback(strip=strip)
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.kind is VocabularyKind.BYTE_FALLBACK
    for text in [*HARD_TEXTS, *random_texts(200)]:
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            for skip in (True, False):
                assert stream_text(vocabulary, ids, skip) == whole_text(tokenizer, ids, skip)


def test_byte_fallback_cut_in_a_character_equals_the_tokenizer():
    ids = FALLBACK.encode("Hello 😀")
    for cut in range(len(ids)):
        streamed = stream_text(FALLBACK_VOCABULARY, ids[:cut], True)
        assert streamed == whole_text(FALLBACK, ids[:cut], True)


def test_byte_fallback_keeps_the_space_after_a_prompt():
    prompt, word = FALLBACK.encode("Hello"), FALLBACK.encode("world", add_special_tokens=False)
    assert stream_text(FALLBACK_VOCABULARY, word, True) == "world"
    assert stream_text(FALLBACK_VOCABULARY, word, True, prompt) == " world"
    assert stream_text(FALLBACK_VOCABULARY, word, True, [FALLBACK.bos_token_id]) == "world"


def test_byte_fallback_keeps_valid_characters_of_a_broken_run():
    byte = {value: FALLBACK.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    good, bad = [byte[b] for b in "你".encode()], [byte[0xFF], byte[0xE4]]
    assert stream_text(FALLBACK_VOCABULARY, good + bad, True) == "你\ufffd\ufffd"


# --- everything else --------------------------------------------------------------------------------


def test_word_pieces_get_their_spaces():
    tokenizer = word_piece()
    vocabulary = Vocabulary(tokenizer)
    for text in ("hello world", "The quick brown fox jumps", "Numbers and code"):
        ids = tokenizer.encode(text)
        assert stream_text(vocabulary, ids, True) == whole_text(tokenizer, ids, True)
        for cut in range(1, len(ids)):
            joined = whole_text(tokenizer, ids[:cut], True) + stream_text(
                vocabulary, ids[cut:], True, ids[:cut]
            )
            assert joined == whole_text(tokenizer, ids, True)


def test_the_window_decoder_agrees_with_the_byte_table_on_text():
    """It must serve byte vocabularies too, as the fallback when the self-check fails."""
    for text in HARD_TEXTS[:8]:
        ids = BYTE_LEVEL.encode(text)
        stream = WindowStream(BYTE_LEVEL.backend_tokenizer, True, [])
        assert "".join([*map(stream.push, ids), stream.finish()]) == text


def test_the_window_stays_small():
    tokenizer = word_piece()
    stream = text_stream(Vocabulary(tokenizer), True)
    separator = tokenizer.eos_token_id
    for token_id in tokenizer.encode("hello world") * 50 + [separator] * 100:
        stream.push(token_id)
        assert len(stream.window) < 64


def test_a_tokenizer_that_decodes_otherwise_falls_back(caplog):
    """Same decoder name, but another alphabet: found by comparing, not by name."""
    from tokenizers import decoders

    tokenizer = byte_fallback()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", "_"), decoders.ByteFallback(), decoders.Fuse()]
    )
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.kind is VocabularyKind.OTHER
    assert "decodes otherwise" in caplog.text
    ids = tokenizer.encode("Hello world")
    assert stream_text(vocabulary, ids, True) == whole_text(tokenizer, ids, True)


def test_special_tokens_may_be_shown_one_by_one():
    start, end = (BYTE_VOCABULARY.names.index(name) for name in ("<|im_start|>", "<|im_end|>"))
    letter = BYTE_VOCABULARY.names.index("a")
    for shown, expected in (([], "a"), (["<|im_start|>"], "<|im_start|>a"), (["absent"], "a")):
        stream = text_stream(BYTE_VOCABULARY, True, shown_special=shown)
        assert "".join(stream.push(i) for i in (start, letter, end)) + stream.finish() == expected
    other = Vocabulary(word_piece())
    separator = other.names.index("[SEP]")
    assert text_stream(other, True, shown_special=["[SEP]"]).push(separator).strip() == "[SEP]"
    assert text_stream(other, True).push(separator) == ""
