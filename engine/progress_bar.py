"""How far a batch is, on standard error, for as long as that can be written.

Signals are held back while tqdm works: an exception in its middle may leave its lock taken, and bars of
other threads would wait for ever. So nothing may be written that would block: a Ctrl-C would wait, too.
"""

import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from engine.held_signals import uninterrupted


class Bar(tqdm):  # type: ignore[misc]  # it has no types
    """With the lock that all bars share free again after a failed write, which tqdm leaves taken, and
    without its thread, which would write where that blocks."""

    monitor_interval = 0

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        try:
            super().display(msg, pos)
        except Exception:
            self.disable = True


class ProgressBar:
    """A bar that ends when its stream does: a closed pipe or a full disk must not cost the answers."""

    def __init__(self, total: int, is_shown: bool) -> None:
        self._bar: Bar | None = None
        if is_shown and takes_more(sys.stdout) and takes_more(sys.stderr):  # it flushes both
            with uninterrupted(), self._ending_with_its_stream():
                self._bar = Bar(total=total, desc="prompts", miniters=1)

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *exc: object) -> None:
        with uninterrupted(), self._ending_with_its_stream():
            if self._bar is not None and takes_more(sys.stderr):
                self._bar.close()
            elif self._bar is not None:
                self._bar.disable = True
            self._bar = None  # now, as tqdm would swallow an exception while it is collected

    def show(self, done: int, note: str) -> None:
        """To be called while signals are held back."""
        with self._ending_with_its_stream():
            if self._bar is not None and takes_more(sys.stderr):
                self._bar.update(done - self._bar.n)
                self._bar.set_postfix_str(note, refresh=False)

    @contextmanager
    def _ending_with_its_stream(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # of any stream that a program may have put there; there may be None
            if self._bar is not None:
                self._bar.disable = True  # or it would write once more when it is collected
                self._bar = None


def takes_more(stream: Any) -> bool:
    """Whether a write would not block: False for a pipe that is full and a terminal that is halted."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), select.POLLOUT)
    except Exception:  # no file, as in a notebook, or none: what is wrong shows in writing
        return True
    return bool(poll.poll(0))
