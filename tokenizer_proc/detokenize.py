"""Token ids to text, a token at a time, without ever emitting half a character.

    token bytes   F0 9F | 91 A9 | 20 68 | 69
    pushed text    ""   |  "👩" |  " h" | "i"

The texts pushed, and the one from `finish`, concatenate to the text of all tokens. For byte-level
vocabularies that is exactly the tokenizer's own decoding, U+FFFD for invalid bytes included: bytes
that may still become a character are held, bytes that cannot are replaced at once.
"""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenizer_proc.vocabulary import PieceTable, Vocabulary, VocabularyKind

REPLACEMENT = "\ufffd"
REPLACE_EACH_BYTE = "sluice.replace_each_byte"
CONTEXT_TOKENS = 8  # of the prompt, for spaces between words
MAX_HELD_TOKENS = 16  # a character has at most 4 bytes; beyond this U+FFFD is meant literally


class TextStream(Protocol):
    def push(self, token_id: int) -> str:
        """Text that became certain with this token, perhaps ""."""
        ...

    def finish(self) -> str:
        """What is still held, with U+FFFD for an incomplete character. Push nothing afterwards."""
        ...


def text_stream(
    vocabulary: Vocabulary,
    skip_special_tokens: bool,
    prompt_ids: Sequence[int] | npt.NDArray[np.int32] = (),
    shown_special: Sequence[str] = (),
) -> TextStream:
    """The right stream for a vocabulary, continuing after `prompt_ids` (none: at the text's start).

    `shown_special`: special tokens that are shown all the same; a vocabulary whose own decoder is used
    shows all of them, if it has one of these.
    """
    if vocabulary.kind is VocabularyKind.OTHER:
        recent = [int(token_id) for token_id in prompt_ids[-CONTEXT_TOKENS:]]
        skips_all = skip_special_tokens and not vocabulary.special_among(shown_special)
        return WindowStream(vocabulary.backend, skips_all, recent)
    table = vocabulary.table(skip_special_tokens, shown_special)
    if vocabulary.kind is VocabularyKind.BYTE_LEVEL:
        return ByteStream(table, "replace")
    at_start = not any(table.pieces[i] for i in prompt_ids)
    return ByteStream(table, REPLACE_EACH_BYTE, vocabulary.strips_first_space and at_start)


class ByteStream:
    """For vocabularies whose tokens are bytes: a table look-up and an incremental UTF-8 decoder.

    SentencePiece decoders drop one space at the start of a text (`strip_first_space`), which the
    encoder had put there. Within a run of byte tokens with both valid characters and invalid bytes
    they replace the whole run; this stream keeps the valid characters, since they were already sent.
    """

    def __init__(self, table: PieceTable, errors: str, strip_first_space: bool = False) -> None:
        self.pieces = table.pieces
        self.texts = table.texts
        self.errors = errors
        self.strip_first_space = strip_first_space
        self.held = b""  # start of a character that is not complete

    def push(self, token_id: int) -> str:
        text = self.texts[token_id]
        if self.held or text is None:
            data = self.held + self.pieces[token_id]
            text, used = codecs.utf_8_decode(data, self.errors, False)
            self.held = data[used:]
        return self._strip(text) if self.strip_first_space else text

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self.held, self.errors, True)
        self.held = b""
        return self._strip(text) if self.strip_first_space else text

    def _strip(self, text: str) -> str:
        if text:
            self.strip_first_space = False
        return text.removeprefix(" ")


class WindowStream:
    """For all other vocabularies: decode a window of recent tokens twice and emit the difference.

    The window starts one emission back, so that a token is seen with its left neighbour (spaces of
    WordPiece, Metaspace); its cost does not grow with the length of the text.
    """

    def __init__(self, backend: Any, skip_special_tokens: bool, context: list[int]) -> None:
        self.backend = backend
        self.skip_special_tokens = skip_special_tokens
        self.window = context
        self.num_emitted = len(self.window)  # leading tokens of the window whose text is out

    def push(self, token_id: int) -> str:
        self.window.append(token_id)
        return self._emit(final=len(self.window) - self.num_emitted > MAX_HELD_TOKENS)

    def finish(self) -> str:
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._decode(self.window[: self.num_emitted])
        text = self._decode(self.window)
        if text.startswith(before):
            text = text[len(before) :]
        else:  # a decoder that rewrites what came before; that part is out already
            text = self._decode(self.window[self.num_emitted :])
        if text.endswith(REPLACEMENT) and not final:
            return ""
        if text:
            self.window = self.window[self.num_emitted :]
            self.num_emitted = len(self.window)
        elif final:  # tokens without text are no context for later ones
            del self.window[self.num_emitted :]
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self.backend.decode(token_ids, skip_special_tokens=self.skip_special_tokens)


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Error handler: one U+FFFD per byte, as SentencePiece decoders do, not one per sequence."""
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)
