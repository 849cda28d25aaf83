"""What each token id stands for: its name, its true bytes, its text.

Two families of vocabularies have true bytes, and between them nearly all language models:

* byte-level BPE (GPT-2, Llama 3, Qwen, ...): a token is a string over an alphabet of 256 printable
  characters, one for each byte (Radford et al. 2019, "Language Models are Unsupervised Multitask
  Learners", section 2.2). Space is written as U+0120.
* SentencePiece BPE with byte fallback (Llama 2, Mistral, Gemma): a token is text with U+2581 for a
  space, or `<0xNN>` for one byte (Kudo and Richardson 2018).

For any other vocabulary (WordPiece, Unigram) a token's text depends on its neighbours; bytes are then
those of the token decoded alone.
"""

import json
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tokenizer_proc.loading import Tokenizer, vocabulary_size

logger = logging.getLogger(__name__)

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTENCEPIECE_SPACE = "\u2581"


class VocabularyKind(Enum):
    BYTE_LEVEL = "byte-level"
    BYTE_FALLBACK = "byte fallback"
    OTHER = "other"


@dataclass(frozen=True)
class PieceTable:
    """Per token id: bytes, and text where the bytes are whole characters (else None)."""

    pieces: list[bytes]
    texts: list[str | None]


class Vocabulary:
    """Tables over all token ids of a tokenizer.

    A model may generate ids that the tokenizer does not know (rows of a padded embedding): give their
    number as `size`, or later to `pad_to`. They have no name and no text, as in the tokenizer's own
    decoding.
    """

    def __init__(self, tokenizer: Tokenizer, size: int = 0) -> None:
        backend = tokenizer.backend_tokenizer
        known = range(vocabulary_size(tokenizer))
        self.backend = backend
        self.names: list[str | None] = [backend.id_to_token(i) for i in known]
        special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
        self.special_ids = frozenset(i for i, name in enumerate(self.names) if name in special)
        decoders = decoder_chain(backend)
        self.strips_first_space = "Strip" in decoders
        self.kind = kind_of(decoders)
        self.everything = self._table()
        self.without_special = blank(self.everything, self.special_ids)
        self._partly_shown: dict[frozenset[int], PieceTable] = {}  # by the special tokens shown
        if self.kind is not VocabularyKind.OTHER and not self._agrees_with_backend():
            logger.warning(
                "tokenizer looks like %s but decodes otherwise; using its own decoder, which is "
                "slower, and token bytes in logprobs are approximate",
                self.kind.value,
            )
            self.kind = VocabularyKind.OTHER
            self.everything = self._table()
            self.without_special = blank(self.everything, self.special_ids)
        self.pad_to(size)

    def pad_to(self, size: int) -> None:
        """Cover ids up to `size` - 1."""
        missing = max(0, size - len(self.names))
        self.names.extend([None] * missing)
        self._partly_shown.clear()
        for table in (self.everything, self.without_special):
            table.pieces.extend([b""] * missing)
            table.texts.extend([""] * missing)

    def __len__(self) -> int:
        return len(self.names)

    def table(self, skip_special_tokens: bool, shown_special: Sequence[str] = ()) -> PieceTable:
        """`shown_special`: names of special tokens that are not skipped."""
        if not skip_special_tokens:
            return self.everything
        shown = self.special_among(shown_special)
        if not shown:
            return self.without_special
        table = self._partly_shown.get(shown)
        if table is None:
            table = blank(self.everything, self.special_ids - shown)
            self._partly_shown[shown] = table
        return table

    def special_among(self, names: Sequence[str]) -> frozenset[int]:
        """Ids of the special tokens with these names."""
        if not names:
            return frozenset()
        return frozenset(i for i in self.special_ids if self.names[i] in names)

    def name(self, token_id: int) -> str:
        """The vocabulary's own spelling; "" for an id without a token."""
        return self.names[token_id] or ""

    def _table(self) -> PieceTable:
        if self.kind is VocabularyKind.BYTE_LEVEL:
            pieces = [byte_level_piece(name) for name in self.names]
        elif self.kind is VocabularyKind.BYTE_FALLBACK:
            pieces = [byte_fallback_piece(name) for name in self.names]
        else:
            pieces = [
                byte_fallback_piece(name)
                if name is None or SENTENCEPIECE_SPACE in name
                else self.backend.decode([i], skip_special_tokens=False).encode()
                for i, name in enumerate(self.names)
            ]
        return PieceTable(pieces, [whole_text(piece) for piece in pieces])

    def _agrees_with_backend(self) -> bool:
        """Compare with the tokenizer's own decoding: special tokens, and random runs of whole text."""
        whole = [i for i, text in enumerate(self.everything.texts) if text]
        rng = random.Random(0)
        samples = [sorted(self.special_ids)[:64]]
        samples += [rng.choices(whole, k=32) for _ in range(32 if whole else 0)]
        for ids in samples:
            for skip in (False, True):
                ours = b"".join(self.table(skip).pieces[i] for i in ids).decode(errors="replace")
                if self.strips_first_space:
                    ours = ours.removeprefix(" ")
                if ours != self.backend.decode(ids, skip_special_tokens=skip):
                    return False
        return True


def decoder_chain(backend: Any) -> list[str]:
    """Names of the tokenizer's decoding steps, e.g. ["ByteLevel"]. [] if it has none."""
    if backend.decoder is None:
        return []
    spec = json.loads(backend.decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return [step["type"] for step in steps]


def kind_of(decoders: list[str]) -> VocabularyKind:
    if decoders == ["ByteLevel"]:
        return VocabularyKind.BYTE_LEVEL
    if decoders in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        return VocabularyKind.BYTE_FALLBACK
    return VocabularyKind.OTHER


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the rest for U+0100 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = byte_alphabet()


def byte_level_piece(name: str | None) -> bytes:
    """A name with any character outside the alphabet (an added token with a space) is plain text."""
    if name is None:
        return b""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in name])
    except KeyError:
        return name.encode()


def byte_fallback_piece(name: str | None) -> bytes:
    if name is None:
        return b""
    match = BYTE_PIECE.fullmatch(name)
    if match:
        return bytes([int(match[1], 16)])
    return name.replace(SENTENCEPIECE_SPACE, " ").encode()


def whole_text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


def blank(table: PieceTable, ids: frozenset[int]) -> PieceTable:
    """The table with `ids` rendering to nothing."""
    pieces, texts = list(table.pieces), list(table.texts)
    for token_id in ids:
        pieces[token_id], texts[token_id] = b"", ""
    return PieceTable(pieces, texts)
