"""Structured output as grammars of llguidance (https://github.com/guidance-ai/llguidance).

All kinds become one: a grammar in llguidance's dialect of Lark. tokenizer_proc compiles it to see
whether it can be, the engine to follow it; so both use this file. A compiled grammar tells which
tokens may come next, by the bytes of tokens: any spelling of an allowed text in tokens is allowed.

Compiling runs for a millisecond as a rule, and for seconds or through gigabytes at worst, deep in
recursion: never do it in a thread that others wait for, nor with a stack of usual size.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from engine.api.sampling import StructuredOutput

MOST_BYTES = 256 * 1024
# How many ways to go on a parser may have at one place in the text: llguidance's own limit of 2,000 is
# reached by an object of 500 optional properties, which take four each. The time for one place grows
# with the square, and everybody waits as long: grammars made for it took 10 ms a token at 2,000 and 100 at
# 5,000. What a token may cost altogether (50,000 at all places looked at, the lexer's work) is left as it is.
MOST_ITEMS_IN_ROW = 3200
STACK_BYTES = 256 * 1024 * 1024  # of threads that compile: reserved, not used
# Without it, white space between JSON tokens has no end, and a model may get lost in it.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}
# By itself llguidance would replace text that is certain by tokens of its own choice.
OPTIONS = '%llguidance {"no_forcing": true}'


PLACE = re.compile(r"^(at )?\d+\(\d+\): ")  # line and column
SOURCE_LINES = re.compile(r"\n *\d+ \| ")


class GrammarError(ValueError):
    """The grammar cannot be used. The text says why, for whoever wrote it."""


class TokenBytes:
    """A vocabulary, in the form in which llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, pieces: Sequence[bytes], special_ids: Sequence[int], eos_id: int) -> None:
        self.tokens = pieces
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, text: str) -> list[int]:
        """Texts to tokens: asked for only when text is certain, which OPTIONS switches off."""
        return []


def make_tokenizer(
    pieces: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]
) -> LLTokenizer:
    """`pieces`: each token's bytes. Takes a tenth of a second for 50,000 tokens.

    Special tokens match no text. `eos_ids` are allowed where the text may end.
    """
    eos = list(eos_ids) or [0]
    wrapper: Any = TokenBytes(list(pieces), list(special_ids), eos[0])
    return LLTokenizer(wrapper, n_vocab=len(pieces), eos_token=eos)


def compile_grammar(tokenizer: LLTokenizer, structured: StructuredOutput) -> LLMatcher:
    """A matcher before the first token. Raises GrammarError."""
    limits = LLParserLimits(max_items_in_row=MOST_ITEMS_IN_ROW, verbose_errors=False)
    matcher = LLMatcher(tokenizer, to_lark(structured), log_level=0, limits=limits)
    matcher.compute_bitmask()  # what no text satisfies shows only here
    if matcher.is_error():
        raise GrammarError(explanation(matcher.get_error(), structured.kind == "grammar"))
    return matcher


def explanation(error: str, has_lines: bool) -> str:
    """llguidance's message in one line; places in the text are told if the user wrote its lines."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    if error.startswith("panic"):
        return "it is too large"
    error = SOURCE_LINES.split(error, maxsplit=1)[0]  # an excerpt, which shows our own frame, too
    if not has_lines:
        error = PLACE.sub("", error)
    return " ".join(error.split())[:300]


def why_it_gave_up(error: str) -> str:
    """What to tell the client of a matcher's error between two tokens; "" if it is not the grammar's fault.

    What a parser meets in the text shows only there, however well the grammar compiled.
    """
    error = " ".join(error.partition("\n")[0].split())[:300]
    if "satisfy the grammar" in error:  # a token that its mask had ruled out
        return ""
    detail = re.sub("^parser error: ", "", error, flags=re.IGNORECASE)
    return (
        f"the form asked for is too large or too complex to follow ({detail}); make it smaller, with fewer "
        "optional properties or alternatives at one place"
    )


def to_lark(structured: StructuredOutput) -> str:
    """Raises GrammarError for a value that is no JSON where it has to be, or too long."""
    size = len(structured.value.encode(errors="replace"))
    if size > MOST_BYTES:
        raise GrammarError(f"it has {size} bytes, and at most {MOST_BYTES} are taken")
    return f"{LARK_OF_KIND[structured.kind](structured.value)}\n{OPTIONS}\n"


def json_to_lark(value: str) -> str:
    schema = decode_json(value)
    if not isinstance(schema, dict):
        raise GrammarError("a JSON schema has to be an object")
    schema = schema or {"type": "object"}
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise GrammarError("x-guidance has to be an object")
    schema = {**schema, "x-guidance": {**JSON_OPTIONS, **options}}
    return f"start: %json {msgspec.json.encode(schema).decode()}"


def regex_grammar(value: str) -> str:
    if not value:
        raise GrammarError("it is empty, so that only the empty text would match")
    return f"start: /{regex_to_lark(value, 'd')}/"


def choice_grammar(value: str) -> str:
    choices = decode_json(value)
    if not isinstance(choices, list) or not all(isinstance(c, str) for c in choices):
        raise GrammarError("choices have to be a list of strings")
    if not any(choices):
        raise GrammarError("there is nothing to choose from; give at least one text")
    # One terminal, as rules are costly
    texts = " | ".join(msgspec.json.encode(choice).decode() for choice in choices)
    return f"start: CHOICE\nCHOICE: {texts}"


def lark_grammar(value: str) -> str:
    return value


LARK_OF_KIND = {
    "json": json_to_lark,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": lark_grammar,
}


def decode_json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        if has_lone_surrogate(text):
            raise GrammarError(
                "it has a lone surrogate (half of a \\ud800-\\udfff pair), which no text can hold; "
                "remove it, or write the whole character"
            ) from None
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarError(f"it is no JSON that can be used: {reason}") from None


def has_lone_surrogate(text: str) -> bool:
    """Whether JSON spells one as an escape: msgspec then speaks of truncated data."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    except (ValueError, RecursionError):
        return False
    return False
