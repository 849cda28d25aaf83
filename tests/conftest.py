"""For all tests."""

import signal
from collections.abc import Iterator

import pytest

from engine.held_signals import NUMBERS

for _number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # What was started in the background ignores Ctrl-C, and so would all that tests start and interrupt.
    if signal.getsignal(_number) is signal.SIG_IGN:
        _default = signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        signal.signal(_number, _default)


@pytest.fixture
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
