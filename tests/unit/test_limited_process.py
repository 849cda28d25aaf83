"""A process of its owner's: forked copies of the object can neither ask nor end it."""

import os
import signal

import pytest

from engine.api.sampling import StructuredOutput
from tests.processes import is_alive
from tokenizer_proc import limited_process
from tokenizer_proc.grammar_check import GrammarChecker
from tokenizer_proc.limited_process import LimitedProcess, OverTime
from tokenizer_proc.templates import WORKER, TemplateRenderer


@pytest.fixture
def renderer():
    renderer = TemplateRenderer()
    yield renderer
    renderer.close()


def in_forked_child(work):
    """What `work` returns there, a text, or the error that it raises."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # what waits for ever ends, without a text
        try:
            result = work()
        except BaseException as error:
            result = repr(error)
        os.write(theirs, result.encode())
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as result:
        text = result.read().decode()
    os.waitpid(pid, 0)
    return text


def test_a_forked_child_starts_a_process_of_its_own(renderer):
    assert renderer.render("{{ x }}", {"x": 1}, 5.0) == "1"
    [worker] = renderer._idle

    def render():
        text = renderer.render("{{ x }}", {"x": 2}, 5.0)
        [other] = renderer._idle
        renderer.close()
        return f"{text} {other.pid != worker.pid}"

    assert in_forked_child(render) == "2 True"
    assert renderer.render("{{ x }}", {"x": 3}, 5.0) == "3"
    assert renderer._idle == [worker], "it is the same one still"


def test_a_forked_child_ends_nothing_of_its_parent(renderer):
    renderer.render("a", {}, 5.0)
    [worker] = renderer._idle

    def end():
        ended = worker.has_ended
        renderer.close()
        worker.__dict__.clear()  # and its parts are collected
        return str(ended)

    assert in_forked_child(end) == "True", "for the child"
    assert is_alive(worker.pid)
    assert renderer.render("{{ x }}", {"x": 3}, 5.0) == "3"


def test_a_forked_child_may_have_processes_of_its_own():
    def render():
        renderer = TemplateRenderer()
        text = renderer.render("{{ x }}", {"x": "mine"}, 5.0)
        renderer.close()
        return text

    assert in_forked_child(render) == "mine"


def test_a_forked_child_asks_about_grammars_by_itself():
    checker = GrammarChecker([bytes([i]) for i in range(256)], [], [0])
    digit = StructuredOutput("regex", "[0-9]")
    checker.check(digit)
    assert in_forked_child(lambda: str(checker.check(digit))) == "None", "known from before"
    other = StructuredOutput("regex", "[0-9]+")
    worker = checker.process.pid

    def check():
        checker.check(other)
        own = checker.process.pid
        checker.close()
        return str(own != worker)

    assert in_forked_child(check) == "True"
    checker.check(other)
    assert checker.process.pid == worker
    checker.close()


class Raising:
    """A connection where a signal comes, whose handler raises."""

    def __init__(self, connection):
        self.connection = connection

    def __getattr__(self, name):
        return getattr(self.connection, name)

    def recv(self, size):
        raise TimeoutError("of the program")


def test_a_timeout_of_the_program_is_not_one_of_the_process():
    worker = LimitedProcess(WORKER)
    worker._socket = Raising(worker._socket)
    with pytest.raises(TimeoutError, match="of the program"):
        worker.ask(["a", {}], 60.0)
    worker.kill()


def test_a_timeout_of_the_program_while_it_starts(monkeypatch):
    monkeypatch.setattr(limited_process, "receive", raise_timeout)
    checker = GrammarChecker([bytes([i]) for i in range(256)], [], [0])
    with pytest.raises(TimeoutError, match="of the program"):
        checker.check(StructuredOutput("regex", "[0-9]"))
    assert checker.process is None


def raise_timeout(connection):
    raise TimeoutError("of the program")


def test_a_start_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(limited_process, "START_SECONDS", 0.001)
    with pytest.raises(OverTime):
        LimitedProcess(WORKER)


def test_an_answer_that_is_late_says_so():
    worker = LimitedProcess(WORKER)
    with pytest.raises(OverTime, match=r"no answer in 0\.2 s"):
        worker.ask(["{% set n = 10 ** (10 ** 9) %}", {}], 0.2)
    worker.kill()
