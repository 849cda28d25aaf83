"""The pieces of one choice, as they come from the stream, to deltas and to the final message."""

from collections.abc import Sequence
from typing import Any

from engine.api.messages import TokenLogprobText
from server.answer.call_format import CallFormat
from server.answer.events import CallArguments, CallBegin, Event, Reasoning, Text, merged
from server.answer.parser import AnswerFormat
from server.stream import Choice, Piece


class AnswerReader:
    """Reads one choice with a parser of its own, and counts its reasoning tokens."""

    def __init__(self, fmt: AnswerFormat, choice: Choice) -> None:
        self._choice = choice
        self._parser = fmt.parser(choice.stream.prompt_ends[choice.prompt_index])
        self._logprobs: list[TokenLogprobText] = []

    def read(self, piece: Piece) -> list[Event]:
        events: list[Event] = []
        self._logprobs += piece.logprobs
        for text, num_tokens in piece.parts:
            is_reasoning = self._parser.is_reasoning
            events += self._parser.feed(text)
            if is_reasoning and self._parser.has_reasoned:
                self._choice.reasoning_tokens = num_tokens
        if piece.finish_reason is not None:
            if self._parser.is_reasoning and self._parser.has_reasoned:
                self._choice.reasoning_tokens = self._choice.num_tokens
            events += self._parser.finish()
        return merged(events)

    def take_logprobs(self) -> list[TokenLogprobText]:
        """Those of the pieces read; text that is held back keeps its own waiting."""
        entries, self._logprobs = self._logprobs, []
        return entries

    def finish_reason(self, reason: str | None) -> str | None:
        """`tool_calls` for an answer that ended by itself and has calls; cut ones stay `length`."""
        return "tool_calls" if reason == "stop" and self._parser.has_calls else reason


class DeltaWriter:
    """Events of one choice to the `delta` objects of its chunks."""

    def __init__(self, calls: CallFormat | None, reasoning_fields: Sequence[str]) -> None:
        self._calls = calls
        self._reasoning_fields = reasoning_fields

    def delta(self, event: Event) -> dict[str, Any]:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return dict.fromkeys(self._reasoning_fields, text)
            case CallBegin(index, name):
                assert self._calls is not None
                return {"tool_calls": [{"index": index, **new_call(self._calls, name)}]}
            case CallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def message(self, events: list[Event], prefix: str = "") -> dict[str, Any]:
        """The whole answer. `prefix` stands before its content."""
        content = prefix + "".join(e.text for e in events if isinstance(e, Text))
        reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        calls: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                assert self._calls is not None
                calls.append(new_call(self._calls, event.name))
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message.update(dict.fromkeys(self._reasoning_fields, reasoning))
        if calls:
            message["tool_calls"] = calls
        return message


def new_call(fmt: CallFormat, name: str) -> dict[str, Any]:
    return {
        "id": fmt.new_id(),
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
