"""What parsers make of a model's text, in the order of the text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Content for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number `index` of this answer. `CallArguments` with the same index follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments' JSON text, as the model wrote it."""

    index: int
    text: str


Event = Text | Reasoning | CallBegin | CallArguments


def merged(events: list[Event]) -> list[Event]:
    """The same events, neighbours of one kind (and of one call) joined; empty ones left out."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallBegin):
            result.append(event)
        elif not event.text:
            continue
        elif isinstance(event, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and event.index == last.index
        ):
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result
