"""Finds tool calls in a model's text, while it is being written.

    feed("I'll look.\\n<tool_")        Text("I'll look.")
    feed('call>{"name": "weather", ')  -                      not certain yet
    feed('"arguments": {"city')        CallBegin(0, "weather"), CallArguments(0, '{"city')
    feed('": "Oslo"}}</tool_call>')    CallArguments(0, '": "Oslo"}')

Text that may begin a call is held back until that is decided; if it is none it comes out as it was.
Once a name and the opening brace of its arguments are there it is a call, and the arguments are passed
on as they come. Space around calls is layout and is left out.

Every step looks at the text held so far and either takes away what is decided, or waits. What is
decided does not depend on what follows; so any division of a text into pieces gives the same events.
"""

from collections.abc import Callable, Collection

from server.answer.call_format import CallFormat
from server.answer.call_json import (
    Begun,
    Complete,
    Incomplete,
    NotACall,
    ValueScan,
    char_at,
    read_rest,
    skip_space,
)
from server.answer.events import CallArguments, CallBegin, Event, Text, merged

Step = Callable[[bool], bool]


class CallParser:
    """For one answer. `names`: of the tools, which tell an unmarked call from other JSON."""

    def __init__(self, fmt: CallFormat, names: Collection[str]) -> None:
        self.num_calls = 0
        self._format = fmt
        self._names = frozenset(names)
        self._held = ""  # text that is not decided
        self._step: Step = self._in_text
        self._events: list[Event] = []
        self._may_be_bare = True  # so far there was nothing but calls
        self._after_call = False
        self._in_list = False  # of calls, in brackets
        self._is_marked = False  # the call began with a mark
        self._is_member = False  # the arguments are a member of the call's object
        self._scan = ValueScan()

    def feed(self, text: str) -> list[Event]:
        """What is decided with this text."""
        self._held += text
        return self._run(is_final=False)

    def finish(self) -> list[Event]:
        """What was held back, when no more text comes."""
        return self._run(is_final=True)

    def _run(self, is_final: bool) -> list[Event]:
        while self._held and self._step(is_final):
            pass
        events, self._events = merged(self._events), []
        return events

    # --- steps: take something from `_held` and return True, or wait with False -----------------------

    def _in_text(self, is_final: bool) -> bool:
        held, fmt = self._held, self._format
        if self._after_call and held[0].isspace():
            self._held = held.lstrip()
            return True
        if self._may_be_bare and fmt.bare:
            rest = held.lstrip()
            if not rest and not is_final:
                return False
            if rest and rest[0] in fmt.bare:
                return self._begin_call(len(held) - len(rest), "", is_final)
        starts = [(at, mark) for mark in fmt.begin if (at := held.find(mark)) >= 0]
        if starts:
            at, mark = min(starts)
            before = held[:at].rstrip()
            if not before:
                return self._begin_call(at, mark, is_final)
            self._give_text(len(before))
            return True
        size = len(held) if is_final else len(held) - undecided_length(held, fmt.begin)
        self._give_text(size)
        return size > 0

    def _begin_call(self, at: int, mark: str, is_final: bool) -> bool:
        """A call seems to begin at index `at` of the text held, with `mark`."""
        held = self._held
        self._is_marked = bool(mark)
        start = skip_space(held, at + len(mark))
        self._in_list = held[start : start + 1] == "["
        if self._in_list:
            start = skip_space(held, start + 1)
        try:
            self._take_call(self._read(start))
        except Incomplete:
            if is_final:
                self._give_text(len(held))
            return is_final
        except NotACall:
            self._give_text(at + max(len(mark), 1))
        return True

    def _next_in_list(self, is_final: bool) -> bool:
        """Behind a call of a list: another one, or the end."""
        held = self._held
        try:
            at = skip_space(held, 0)
            char = char_at(held, at)
            if char == "]":
                self._go_on(at + 1, self._behind_call)
                return True
            if char != ",":
                raise NotACall
            self._take_call(self._read(skip_space(held, at + 1)))
        except Incomplete:
            if is_final:
                self._go_on(0, self._behind_call)
            return is_final
        except NotACall:
            self._go_on(0, self._behind_call)
        return True

    def _in_arguments(self, is_final: bool) -> bool:
        end = self._scan.advance(self._held)
        self._give_arguments(end)
        if self._scan.is_broken:
            self._step = self._in_broken_arguments
        elif self._scan.is_done and not self._is_member:
            self._step = self._behind_call
        elif self._scan.is_done:
            self._step = self._behind_arguments
        return True

    def _in_broken_arguments(self, is_final: bool) -> bool:
        """No JSON, but begun as arguments: they last until the mark of the end, or for good."""
        held, mark = self._held, self._format.end
        at = held.find(mark) if mark else -1
        if at >= 0:
            self._give_arguments(at)
            self._step = self._behind_call
            return True
        size = len(held) if is_final else len(held) - overlap(held, mark)
        self._give_arguments(size)
        return size > 0

    def _behind_arguments(self, is_final: bool) -> bool:
        """The rest of the call's object."""
        end = 0
        try:
            end = read_rest(self._held, 0)
        except Incomplete:
            if not is_final:
                return False
            end = len(self._held)
        except NotACall:
            pass
        self._go_on(end, self._next_in_list if self._in_list else self._behind_call)
        return True

    def _behind_call(self, is_final: bool) -> bool:
        """Drop the mark of the end, space, separators, and braces too many."""
        held, end = self._held, self._format.end
        rest = held.lstrip(" \t\r\n}" + self._format.separators)
        at = len(held) - len(rest)
        if end and rest.startswith(end):
            at += len(end)
        elif end.startswith(rest) and not is_final:
            return False
        self._go_on(at, self._in_text)
        return True

    # --- what steps do ------------------------------------------------------------------------------

    def _read(self, at: int) -> Begun | Complete:
        call = self._format.read(self._held, at, self._is_marked)
        if not self._is_marked and call.name not in self._names:
            raise NotACall
        return call

    def _take_call(self, call: Begun | Complete) -> None:
        self._events.append(CallBegin(self.num_calls, call.name))
        self.num_calls += 1
        self._after_call = True
        if isinstance(call, Complete):
            self._events.append(CallArguments(self.num_calls - 1, call.arguments))
            self._go_on(call.at, self._next_in_list if self._in_list else self._behind_call)
            return
        self._scan = ValueScan()
        self._is_member = call.is_member
        self._go_on(call.at, self._in_arguments)

    def _go_on(self, at: int, step: Step) -> None:
        self._held = self._held[at:]
        self._step = step

    def _give_text(self, size: int) -> None:
        if size:
            self._events.append(Text(self._held[:size]))
            self._held = self._held[size:]
            self._may_be_bare = self._after_call = False

    def _give_arguments(self, size: int) -> None:
        self._events.append(CallArguments(self.num_calls - 1, self._held[:size]))
        self._held = self._held[size:]


def undecided_length(text: str, marks: Collection[str]) -> int:
    """Length of the end of `text` that may be space and the beginning of a mark."""
    if not marks:
        return 0
    size = len(text) - max(overlap(text, mark) for mark in marks)
    return len(text) - len(text[:size].rstrip())


def overlap(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` with which `text` ends."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
