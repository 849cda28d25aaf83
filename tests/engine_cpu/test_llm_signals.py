"""Signals around `generate`: whatever their handlers raise, the next call is as if nothing had been."""

import os
import signal
import sys
import threading
from contextlib import contextmanager

import pytest

from engine import LLM, SamplingParams, StructuredOutput
from tests.engine_cpu.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("handlers_as_before")
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
MOMENTS = 120


class LateError(Exception):
    pass


def late(*_):
    raise LateError


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with LLM(model, dtype="float32", cpu_threads=1, num_blocks=64, max_model_len=64) as llm:
        yield llm


def state(llm):
    engine = llm.engine
    return engine.loop.scheduler.kv.pool.num_free, engine.has_work(), len(llm.live)


@contextmanager
def signal_at_call(moment, number):
    """Send it when the `moment`th Python function from here on is called. Yields how many were."""
    calls = [0]

    def count(frame, event, arg):
        if event == "call":
            calls[0] += 1
            if calls[0] == moment:
                signal.raise_signal(number)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ask(llm):
    return [o.outputs[0].text for o in llm.generate(["Once", "One two", "A"], SHORT)]


def chat(llm):
    messages = [{"role": "user", "content": "Hello"}]
    return [o.outputs[0].text for o in llm.chat(messages, SHORT)]


@pytest.mark.parametrize("call", [ask, chat])
def test_an_alarm_may_come_at_any_moment(llm, call):
    signal.signal(signal.SIGALRM, late)
    expected = call(llm)
    before = state(llm)
    with signal_at_call(0, signal.SIGALRM) as calls:
        call(llm)
    came = 0
    for moment in range(1, calls[0], max(1, calls[0] // MOMENTS)):
        try:
            with signal_at_call(moment, signal.SIGALRM):
                call(llm)
        except LateError:
            came += 1
        assert signal.getsignal(signal.SIGALRM) is late
        assert call(llm) == expected, moment
        assert state(llm) == before, moment
    assert came > MOMENTS / 2


def test_a_signal_that_is_ignored_and_one_with_an_own_handler_end_nothing(llm):
    expected = ask(llm)
    seen = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with during_steps(llm, signal.SIGINT, signal.SIGUSR1):
        assert ask(llm) == expected
    assert seen
    own = []
    signal.signal(signal.SIGINT, lambda number, frame: own.append(number))
    with during_steps(llm, signal.SIGINT):
        assert ask(llm) == expected
    assert own


@contextmanager
def during_steps(llm, *numbers):
    engine, step = llm.engine, llm.engine.step

    def step_and_signal():
        for number in numbers:
            os.kill(os.getpid(), number)
        step()

    engine.step = step_and_signal
    try:
        yield
    finally:
        del engine.step


def test_a_handler_may_shut_the_llm_down(tmp_path):
    llm = LLM(make_tiny("llama", tmp_path), dtype="float32", cpu_threads=1, num_blocks=16)
    signal.signal(signal.SIGTERM, lambda *_: llm.shutdown())
    with during_steps(llm, signal.SIGTERM), pytest.raises(RuntimeError, match="was shut down"):
        ask(llm)


def test_a_timeout_while_a_grammar_is_checked_is_not_an_answer_about_it(llm, monkeypatch):
    """What the process said of the first would have been taken for its word on the second."""
    signal.signal(signal.SIGALRM, timed_out)
    good, bad = (
        SamplingParams(max_tokens=2, structured=StructuredOutput("regex", text))
        for text in ("[0-9][a-z]", "([0-9]")
    )
    llm.generate("x", SamplingParams(structured=StructuredOutput("regex", "a")), use_tqdm=False)
    process = llm.engine.pipeline.constraints.checker.process
    connection = process._socket

    class Interrupted:
        def __getattr__(self, name):
            return getattr(connection, name)

        def recv(self, size):
            signal.raise_signal(signal.SIGALRM)

    process._socket = Interrupted()
    with pytest.raises(TimeoutError, match="of the program"):
        llm.generate("x", good, use_tqdm=False)
    with pytest.raises(ValueError, match="structured"):
        llm.generate("x", bad, use_tqdm=False)
    text = llm.generate("x", good, use_tqdm=False)[0].outputs[0].text
    assert text[0].isdigit()


def timed_out(*_):
    raise TimeoutError("of the program")


def test_another_thread_may_generate_while_signals_come(llm):
    expected = ask(llm)
    seen, texts = [], []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    with during_steps(llm, signal.SIGUSR1):
        thread = threading.Thread(target=lambda: texts.append(ask(llm)))
        thread.start()
        thread.join()
    assert texts == [expected]
    assert seen
