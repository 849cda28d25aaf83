"""An LLM and the process around it: forks, a standard error that cannot be written, and memory."""

import ctypes
import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine import offline as offline_module
from engine.progress_bar import ProgressBar
from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import is_alive
from tests.unit.test_limited_process import in_forked_child

ROOT = Path(__file__).resolve().parents[2]
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    with LLM(model, dtype="float32", cpu_threads=1, num_blocks=64, max_model_len=64) as llm:
        yield llm


# --- forks -----------------------------------------------------------------------------------------


def test_a_forked_child_is_told_to_make_its_own(llm):
    expected = llm.chat(HELLO, SHORT, use_tqdm=False)
    for call in (lambda: llm.generate("x", SHORT), lambda: llm.chat(HELLO, SHORT)):
        error = in_forked_child(call)
        assert error.startswith(f"RuntimeError('this LLM belongs to process {os.getpid()}")
        assert "spawn" in error
    again = llm.chat(HELLO, SHORT, use_tqdm=False)
    assert again[0].prompt == expected[0].prompt
    assert again[0].outputs == expected[0].outputs


@contextmanager
def held_by_another_thread(lock):
    """In a child that is forked meanwhile it is held for ever."""

    def hold():
        with lock:
            held.set()
            go.wait(120)

    held, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(60)
    try:
        yield
    finally:
        go.set()
        thread.join(60)


def test_a_forked_child_is_told_even_while_another_thread_generates(llm):
    with held_by_another_thread(llm.turn):
        assert "RuntimeError" in in_forked_child(lambda: llm.generate("x", SHORT))


def test_shutdown_in_a_forked_child_ends_nothing(llm):
    llm.chat(HELLO, SHORT, use_tqdm=False)
    [worker] = llm.engine.pipeline.encoder.chat._renderer._idle

    def shut_down():
        llm.shutdown()
        return str(llm.is_shut_down)

    with held_by_another_thread(llm.turn):
        assert in_forked_child(shut_down) == "False"
    assert is_alive(worker.pid)
    assert llm.chat(HELLO, SHORT, use_tqdm=False)[0].finished


def test_files_of_a_process_are_not_removed_by_another(tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    offline_module.remove_in(os.getpid() + 1, str(folder))
    assert folder.exists()
    offline_module.remove_in(os.getpid(), str(folder))
    assert not folder.exists()


FORKED_FIRST = """
import os, sys
from engine import LLM, SamplingParams
pid = os.fork()
llm = LLM(sys.argv[1], dtype="float32", cpu_threads=1, num_blocks=64, max_model_len=64)
out = llm.generate("x", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
assert len(out[0].outputs[0].token_ids) == 4
llm.shutdown()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    print("both")
"""


def test_a_forked_child_may_make_its_own(llm):
    done = subprocess.run(
        [sys.executable, "-c", FORKED_FIRST, llm.config.model],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout == "both\n", done.stderr


# --- calls that were broken off ------------------------------------------------------------------------


def test_what_a_call_had_no_time_to_give_up_the_next_one_does(llm, monkeypatch):
    """As where a second signal comes before the requests of the first one's call are aborted."""

    def interrupted():
        raise KeyboardInterrupt

    expected = llm.generate("b", SHORT, use_tqdm=False)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        patch.setattr(llm, "_abort_all", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", SHORT, use_tqdm=False)
    [(left, _)] = llm.live.values()
    assert llm.generate("b", SHORT, use_tqdm=False)[0].outputs == expected[0].outputs
    assert not left.finished
    assert llm.live == {}


# --- the progress bar --------------------------------------------------------------------------------


def none():
    return None


def closed():
    file = full_disk()
    file.close()
    return file


def read_only():
    return os.fdopen(os.open("/dev/null", os.O_RDONLY), "w", buffering=1)


def full_disk():
    return os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)


def broken_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w", buffering=1)


def full_pipe():
    """With a reader that does not read: whoever writes waits."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    stream = os.fdopen(writer, "w", buffering=1)
    stream.reader = os.fdopen(reader)  # open for as long as the stream is
    return stream


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of the streams
@pytest.mark.parametrize("stream", [none, closed, read_only, full_disk, broken_pipe, full_pipe])
def test_answers_come_whatever_becomes_of_standard_error(llm, stream, monkeypatch):
    expected = llm.generate(["a", "b"], SHORT, use_tqdm=False)
    monkeypatch.setattr(sys, "stderr", stream())
    outputs = llm.generate(["a", "b"], SHORT)
    with pytest.raises(ValueError, match="max_tokens"):
        llm.generate("a", SamplingParams(max_tokens=10**6))
    monkeypatch.undo()
    in_another_thread(lambda: llm.generate("a", SHORT))  # waits for no lock of the bar that failed
    assert [o.outputs for o in outputs] == [o.outputs for o in expected]


def in_another_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


class Breaking:
    """A standard error that fails after the first few writes."""

    def __init__(self, writes_left):
        self.writes_left = writes_left

    def write(self, text):
        self.writes_left -= 1
        if self.writes_left < 0:
            raise BrokenPipeError

    def flush(self):
        pass


@pytest.mark.parametrize("writes_left", range(4))
def test_a_bar_that_fails_hides_no_other_error(writes_left, monkeypatch):
    stream = Breaking(writes_left)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyError, match="of the engine"):
        fail_beside_a_bar()
    assert stream.writes_left == -1, "it was not tried again"


def fail_beside_a_bar():
    with ProgressBar(2, True) as bar:
        if bar._bar is not None:
            bar._bar.mininterval = 0
        bar.show(1, "")
        bar.show(2, "")
        raise KeyError("of the engine")


def test_a_bar_is_shown(llm, capsys):
    llm.generate(["a", "b"], SHORT)
    assert "prompts: 100%" in capsys.readouterr().err
    llm.generate(["a", "b"], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""


# --- memory ------------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not glibc")
def test_shutdown_gives_freed_memory_back(llm):
    other = LLM(llm.config.model, dtype="float32", cpu_threads=1, num_blocks=16)
    pieces = [bytearray(b"x" * 100_000) for _ in range(2000)]  # too small to be mapped on their own
    last = pieces.pop()  # what lies above keeps glibc from giving back what lies below
    before = resident()
    del pieces
    other.shutdown()
    assert resident() < before - 100_000_000
    assert last


def test_without_such_a_call_nothing_happens(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    offline_module.trim_heap()
