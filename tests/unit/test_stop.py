"""Stop strings against a plain definition of what they mean, piece by piece."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_proc.stop import StopMatcher


def run(stops, pieces, include=False, min_tokens=0):
    """Feed pieces as tokens; returns (released per piece, the text in all, found, tokens used)."""
    matcher = StopMatcher(stops, include)
    released = []
    for number, piece in enumerate(pieces, 1):
        released.append(matcher.push(piece, number >= min_tokens))
        if matcher.found is not None:
            return released, "".join(released), matcher.found, number
    return released, "".join(released) + matcher.finish(), None, len(pieces)


def expected(stops, pieces, include=False, min_tokens=0):
    """The definition: the earliest end of a stop string that lies in an eligible token."""
    text = "".join(pieces)
    first_eligible = len("".join(pieces[: max(0, min_tokens - 1)]))
    for end in range(first_eligible + 1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            used = 0
            while len("".join(pieces[:used])) < end:
                used += 1
            return text[: end if include else end - len(stop)], stop, used
    return text, None, len(pieces)


def test_a_stop_over_several_tokens_never_leaks():
    released, text, found, used = run(["<|END|>"], ["Hi <", "|E", "ND", "|", ">", "no"])
    assert released == ["Hi ", "", "", "", ""]
    assert (text, found, used) == ("Hi ", "<|END|>", 5)


def test_held_text_is_released_when_it_turns_out_harmless():
    released, text, found, _ = run(["STOP"], ["a S", "T", "A", "STO", "RY"])
    assert released == ["a ", "", "STA", "", "STORY"]
    assert (text, found) == ("a STASTORY", None)


def test_only_what_may_become_a_stop_is_held():
    released, *_ = run(["abc"], ["xxab", "ab", "aab"])
    assert released == ["xx", "ab", "aba"]


def test_held_text_comes_out_at_the_end():
    released, text, found, _ = run(["\n\n"], ["line\n"])
    assert (released, text, found) == (["line"], "line\n", None)


def test_a_stop_inside_a_token_cuts_there():
    assert run(["DE"], ["abc ", "DEF"])[1:] == ("abc ", "DE", 2)
    assert run(["DE"], ["abc ", "DEF"], include=True)[1:] == ("abc DE", "DE", 2)
    assert run(["E"], ["DEF"])[1:] == ("D", "E", 1)


def test_nothing_is_held_when_the_stop_is_included():
    released, text, *_ = run(["END"], ["a E", "N", "Dx"], include=True)
    assert (released, text) == (["a E", "N", "D"], "a END")


def test_the_stop_that_completes_first_wins_even_if_listed_last():
    assert run(["ABCD", "BC"], ["A", "BCD"])[1:3] == ("A", "BC")
    assert run(["later", "x"], ["x later"])[1:3] == ("", "x")


def test_of_stops_that_complete_together_the_longest_wins():
    assert run(["b", "ab"], ["xa", "b"])[1:3] == ("x", "ab")


def test_a_stop_that_overlaps_itself():
    assert run(["aab"], ["aa", "ab"])[1:3] == ("a", "aab")
    assert run(["abab"], ["aba", "aba", "b"])[1:] == ("aba", "abab", 3)


def test_min_tokens_lets_early_stops_pass():
    pieces = ["a", "\n", "b", "\n", "c\n", "d"]
    assert run(["\n"], pieces, min_tokens=5)[1:] == ("a\nb\nc", "\n", 5)
    assert run(["\n"], pieces, min_tokens=6)[1:] == ("a\nb\nc\nd", None, 6)


def test_a_stop_may_begin_before_min_tokens_and_does_not_leak():
    released, text, found, used = run(["END"], ["x E", "N", "D"], min_tokens=3)
    assert (released, text, found, used) == (["x ", "", ""], "x ", "END", 3)


def test_nothing_may_follow_a_stop():
    matcher = StopMatcher(["x"])
    matcher.push("x")
    with pytest.raises(AssertionError):
        matcher.push("y")


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc\n", max_size=5), max_size=12),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
@settings(max_examples=1500, deadline=None)
def test_equals_the_definition(stops, pieces, include, min_tokens):
    released, text, found, used = run(stops, pieces, include, min_tokens)
    assert (text, found, used) == expected(stops, pieces, include, min_tokens)
    assert text.startswith("".join(released))


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=10),
)
@settings(max_examples=500, deadline=None)
def test_holds_back_exactly_the_longest_possible_beginning(stops, pieces):
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.found is not None:
            return
        longest = max(
            n
            for stop in stops
            for n in range(min(len(stop), len(seen) + 1))
            if seen.endswith(stop[:n])
        )
        assert shown == seen[: len(seen) - longest]
