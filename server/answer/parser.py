"""The parser of one answer: reasoning first, then text and calls.

It runs in the server, since its result is HTTP's business alone: text is what the other processes
deal in, and they need not know which tools a request has.
"""

from collections.abc import Collection
from dataclasses import dataclass

from server.answer.call_format import CallFormat
from server.answer.calls import CallParser
from server.answer.events import CallArguments, CallBegin, Event, Reasoning, Text, merged
from server.answer.reasoning import ReasoningFormat, ReasoningParser


@dataclass(frozen=True)
class AnswerFormat:
    """How to read the answers to one request. Without any format they are plain text."""

    calls: CallFormat | None = None
    names: Collection[str] = ()  # of the tools
    max_calls: int | None = None  # further calls are left out
    reasoning: ReasoningFormat | None = None

    @property
    def is_plain(self) -> bool:
        return self.calls is None and self.reasoning is None

    def parser(self, prompt_end: str) -> "AnswerParser":
        return AnswerParser(self, prompt_end)


class AnswerParser:
    """Any division of a text into pieces gives the same events, but for where they are divided."""

    def __init__(self, fmt: AnswerFormat, prompt_end: str) -> None:
        self._max_calls = fmt.max_calls
        self._calls = CallParser(fmt.calls, fmt.names) if fmt.calls else None
        self._reasoning: ReasoningParser | None = None
        if fmt.reasoning is not None:
            is_open = fmt.reasoning.is_open(prompt_end)
            self._reasoning = ReasoningParser(fmt.reasoning, is_open)

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    @property
    def has_reasoned(self) -> bool:
        """There was reasoning, perhaps of nothing but space."""
        return self._reasoning is not None and self._reasoning.is_begun

    @property
    def is_reasoning(self) -> bool:
        """The reasoning may go on."""
        return self._reasoning is not None and not self._reasoning.is_done

    def feed(self, text: str) -> list[Event]:
        """What is certain with this text."""
        return self._read(text, is_final=False)

    def finish(self) -> list[Event]:
        """What was held back, when no more text comes."""
        return self._read("", is_final=True)

    def _read(self, text: str, is_final: bool) -> list[Event]:
        events: list[Event] = []
        if self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text, is_final)
            events.append(Reasoning(reasoning))
        if self._calls is None:
            events.append(Text(text))
        else:
            events += self._calls.feed(text)
            if is_final:
                events += self._calls.finish()
        if self._max_calls is not None:
            events = [event for event in events if not self._is_beyond(event)]
        return merged(events)

    def _is_beyond(self, event: Event) -> bool:
        return isinstance(event, CallBegin | CallArguments) and event.index >= (
            self._max_calls or 0
        )
