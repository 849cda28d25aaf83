"""Log-probabilities: texts and true bytes of tokens, and when entries are released."""

import numpy as np

from engine.api.messages import FinishReason, TokenLogprobs
from tests.unit.test_output import TOKENIZER, VOCABULARY, add, ids_of, step
from tests.unit.tokenizers_for_tests import byte_fallback, word_piece
from tokenizer_proc.logprobs import token_text, with_text
from tokenizer_proc.output import OutputProcessor
from tokenizer_proc.vocabulary import Vocabulary

EOS = TOKENIZER.eos_token_id


def token_bytes(vocabulary, token_id, skip_special_tokens):
    """What the token adds to the text."""
    return vocabulary.table(skip_special_tokens).pieces[token_id]


def entry(index, top_ids=(), top_logprobs=()):
    return TokenLogprobs(
        index=index,
        sampled=-0.5 - index,
        rank=1,
        top_ids=np.array(top_ids, np.int32).tobytes(),
        top_logprobs=np.array(top_logprobs, np.float32).tobytes(),
    )


def run(ids, end=None, **params):
    """Feed ids one a step. Returns a list of (text, token ids of the entries released with it)."""
    processor = OutputProcessor(VOCABULARY)
    add(processor, logprobs=0, **params)
    result = []
    for number, token_id in enumerate(ids):
        row = ([token_id], *end) if end and number == len(ids) - 1 else [token_id]
        deltas, _ = processor.process(step({1: row}, logprobs=[entry(0)]))
        if not deltas.req_ids:
            break
        released = [e.chosen.token_id for _, entries in deltas.logprobs for e in entries]
        result.append((deltas.texts[0], released))
    return result


def test_texts_and_bytes_of_byte_level_tokens():
    [space_dog] = [i for i, name in enumerate(VOCABULARY.names) if name == "Ġdog"]
    lead = TOKENIZER.convert_tokens_to_ids("ð")
    assert (token_text(VOCABULARY, space_dog), token_bytes(VOCABULARY, space_dog, True)) == (
        " dog",
        b" dog",
    )
    assert token_text(VOCABULARY, lead) == "bytes:\\xf0"
    assert token_bytes(VOCABULARY, lead, True) == b"\xf0"


def test_a_special_token_has_a_name_and_bytes_only_if_it_is_shown():
    assert token_text(VOCABULARY, EOS) == "<|im_end|>"
    assert token_bytes(VOCABULARY, EOS, skip_special_tokens=True) == b""
    assert token_bytes(VOCABULARY, EOS, skip_special_tokens=False) == b"<|im_end|>"


def test_texts_and_bytes_of_byte_fallback_tokens():
    tokenizer = byte_fallback()
    vocabulary = Vocabulary(tokenizer)
    byte = tokenizer.convert_tokens_to_ids("<0xE4>")
    assert (token_text(vocabulary, byte), token_bytes(vocabulary, byte, True)) == (
        "bytes:\\xe4",
        b"\xe4",
    )
    [word] = [i for i, name in enumerate(vocabulary.names) if name == "\u2581dog"]
    assert (token_text(vocabulary, word), token_bytes(vocabulary, word, True)) == (" dog", b" dog")


def test_other_vocabularies_show_the_token_alone():
    tokenizer = word_piece()
    vocabulary = Vocabulary(tokenizer)
    word = tokenizer.convert_tokens_to_ids("dog")
    assert (token_text(vocabulary, word), token_bytes(vocabulary, word, True)) == ("dog", b"dog")


def test_alternatives_come_best_first_and_infinity_becomes_a_number():
    [a, b] = ids_of("a")[0], ids_of("b")[0]
    result = with_text(entry(0, [b, a], [-0.25, -np.inf]), a, VOCABULARY, True)
    assert (result.chosen.token, result.chosen.logprob) == ("a", -0.5)
    assert [(e.token_id, e.token, e.logprob) for e in result.top] == [
        (b, "b", -0.25),
        (a, "a", -9999.0),
    ]


def test_one_entry_a_token_with_its_text():
    ids = ids_of("hello world")
    result = run(ids, (FinishReason.LENGTH, None))
    assert [released for _, released in result] == [[i] for i in ids]


def test_the_entries_of_a_character_come_with_the_character():
    ids = TOKENIZER.convert_tokens_to_ids(list("ðŁĳ©"))
    assert run(ids) == [("", []), ("", []), ("", []), ("👩", ids)]
    cut = run(ids[:2], (FinishReason.LENGTH, None))
    assert cut == [("", []), ("\ufffd", ids[:2])]


def test_entries_of_held_text_are_held():
    ids = [*ids_of("x"), *ids_of("E"), *ids_of("N"), *ids_of("x")]
    assert run(ids, stop=["END"]) == [("x", ids[:1]), ("", []), ("", []), ("ENx", ids[1:])]


def test_entries_of_the_stop_string_are_left_out():
    [x, e, n, d] = [ids_of(c)[0] for c in "xEND"]
    result = run([x, e, n, d], stop=["END"])
    assert result == [("x", [x]), ("", []), ("", []), ("", [])]
    included = run([x, e, n, d], stop=["END"], include_stop_str_in_output=True)
    assert included == [("x", [x]), ("E", [e]), ("N", [n]), ("D", [d])]


def test_a_token_of_which_a_part_is_shown_keeps_its_entry():
    [dog] = [i for i, name in enumerate(VOCABULARY.names) if name == "Ġdog"]
    assert run([dog], stop=["og"]) == [(" d", [dog])]


def test_the_end_of_sequence_has_no_entry_but_shown_stop_tokens_have():
    [x, y] = [ids_of(c)[0] for c in "xy"]
    assert run([x, EOS], (FinishReason.STOP, EOS)) == [("x", [x]), ("", [])]
    params = {"stop_token_ids": [y]}
    assert run([x, y], (FinishReason.STOP, y), **params) == [("x", [x]), ("", [])]
    params["include_stop_str_in_output"] = True
    assert run([x, y], (FinishReason.STOP, y), **params) == [("x", [x]), ("y", [y])]


def test_a_special_token_without_text_keeps_its_entry():
    [x] = ids_of("x")
    assert run([x, EOS, x], ignore_eos=True) == [("x", [x]), ("", []), ("x", [EOS, x])]
    last = run([x, EOS], (FinishReason.LENGTH, None), ignore_eos=True)
    assert last == [("x", [x]), ("", [EOS])]


def test_positions_point_into_the_flat_column():
    """Entry positions count over all requests of a step, unknown ones included."""
    processor = OutputProcessor(VOCABULARY)
    add(processor, 2, logprobs=0)
    [x, y, z] = [ids_of(c)[0] for c in "xyz"]
    deltas, _ = processor.process(step({1: [x, y], 2: [z]}, logprobs=[entry(0), entry(2)]))
    [(row, [only])] = deltas.logprobs
    assert (deltas.req_ids[row], only.chosen.token_id, only.chosen.logprob) == (2, z, -2.5)
