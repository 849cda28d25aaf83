"""Reading an event stream of an OpenAI-compatible server, with next to no work per chunk.

A fast server sends tens of thousands of chunks a second, and a client that parses JSON for each would
measure itself. Nearly all that matters is whether a chunk has text, which one regular expression finds
in raw bytes. It cannot be fooled by the text itself: inside a JSON string a quote is `\\"`, so `"text":`
with a bare quote before the colon is always a key. Only lines with usage, an error or a finish_reason are
decoded; of others only the braces at both ends are looked at, as decoding cost a third of what a chunk does.
"""

import re
from array import array
from typing import Any

from scripts.loadtest.foreign import decode

# A key that holds generated text, with a value that is not empty
PIECE = re.compile(rb'"(?:text|content|reasoning_content|reasoning|arguments)":\s*"(?!")')
# What happens once in a stream. All begin with a quote, as the search for one character is quick
RARE = re.compile(rb'"(?:usage":\s*\{|error":|finish_reason":\s*")')
LONGEST_LINE = 4 << 20  # bytes


class BadStream(Exception):
    """The bytes are no stream of events."""


class StreamScan:
    """Feed it bytes with the time they came; it keeps the times of pieces of text, usage and the end."""

    __slots__ = ("done", "error", "finished", "pieces", "tail", "usage")

    def __init__(self, pieces: "array[float]") -> None:
        self.pieces = pieces
        self.tail = b""  # an incomplete line
        self.finished = False  # a finish_reason came
        self.done: float | None = None  # when [DONE] came
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None  # message of an error event

    def feed(self, data: bytes, now: float) -> None:
        """Take the next bytes, cut anywhere. Raises BadStream if a line never ends."""
        if self.tail:
            data = self.tail + data
        cut = data.rfind(b"\n") + 1
        if cut == len(data):
            self.tail = b""
        else:
            self.tail = data[cut:]
            data = data[:cut]
            if len(self.tail) > LONGEST_LINE:
                raise BadStream(f"a line of more than {LONGEST_LINE >> 20} MiB")
        for _ in PIECE.findall(data):
            self.pieces.append(now)
        if RARE.search(data) is not None or not is_plain(data):
            self._take_lines(data, now)

    def close(self, now: float) -> None:
        """The connection ended: what came without a line's end is a line, too."""
        if self.tail:
            self.feed(b"\n", now)

    def _take_lines(self, data: bytes, now: float) -> None:
        """Up to [DONE], after which nothing counts."""
        for line in data.splitlines():
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                self.done = now
                return
            if RARE.search(payload) is not None:
                self._take_event(read_event(payload))
            elif payload and not (payload.startswith(b"{") and payload.endswith(b"}")):
                raise BadStream(f"not a JSON object: {beginning(payload)}")

    def _take_event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            error = event["error"]
            self.error = str(error.get("message", error)) if isinstance(error, dict) else str(error)
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        choices = event.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise BadStream(f"choices are no list of objects: {str(choices)[:100]}")
        self.finished |= any(one.get("finish_reason") for one in choices)


def is_plain(data: bytes) -> bool:
    """Does each line look like an event with an object, or like the empty one after it? [DONE] does not."""
    for line in data.split(b"\n"):
        if len(line) > 1 and not (line.startswith(b"data: {") and line.endswith((b"}", b"}\r"))):
            return False
    return True


def read_event(payload: bytes) -> dict[str, Any]:
    """Raises BadStream."""
    try:
        event = decode(payload)
    except ValueError:
        raise BadStream(f"not JSON: {beginning(payload)}") from None
    if not isinstance(event, dict):
        raise BadStream(f"not a JSON object: {beginning(payload)}")
    return event


def beginning(payload: bytes) -> str:
    return payload[:100].decode(errors="replace")
