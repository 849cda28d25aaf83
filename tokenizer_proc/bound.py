"""How many tokens a text has at least, told from its length alone.

Encoding some MB takes seconds, for which others would wait: a text that cannot fit into the context
anyway is better refused before.
"""

import json
from dataclasses import dataclass

from tokenizer_proc.vocabulary import SENTENCEPIECE_SPACE, Vocabulary, VocabularyKind

BYTES_OF_UTF8 = frozenset(bytes([b]) for b in range(0xF5) if b not in (0xC0, 0xC1))
NFC_SHRINKING = 4  # at most: three bytes become one where U+212A, the sign of Kelvin, becomes K


@dataclass(frozen=True)
class TokenBound:
    """No token stands for more than `longest` bytes of UTF-8, those in `dropped` not counted."""

    longest: int
    dropped: bytes = b""  # bytes that have no token, which byte-level BPE leaves out

    def least_tokens(self, text: bytes) -> int:
        return -(-len(text.translate(None, self.dropped)) // self.longest)


def token_bound(vocabulary: Vocabulary) -> TokenBound | None:
    """None if there is no certain bound.

    So it is where text may vanish before tokens are made: in a normalizer, in a split that drops what
    separates, in an added token that takes the spaces around it, in a run of unknown characters.
    """
    backend, pieces = vocabulary.backend, vocabulary.everything.pieces
    dropped = b"".join(sorted(BYTES_OF_UTF8.difference(pieces)))
    if vocabulary.kind is VocabularyKind.OTHER:
        return None
    if dropped and vocabulary.kind is not VocabularyKind.BYTE_LEVEL:
        return None
    if any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values()):
        return None
    if backend.pre_tokenizer is not None and b'"Removed"' in backend.pre_tokenizer.__getstate__():
        return None
    longest = max(map(len, pieces))
    if backend.normalizer is not None:
        spec = json.loads(backend.normalizer.__getstate__())
        for step in spec["normalizers"] if spec["type"] == "Sequence" else [spec]:
            if step["type"] == "NFC":
                longest *= NFC_SHRINKING
            elif step["type"] == "Replace" and step["content"] == SENTENCEPIECE_SPACE:
                continue
            elif step["type"] != "Prepend":
                return None
    return TokenBound(longest, dropped)
