"""Prompts with a suffix, for models trained to fill in the middle (Bavarian et al. 2022, arXiv:2207.14255).

Such a model has tokens that mark the text before the gap, the text behind it, and the place where it is
to write. All families below were trained on documents in this order, and complete them in it:

    PREFIX text before  SUFFIX text behind  MIDDLE -> completion

A vocabulary may have the tokens though the model never learned them, as Qwen2.5 has those of
Qwen2.5-Coder: that cannot be seen here.
"""

from dataclasses import dataclass
from typing import Any

SENTINEL = "\n"  # any character that no token joins with others


@dataclass(frozen=True)
class FillInMarks:
    """Names of tokens."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()  # with which the model ends a middle, beside the end of sequence
    joins: bool = False  # the suffix follows its mark without the space that begins a text


FAMILIES = (
    # Qwen2.5-Coder (arXiv:2409.12186 and the examples of its repository), CodeGemma (arXiv:2406.11409)
    FillInMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder and StarCoder2 (arXiv:2305.06161, arXiv:2402.19173), Granite Code
    FillInMarks(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<file_sep>"),
    ),
    # DeepSeek-Coder (arXiv:2401.14196): the second mark is the gap, the last ends the document
    FillInMarks("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # Code Llama (arXiv:2308.12950, section 2.3), whose reference encodes the suffix as the rest of a word
    FillInMarks(
        "\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",), joins=True
    ),
)  # fmt: skip


class FillIn:
    """Encodes the two sides of a gap with the marks of one vocabulary."""

    def __init__(self, backend: Any, marks: FillInMarks) -> None:
        """`backend`: the Rust tokenizer, which must have the marks."""
        self.marks = marks
        self._backend = backend
        names = (marks.prefix, marks.suffix, marks.middle)
        self._prefix, self._suffix, self._middle = (backend.token_to_id(name) for name in names)
        ends = (backend.token_to_id(name) for name in (*names, *marks.ends))
        self.end_ids: list[int] = [i for i in ends if i is not None]

    def encode(self, before: str, behind: str, add_special_tokens: bool) -> tuple[list[int], int]:
        """Token ids, and how many of them at the beginning are what the tokenizer adds, such as BOS."""
        start = self._ids("", add_special_tokens)
        return [
            *start,
            self._prefix,
            *self._ids(before),
            self._suffix,
            *(self._rest_ids(behind) if self.marks.joins else self._ids(behind)),
            self._middle,
        ], len(start)

    def _ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """By the one call that lets other threads run meanwhile (see `Encoder`)."""
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _rest_ids(self, text: str) -> list[int]:
        """`text` as it is encoded behind other text: without a space of its own at the beginning."""
        return self._ids(SENTINEL + text)[len(self._ids(SENTINEL)) :]


def find_fill_in(backend: Any) -> FillIn | None:
    """None if the vocabulary has none of the known marks."""
    for marks in FAMILIES:
        names = (marks.prefix, marks.suffix, marks.middle)
        if all(backend.token_to_id(name) is not None for name in names):
            return FillIn(backend, marks)
    return None
