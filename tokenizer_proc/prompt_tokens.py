"""The tokens of a prompt as text, for `echo`, and with the engine's log-probabilities."""

import numpy as np
import numpy.typing as npt

from engine.api.messages import PromptLogprobs, TokenLogprobs, TokenLogprobText
from tokenizer_proc.detokenize import text_stream
from tokenizer_proc.logprobs import with_text
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
        self.token_ids = token_ids.tolist()
        self.texts = texts
        self.num_taken = 0

    def first(self) -> list[TokenLogprobText]:
        """The first token, which nothing predicts; [] if it is out already."""
        if self.num_taken:
            return []
        nothing = TokenLogprobs(index=0, sampled=0.0, rank=0, top_ids=b"", top_logprobs=b"")
        return [self._entry(nothing)]

    def take(self, columns: PromptLogprobs) -> list[TokenLogprobText]:
        """The tokens that the engine reports, less those that are out already."""
        logprobs = np.frombuffer(columns.logprobs, "<f4").tolist()
        ranks = np.frombuffer(columns.ranks, "<i4").tolist()
        stride = len(columns.top_ids) // len(logprobs)  # bytes a token, of ids and floats alike
        entries = self.first()
        assert columns.first <= self.num_taken, "prompt tokens are missing"
        for i in range(self.num_taken - columns.first, len(logprobs)):
            best = slice(i * stride, (i + 1) * stride)
            numbers = TokenLogprobs(
                index=0,
                sampled=logprobs[i],
                rank=ranks[i],
                top_ids=columns.top_ids[best],
                top_logprobs=columns.top_logprobs[best],
            )
            entries.append(self._entry(numbers))
        return entries

    def _entry(self, numbers: TokenLogprobs) -> TokenLogprobText:
        place = self.num_taken
        self.num_taken += 1
        entry = with_text(numbers, self.token_ids[place], self.vocabulary, False)
        if self.texts is not None:
            entry.text = self.texts[place]
        return entry
