"""Signals wait for the end of a step: an exception in its middle would leave the engine in pieces.

    signal ─► caught      (while a step runs)
              caught ─► the program's own handlers, in order      (then)

What has no handler in Python, because it is ignored, ends the process or belongs to a library in C, stays
as it is. (Only what `signal.siginterrupt` set for the others is lost, as Python cannot read it.)
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

NUMBERS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

Handler = Callable[[int, FrameType | None], Any]
Caught = tuple[int, FrameType | None]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals back until the end, and then call their handlers, which may raise."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python calls handlers in the main thread only
        return
    caught: list[Caught] = []
    own: dict[int, Handler] = {}
    try:
        try:
            for number in NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    own[number] = handler
                    signal.signal(number, lambda *signalled: caught.append(signalled))
            yield
        finally:
            restore(own)
    finally:
        deliver(iter(caught), own)


def restore(own: dict[int, Handler]) -> None:
    try:
        for number, handler in own.items():
            signal.signal(number, handler)
    except BaseException:  # of one that is restored already, and came at once
        for number, handler in own.items():
            signal.signal(number, handler)
        raise


def deliver(caught: Iterator[Caught], own: dict[int, Handler]) -> None:
    """All are called, even if the first raises."""
    try:
        for number, frame in caught:
            own[number](number, frame)
    except BaseException:
        deliver(caught, own)
        raise
