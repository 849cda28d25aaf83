"""Splits off the reasoning that a model writes before its answer, while it is being written.

    <think>                     the template may have written this already, at the end of the prompt
    Paris, surely.              reasoning
    </think>

    The capital is Paris.       rest

Space around the marks is layout and is left out. Text that is cut before </think> is all reasoning.
"""

from dataclasses import dataclass

from server.answer.calls import undecided_length


@dataclass(frozen=True)
class ReasoningFormat:
    name: str
    begin: str = "<think>"
    end: str = "</think>"
    is_unmarked: bool = False  # the model may leave out `begin`

    def is_open(self, prompt_end: str) -> bool:
        """Does an answer to a prompt that ends so begin with reasoning, without a mark?"""
        end = prompt_end.rstrip()
        if end.endswith(self.end):
            return False
        return self.is_unmarked or end.endswith(self.begin)


REASONING_FORMATS = {
    fmt.name: fmt
    for fmt in (ReasoningFormat("deepseek_r1", is_unmarked=True), ReasoningFormat("qwen3"))
}


class ReasoningParser:
    """For one answer. `is_open`: it begins inside the reasoning."""

    def __init__(self, fmt: ReasoningFormat, is_open: bool) -> None:
        self.is_done = False
        self.is_begun = False  # the text is reasoning, or was
        self._format = fmt
        self._held = ""
        self._is_open = is_open
        self._drops_space = True

    def feed(self, text: str, is_final: bool = False) -> tuple[str, str]:
        """(reasoning, rest): what is certain with this text, and with `is_final` all of it."""
        self._held += text
        reasoning = ""
        if not self.is_begun and not self.is_done:
            self._begin(is_final)
        if self.is_begun and not self.is_done:
            reasoning = self._reason(is_final)
        return reasoning, self._rest(is_final)

    def _begin(self, is_final: bool) -> None:
        mark, rest = self._format.begin, self._held.lstrip()
        if rest.startswith(mark):
            self._held = rest[len(mark) :]
            self.is_begun = True
        elif not mark.startswith(rest) or is_final:
            self.is_begun = self._is_open
            self.is_done = not self._is_open
            self._drops_space = self._is_open

    def _reason(self, is_final: bool) -> str:
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held
        held, mark = self._held, self._format.end
        at = held.find(mark)
        if at >= 0:
            self.is_done = self._drops_space = True
            self._held = held[at + len(mark) :]
            return held[:at].rstrip()
        size = len(held) if is_final else len(held) - undecided_length(held, [mark])
        self._held = held[size:]
        return held[:size]

    def _rest(self, is_final: bool) -> str:
        if not self.is_done:
            return ""
        if self._drops_space:
            self._held = self._held.lstrip()
            self._drops_space = not self._held
        rest, self._held = self._held, ""
        return rest
