"""Time as text: which token stands for which moment.

    word       " the" | " of" | " and" | ...     the vocabulary's plain words, by token id
    moment       0    |  50   |  100   | ...     microseconds, modulo the number of words

The engine's stand-in answers with the word of the moment at which it sends. Whoever reads the text knows
how old it is, without anything beside it on the wire. All processes of a host share the clock.
"""

import json
import re
from pathlib import Path

TICK_NS = 50_000
MIN_WORDS = 8  # fewer would tell no time at all
WORD = re.compile("[\u0120\u2581]([a-z]+)")  # how the two families of vocabularies write a space


class WordClock:
    """A word comes round again after `period_s`: no age can be told that is longer."""

    def __init__(self, tokenizer_dir: str) -> None:
        """Raises ValueError where the vocabulary has too few words."""
        tokenizer = json.loads((Path(tokenizer_dir) / "tokenizer.json").read_text("utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if not isinstance(vocabulary, dict):
            raise ValueError(f"{tokenizer_dir}: expected a BPE tokenizer, whose words have ids")
        words = [(token, m[1]) for name, token in vocabulary.items() if (m := WORD.fullmatch(name))]
        if len(words) < MIN_WORDS:
            raise ValueError(f"{tokenizer_dir}: {len(words)} plain words are too few for a clock")
        words.sort()
        self.token_ids = [token for token, _ in words]
        self.ticks = {word.encode(): tick for tick, (_, word) in enumerate(words)}

    @property
    def period_s(self) -> float:
        return len(self.token_ids) * TICK_NS * 1e-9

    def token_at(self, now_ns: int) -> int:
        return self.token_ids[now_ns // TICK_NS % len(self.token_ids)]

    def age_ns(self, word: bytes, now_ns: int) -> int:
        """How long ago `word` was sent, to a tick. Raises KeyError for any other text."""
        return (now_ns // TICK_NS - self.ticks[word]) % len(self.token_ids) * TICK_NS
