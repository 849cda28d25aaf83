"""Stop strings: where generated text ends, and what must be held back until that is certain.

The rules, for text that arrives in pieces (one piece a token):

* The stop string that is complete first ends the text. If several complete with the same character
  the longest wins, so that no part of any of them is left.
* The text is cut right before the stop string, or right after it if it is to be included; what the
  same token brought beyond it is dropped.
* Only the longest suffix that could still become a stop string is held back; none if stop strings
  are included, as that suffix belongs to the text either way.
* `min_tokens`: a stop string counts only if its last character came with token number `min_tokens`
  or later. It may begin earlier, so text is held back from the first token on. One that completes
  too early is ordinary text.

    stop "END", pieces   "the E" | "N" | "T E"   | "ND!"
    released             "the "  | ""  | "ENT "  | ""  and stopped

Matching is Knuth, Morris and Pratt's (1977), one automaton per stop string, so the work per character
does not depend on how often or how long the text only looks like a stop string.
"""


class StopMatcher:
    """Finds the first of `stops` in a text and tells which text may be shown already."""

    def __init__(self, stops: list[str], include_stop: bool = False) -> None:
        self.stops = sorted(stops, key=len, reverse=True)  # longest first: it wins a tie
        self.fallbacks = [fallback_table(stop) for stop in self.stops]
        self.matched = [0] * len(stops)  # characters of each stop that the text ends with
        self.first_chars = frozenset(stop[0] for stop in stops)
        self.include_stop = include_stop
        self.held = ""
        self.found: str | None = None

    def push(self, piece: str, may_stop: bool = True) -> str:
        """Returns the text that can be released. Sets `found` if a stop string completed in `piece`.

        `may_stop=False`: a stop string that completes here does not count.
        """
        assert self.found is None, "no text may follow a stop string"
        if not any(self.matched) and self.first_chars.isdisjoint(piece):
            return piece
        for position, char in enumerate(piece, 1):
            completed = self._advance(char)
            if completed is not None and may_stop:
                self.found = completed
                text = self.held + piece[:position]
                self.held = ""
                return text if self.include_stop else text[: len(text) - len(completed)]
        text = self.held + piece
        num_held = 0 if self.include_stop else max(self.matched)
        self.held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text still held, when no more will come."""
        text, self.held = self.held, ""
        return text

    def _advance(self, char: str) -> str | None:
        """Feed one character to all automata; the longest stop string that it completes, if any."""
        completed = None
        for index, stop in enumerate(self.stops):
            length = self.matched[index]
            fallback = self.fallbacks[index]
            while length and stop[length] != char:
                length = fallback[length]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                completed = completed or stop
                length = fallback[length]
            self.matched[index] = length
        return completed


def fallback_table(stop: str) -> list[int]:
    """table[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    table = [0] * (len(stop) + 1)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = table[length]
        if stop[length] == stop[position]:
            length += 1
        table[position + 1] = length
    return table
