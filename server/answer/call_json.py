"""The JSON of a tool call, read from text that is still growing.

    {"name": "weather", "arguments": {"city": "Oslo"}}
                                     ^ Begun: from here on arguments can be passed on as they come

`read_call` and `read_rest` are functions of the text alone. What they say of a text they say of every
longer one, so the result cannot depend on the pieces in which a text arrived; while it is not decided
they raise `Incomplete`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

ARGUMENT_KEYS = ("arguments", "parameters")
SIDE_KEYS = ("type", "id")  # that models add although nobody asks
SPACE = re.compile(r"[ \t\r\n]*")
STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+(")?', re.DOTALL)
SCALAR = re.compile(r"[\w.+-]+")
LANDMARK = re.compile(r'["{}\[\]]|[^\w\s,:.+-]')  # outside strings: all that is not plain filling
STRING_LANDMARK = re.compile(r'["\\]')


class Incomplete(Exception):
    """More text is needed."""


class NotACall(Exception):
    """The text is none, whatever follows."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A call whose arguments, an object, begin at index `at` of the text."""

    name: str
    at: int
    is_member: bool = True  # of an object, which goes on behind the arguments


@dataclass(frozen=True, slots=True)
class Complete:
    """A whole call; the text goes on at index `at`."""

    name: str
    arguments: str
    at: int


class ValueScan:
    """Follows an object or array to its end, over pieces of text.

    Lenient, as what was passed on cannot be taken back: brackets are counted, not matched.
    `is_broken`: something stands there that JSON has only in strings.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self.is_escaped = False
        self.is_done = False
        self.is_broken = False

    def advance(self, text: str, at: int = 0) -> int:
        """Read `text` from index `at`; the index of the first character that is not of the value."""
        while at < len(text) and not self.is_done:
            if self.in_string:
                at = self._in_string(text, at)
                continue
            found = LANDMARK.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            char = found[0]
            if char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                self.is_done = self.depth == 0
            else:
                self.is_broken = self.is_done = True
                return found.start()
        return at

    def _in_string(self, text: str, at: int) -> int:
        if self.is_escaped:
            self.is_escaped = False
            return at + 1
        found = STRING_LANDMARK.search(text, at)
        if found is None:
            return len(text)
        self.in_string = found[0] != '"'
        self.is_escaped = found[0] == "\\"
        return found.end()


def read_call(text: str, at: int, is_marked: bool = True) -> Begun | Complete:
    """The call object that begins at index `at`. Raises Incomplete or NotACall.

    `is_marked=False`: only its keys tell it from other JSON, so a foreign one settles the matter.
    """
    if char_at(text, at) != "{":
        raise NotACall
    name: str | None = None
    arguments = "{}"
    for key, start in members(text, at + 1, is_first=True):
        if key is None:
            if name is None:
                raise NotACall
            return Complete(name, arguments, start)
        if key == "name":
            name, _ = read_string(text, start)
            if not name:
                raise NotACall
        elif key in ARGUMENT_KEYS:
            if name is not None and char_at(text, start) == "{":
                return Begun(name, start)
            end = skip_value(text, start)
            arguments = arguments_of(text[start:end])
        elif not is_marked and key not in SIDE_KEYS:
            raise NotACall
    raise AssertionError("members ends with the object")


def read_rest(text: str, at: int) -> int:
    """Index behind a call object that goes on at `at`, behind the arguments. Raises as `read_call`."""
    for key, start in members(text, at, is_first=False):
        if key is None:
            return start
    raise AssertionError("members ends with the object")


def members(text: str, at: int, is_first: bool) -> Iterator[tuple[str | None, int]]:
    """(key, index of its value) for each member of an object, at last (None, index behind it)."""
    while True:
        at = skip_space(text, at)
        char = char_at(text, at)
        if char == "}":
            yield None, at + 1
            return
        if not is_first:
            if char != ",":
                raise NotACall
            at = skip_space(text, at + 1)
        is_first = False
        key, at = read_string(text, at)
        at = skip_space(text, at)
        if char_at(text, at) != ":":
            raise NotACall
        at = skip_space(text, at + 1)
        yield key, at
        at = skip_value(text, at)


def skip_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    assert found is not None
    return found.end()


def char_at(text: str, at: int) -> str:
    if at >= len(text):
        raise Incomplete
    return text[at]


def read_string(text: str, at: int) -> tuple[str, int]:
    """The string that begins at `at`, and the index behind it."""
    if char_at(text, at) != '"':
        raise NotACall
    found = STRING.match(text, at)
    assert found is not None
    end = found.end()
    if found[1] is None:
        if end < len(text) and not (text[end] == "\\" and end + 1 == len(text)):
            raise NotACall  # a control character
        raise Incomplete
    try:
        value = json.loads(found[0])
        value.encode()
    except ValueError:  # a bad escape, or half a surrogate pair
        raise NotACall from None
    return value, end


def skip_value(text: str, at: int) -> int:
    """Index behind the value that begins at `at`."""
    char = char_at(text, at)
    if char == '"':
        return read_string(text, at)[1]
    if char in "{[":
        scan = ValueScan()
        end = scan.advance(text, at)
        if scan.is_broken:
            raise NotACall
        if not scan.is_done:
            raise Incomplete
        return end
    found = SCALAR.match(text, at)
    if found is None:
        raise NotACall
    if found.end() == len(text):
        raise Incomplete
    return found.end()


def arguments_of(raw: str) -> str:
    """Arguments as one object's JSON text; some models write that as a string, or null for none."""
    try:
        value = json.loads(raw)
        if isinstance(value, str):
            raw = value
            raw.encode()  # half a surrogate pair could not be sent
            value = json.loads(raw)
    except (ValueError, RecursionError):
        raise NotACall from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NotACall
    return raw
