"""What a tool says on standard output: it may be a pipe that nobody reads any more, a full disk, or closed.

None of that is a check that failed, which exit code 1 means.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

NOBODY_READS = 141  # exit code: what shells say of a program that SIGPIPE ended
CANNOT_WRITE = 2


class OutputLost(Exception):
    """Not even the tool's answer can be told."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written: {cause.strerror or cause}")
        self.cause = cause
        self.is_pipe = isinstance(cause, BrokenPipeError)


def say(text: str) -> None:
    """At once. Raises OutputLost; where standard output was closed from the start, the exit code tells."""
    if sys.stdout is None:
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # it may lack characters
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        drop_rest()
        raise OutputLost(error) from None


def drop_rest() -> None:
    """What is left in the buffer would fail again when the interpreter ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def telling(main: Callable[[], int]) -> int:
    """Exit code of `main`, or of its output if that was lost."""
    try:
        return main()
    except OutputLost as lost:
        if lost.is_pipe:  # as in `| head -1`, which has what it wanted
            return NOBODY_READS
        with suppress(OSError):  # of standard error, perhaps on the same full disk
            print(f"error: {lost}", file=sys.stderr)
        return CANNOT_WRITE
