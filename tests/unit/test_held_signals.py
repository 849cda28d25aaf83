"""Signals that come in a step are handled after it, by the program's own handlers."""

import signal
import threading

import pytest

from engine.held_signals import NUMBERS, uninterrupted

pytestmark = pytest.mark.usefixtures("handlers_as_before")


class LateError(Exception):
    pass


def recorder(number, seen):
    def handler(signalled, frame):
        assert signalled == number
        assert frame is not None
        assert signal.getsignal(number) is handler, "as outside of a step"
        seen.append(number)

    signal.signal(number, handler)
    return handler


def send_in_a_step(*numbers, error=None):
    with uninterrupted():
        for number in numbers:
            signal.raise_signal(number)
        if error is not None:
            raise error


def test_own_handlers_are_called_at_the_end_in_order():
    seen = []
    handlers = {number: recorder(number, seen) for number in NUMBERS}
    sent = [signal.SIGUSR2, signal.SIGINT, signal.SIGALRM, signal.SIGINT, signal.SIGTERM]
    with uninterrupted():
        for number in sent:
            signal.raise_signal(number)
        assert seen == []
    assert seen == sent
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers
    signal.raise_signal(signal.SIGHUP)
    assert seen[-1] == signal.SIGHUP


def test_a_handler_that_raises_keeps_no_other_from_its_call():
    def late(*_):
        raise LateError

    seen = []
    signal.signal(signal.SIGALRM, late)
    own = recorder(signal.SIGTERM, seen)
    with pytest.raises(LateError):
        send_in_a_step(signal.SIGALRM, signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    assert (signal.getsignal(signal.SIGALRM), signal.getsignal(signal.SIGTERM)) == (late, own)


def test_an_error_of_the_step_is_told_together_with_what_the_handler_raised():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt) as caught:
        send_in_a_step(signal.SIGINT, error=ValueError("of the step"))
    assert str(caught.value.__context__) == "of the step"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_ignored_or_ends_the_process_stays_so(handler):
    for number in NUMBERS:
        signal.signal(number, handler)
    with uninterrupted():
        assert {signal.getsignal(number) for number in NUMBERS} == {handler}
        if handler is signal.SIG_IGN:
            for number in NUMBERS:
                signal.raise_signal(number)


def test_a_handler_of_a_library_in_c_stays(monkeypatch):
    """Python knows it as None, and could not put it back."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *_: pytest.fail("replaced"))
    with uninterrupted():
        pass


def test_one_that_comes_as_soon_as_its_handler_is_back_keeps_no_other_from_its_return(monkeypatch):
    def late(*_):
        raise LateError

    signal.signal(signal.SIGINT, late)
    own = recorder(signal.SIGUSR2, [])  # the last to be restored
    install = signal.signal

    def install_and_send(number, handler):
        install(number, handler)
        if handler is late:
            monkeypatch.undo()
            signal.raise_signal(number)

    with pytest.raises(LateError), uninterrupted():
        monkeypatch.setattr(signal, "signal", install_and_send)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR2)) == (late, own)


def test_other_threads_have_nothing_to_hold_back():
    seen = []
    own = recorder(signal.SIGUSR1, seen)

    def run():
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGUSR1) is own)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
