"""Log-probabilities as responses write them: lists for completions, objects for chat, prompts."""

from collections.abc import Sequence
from typing import Any

from engine.api.messages import LogprobEntry, TokenLogprobText


def token_name(entry: LogprobEntry, as_ids: bool) -> str:
    """The token as text, or as `token_id:N`, which tells apart tokens of the same text."""
    return f"token_id:{entry.token_id}" if as_ids else entry.token


class CompletionLogprobs:
    """The four lists of equal length of one choice, piece by piece.

    `tokens` holds what each token adds to the text, so that together they are the text: a token that
    only begins a character has none of it. `text_offset` counts characters from the start of the text.
    """

    def __init__(self, num_top: int, as_ids: bool) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def lists(self, entries: Sequence[TokenLogprobText]) -> dict[str, list[Any]]:
        """Of the next tokens. A prompt's first token has null for what it does not have."""
        known = [None if entry.rank == 0 else entry for entry in entries]
        return {
            "tokens": [
                token_name(entry.chosen, True) if self._as_ids else entry.text for entry in entries
            ],
            "token_logprobs": [e and e.chosen.logprob for e in known],
            "top_logprobs": [e and self._top(e) for e in known],
            "text_offset": [self._next_offset(entry) for entry in entries],
        }

    def _next_offset(self, entry: TokenLogprobText) -> int:
        begin = self._offset
        self._offset += len(entry.text)
        return begin

    def _top(self, entry: TokenLogprobText) -> dict[str, float]:
        """The k best and the token itself; of two ids with the same text, the likelier one counts."""
        top: dict[str, float] = {}
        for candidate in (*entry.top[: self._num_top], entry.chosen):
            name, logprob = token_name(candidate, self._as_ids), candidate.logprob
            if logprob > top.get(name, -float("inf")):
                top[name] = logprob
        return top


def chat_logprobs(
    entries: Sequence[TokenLogprobText], num_top: int, as_ids: bool
) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(entry.chosen, as_ids),
                "top_logprobs": [_chat_entry(top, as_ids) for top in entry.top[:num_top]],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(entry: LogprobEntry, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(entry, as_ids),
        "logprob": entry.logprob,
        "bytes": list(entry.bytes),
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobText], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """By prompt token: the k best and the token itself, by id; null for the first."""
    return [
        None
        if entry.rank == 0
        else {
            str(candidate.token_id): {
                "logprob": candidate.logprob,
                "rank": rank,
                "decoded_token": candidate.token,
            }
            for rank, candidate in entry.ranked(num_top)
        }
        for entry in entries
    ]
