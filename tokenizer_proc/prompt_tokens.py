"""The tokens of a prompt as text, for `echo`, and with the engine's log-probabilities."""

import numpy as np
import numpy.typing as npt

from engine.api.messages import LogprobEntry, PromptLogprobs, TokenLogprobText
from tokenizer_proc.detokenize import text_stream
from tokenizer_proc.logprobs import token_entry
from tokenizer_proc.vocabulary import Vocabulary

Int32Array = npt.NDArray[np.int32]


def token_texts(
    vocabulary: Vocabulary, token_ids: Int32Array, added: tuple[int, ...] = ()
) -> list[str]:
    """What each token adds to the text; together they are the text that the model reads.

    `added`: places of tokens that the tokenizer added to the text, which have none.
    """
    stream = text_stream(vocabulary, skip_special_tokens=False)
    nameless = set(added)
    texts = [
        "" if place in nameless else stream.push(token_id)
        for place, token_id in enumerate(token_ids.tolist())
    ]
    texts[-1] += stream.finish()
    return texts


class PromptTokens:
    """Entries for all tokens of a prompt, in order, each given out once."""

    def __init__(
        self, vocabulary: Vocabulary, token_ids: Int32Array, texts: list[str] | None
    ) -> None:
        """`texts`: as `token_texts` gives them, if anybody wants them."""
        self.vocabulary = vocabulary
        self.pieces = vocabulary.everything.pieces
        self.token_ids = token_ids.tolist()
        self.texts = texts
        self.num_taken = 0

    def first(self) -> list[TokenLogprobText]:
        """The first token, which nothing predicts; [] if it is out already."""
        return [] if self.num_taken else [self._next(0.0, 0, [])]

    def take(self, columns: PromptLogprobs) -> list[TokenLogprobText]:
        """The tokens that the engine reports, less those that are out already."""
        logprobs = np.frombuffer(columns.logprobs, "<f4").tolist()
        ranks = np.frombuffer(columns.ranks, "<i4").tolist()
        top_ids = np.frombuffer(columns.top_ids, "<i4").reshape(len(ranks), -1).tolist()
        top_logprobs = np.frombuffer(columns.top_logprobs, "<f4").reshape(len(ranks), -1).tolist()
        entries = self.first()
        assert columns.first <= self.num_taken, "prompt tokens are missing"
        for i in range(self.num_taken - columns.first, len(ranks)):
            top = [
                token_entry(token_id, logprob, self.vocabulary, self.pieces)
                for token_id, logprob in zip(top_ids[i], top_logprobs[i], strict=True)
            ]
            entries.append(self._next(logprobs[i], ranks[i], top))
        return entries

    def _next(self, logprob: float, rank: int, top: list[LogprobEntry]) -> TokenLogprobText:
        place = self.num_taken
        self.num_taken += 1
        return TokenLogprobText(
            chosen=token_entry(self.token_ids[place], logprob, self.vocabulary, self.pieces),
            top=top,
            rank=rank,
            text="" if self.texts is None else self.texts[place],
        )
