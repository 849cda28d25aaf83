"""Log-probabilities of tokens, with the tokens as text and bytes."""

import numpy as np

from engine.api.messages import LogprobEntry, TokenLogprobs, TokenLogprobText
from tokenizer_proc.vocabulary import Vocabulary

LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


def with_text(
    logprobs: TokenLogprobs, token_id: int, vocabulary: Vocabulary, skip_special_tokens: bool
) -> TokenLogprobText:
    """Add texts and bytes to the engine's numbers about the generated token `token_id`."""
    top_ids = np.frombuffer(logprobs.top_ids, dtype="<i4").tolist()
    top_logprobs = np.frombuffer(logprobs.top_logprobs, dtype="<f4").tolist()
    pieces = vocabulary.table(skip_special_tokens).pieces
    return TokenLogprobText(
        chosen=token_entry(token_id, logprobs.sampled, vocabulary, pieces),
        top=[
            token_entry(top_id, logprob, vocabulary, pieces)
            for top_id, logprob in zip(top_ids, top_logprobs, strict=True)
        ],
        rank=logprobs.rank,
    )


def token_entry(
    token_id: int, logprob: float, vocabulary: Vocabulary, pieces: list[bytes]
) -> LogprobEntry:
    """`pieces`: what tokens add to the text, by id."""
    text = vocabulary.everything.texts[token_id]
    return LogprobEntry(
        token_id=token_id,
        token=text or token_text(vocabulary, token_id),
        logprob=logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB,
        bytes=pieces[token_id],
    )


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    """The token as text; its bytes as `bytes:\\xNN...` if they are not whole characters."""
    text = vocabulary.everything.texts[token_id]
    if text is None:
        pieces = vocabulary.everything.pieces[token_id]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in pieces)
    return text or vocabulary.name(token_id)
