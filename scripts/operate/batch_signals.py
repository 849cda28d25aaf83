"""Ctrl-C and SIGTERM end a batch alike: the first one in order, a second one at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

INTERRUPTED = 130  # exit code
ADVICE = "interrupted: run the same command again to go on"
NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """KeyboardInterrupt, from either signal; inside `held` only where `check` is called."""

    def __init__(self) -> None:
        self.requested = False
        self.is_held = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Be the handler of both signals."""
        if threading.current_thread() is not threading.main_thread():
            yield  # Python interrupts the main thread only
            return
        before = {number: signal.getsignal(number) for number in NUMBERS}
        ours = [n for n, handler in before.items() if handler is not signal.SIG_IGN]  # as of nohup
        for number in ours:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, before[number])

    @contextmanager
    def held(self) -> Iterator[None]:
        """A step cut in the middle would leave the engine in pieces."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def check(self) -> None:
        if self.requested:
            raise KeyboardInterrupt

    def _on_signal(self, number: int, frame: object) -> None:
        if self.requested:  # whole answers are in the file, and there is no other process
            with suppress(OSError):  # of standard error
                os.write(2, f"\n{ADVICE}\n".encode())
            os._exit(INTERRUPTED)
        self.requested = True
        if not self.is_held:
            raise KeyboardInterrupt
