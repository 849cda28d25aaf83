"""The text of one completion as it grows: detokenizing, stop strings, log-probabilities."""

from collections import deque

from engine.api.messages import TokenLogprobText
from engine.api.sampling import SamplingParams
from tokenizer_proc.detokenize import TextStream
from tokenizer_proc.stop import StopMatcher


class CompletionText:
    """Fed with tokens one by one, so the result cannot depend on how steps group them.

    A log-probability entry is released together with the last character of its token's text. A
    token that only begins a character, or that renders to nothing, goes with the character after it.
    The texts of all entries are the text.

        tokens     "Hel" | F0 9F | 98 80 | "lo\\n"
        start        0   |   3   |   3   |   4          characters before the token
        released   "Hel" |  ""   |  "😀" | "lo\\n"       entries: 1, 0, 2, 1
    """

    def __init__(self, params: SamplingParams, stream: TextStream) -> None:
        self.params = params
        self.stream = stream
        stops, include = params.stop, params.include_stop_str_in_output
        self.matcher = StopMatcher(stops, include) if stops else None
        self.num_tokens = 0  # generated, as billed
        self.num_chars = 0  # decoded, held text included
        self.num_released = 0  # characters given out
        self.waiting: deque[tuple[int, TokenLogprobText]] = deque()  # (start, entry)
        self.logprob_sum = 0.0  # over all tokens counted

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self.matcher.found if self.matcher else None

    def push(self, token_id: int, entry: TokenLogprobText | None = None) -> str:
        """Text released by the next token. Afterwards look at `stop_string`."""
        self.num_tokens += 1
        piece = self.stream.push(token_id)
        if entry is not None:
            entry.text = piece
            self.logprob_sum += entry.chosen.logprob
            self.waiting.append((self.num_chars, entry))
        return self._release(piece)

    def skip(self, logprob: float = 0.0) -> None:
        """Count a token that is not rendered: the stop or end-of-sequence token."""
        self.num_tokens += 1
        self.logprob_sum += logprob

    def finish(self) -> str:
        """All text that was held, when no more tokens come. Not after a stop string."""
        piece = self.stream.finish()
        if piece and self.waiting:
            self.waiting[-1][1].text += piece
        text = self._release(piece)  # half a character may complete a stop string
        if self.matcher is not None and self.matcher.found is None:
            text += self.matcher.finish()
        return text

    def take_entries(self, everything: bool = False) -> list[TokenLogprobText]:
        """Entries of tokens whose text was released since the last call.

        `everything`: all that wait, when all text is released; tokens without text at the end of a
        completion have no character to come with. A token that a stop string cuts keeps what is
        left of its text.
        """
        entries = []
        while self.waiting:
            start, entry = self.waiting[0]
            num_shown = self.num_released - start
            if not everything:
                if num_shown <= 0:
                    break
                if num_shown < len(entry.text):
                    if self.stop_string is None:
                        break
                    entry.text = entry.text[:num_shown]
            entries.append(entry)
            self.waiting.popleft()
        return entries

    def _release(self, piece: str) -> str:
        self.num_chars += len(piece)
        if self.matcher is not None:
            piece = self.matcher.push(piece, self.num_tokens >= self.params.min_tokens)
        self.num_released += len(piece)
        return piece
