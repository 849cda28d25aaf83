"""The files of scripts/batch.py: whatever they are, and whatever ends a run, no answer is lost."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts import batch
from scripts.operate.batch_file import open_output
from scripts.operate.batch_input import open_input
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MOST = 1 << 20


def answer(custom_id: str, is_good: bool = True, text: str = "") -> str:
    response = {"status_code": 200 if is_good else 500, "request_id": "1", "body": {"text": text}}
    line = {"id": "batch_req_1", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":")) + "\n"


def ids(path: Path) -> list[str]:
    return [json.loads(text)["custom_id"] for text in path.read_bytes().splitlines()]


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """No file may grow beyond that; what fits of a write is written, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """400 answers, every second one a failure."""
    path = tmp_path / "out.jsonl"
    path.write_text("".join(answer(f"r{i}", i % 2 == 0, "x" * 100) for i in range(400)))
    return path


def test_a_full_disk_loses_no_answer_when_failures_are_dropped(mixed: Path) -> None:
    before = mixed.read_bytes()
    with (
        full_disk(len(before) // 4),
        pytest.raises(ValueError, match=r"--retry-failed cannot put a copy.*as it was"),
        open_output(mixed, retry_failed=True),
    ):
        pass
    assert mixed.read_bytes() == before
    assert os.listdir(mixed.parent) == [mixed.name], "no half of a copy is left"
    with open_output(mixed, retry_failed=True) as output:
        output.error("last", "code", "text")
    assert ids(mixed) == [*(f"r{i}" for i in range(0, 400, 2)), "last"]


@pytest.mark.parametrize("step", ["os.open", "os.fchmod", "os.fsync", "os.rename", "os.close"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_loses_no_answer_when_failures_are_dropped(
    mixed: Path, step: str, when: str
) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from scripts.operate.batch_file import open_output\n"
        f"real = {step}\n"
        "def kill(*args):\n"
        f"    {'' if when == 'before' else 'real(*args)'}\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{step} = kill\n"
        f"with open_output(Path({str(mixed)!r}), retry_failed=True):\n    print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    good = [f"r{i}" for i in range(0, 400, 2)]
    assert [one for one in ids(mixed) if one in good] == good
    with open_output(mixed, retry_failed=True) as output:
        assert list(output.answered) == good
    assert ids(mixed) == good
    assert os.listdir(mixed.parent) == [mixed.name]


def test_the_copy_without_failures_is_the_same_file_to_others(tmp_path: Path, mixed: Path) -> None:
    mixed.chmod(0o640)
    link = tmp_path / "link.jsonl"
    link.symlink_to(mixed)
    with open_output(link, retry_failed=True) as output:
        with pytest.raises(ValueError, match="another run"), open_output(mixed):
            pass
        output.error("last", "code", "text")
    assert link.is_symlink()
    assert mixed.stat().st_mode & 0o777 == 0o640
    assert ids(mixed)[-1] == "last"


def test_a_file_that_is_mounted_by_itself_is_named(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "rename", rename)
    before = mixed.read_bytes()
    with pytest.raises(ValueError, match="mount its folder"), open_output(mixed, retry_failed=True):
        pass
    assert mixed.read_bytes() == before


def test_a_copy_that_cannot_be_given_away_is_kept(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user namespace that does not know the owner; the group may be ours to give."""

    def fchown(descriptor: int, uid: int, gid: int) -> None:
        if uid != -1:
            raise OSError(errno.EINVAL, "Invalid argument")
        given.append(gid)

    given: list[int] = []
    monkeypatch.setattr(os, "fchown", fchown)
    with open_output(mixed, retry_failed=True):
        assert given == [mixed.stat().st_gid]


def test_a_run_that_opened_the_file_before_it_was_replaced_takes_the_new_one(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_late(path: Path, *args: int) -> int:
        descriptor = real(path, *args)
        if not replaced:
            replaced.append(True)
            with open_output(mixed, retry_failed=True):
                pass
        return descriptor

    replaced: list[bool] = []
    real = os.open
    monkeypatch.setattr(os, "open", open_late)
    with open_output(mixed) as output:
        assert len(output.answered) == 200
        output.error("last", "code", "text")
    assert ids(mixed)[-1] == "last"


def test_a_good_answer_stays_good_if_the_same_id_failed_later(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(answer("a") + answer("a", False) + answer("b", False))
    with open_output(path, retry_failed=True) as output:
        assert output.answered == {"a": True}
    assert ids(path) == ["a"]


def test_every_cut_of_the_last_line_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, last = answer("a").encode(), answer("b").encode()
    for length in range(len(last) + 1):
        path.write_bytes(first + last[:length])
        with open_output(path) as output:
            assert ("b" in output.answered) == (length >= len(last) - 1)
            output.error("c", "code", "text")
        assert ids(path) == (["a", "b", "c"] if length >= len(last) - 1 else ["a", "c"])


def test_answers_are_kept_when_the_disk_fills(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with full_disk(500), open_output(path) as output:
        output.error("a", "code", "text")
        with pytest.raises(OSError, match=r"run the same command again.*out\.jsonl"):
            output.error("b", "code", "x" * 1000)
    assert path.stat().st_size == 500, "a cut line"
    with open_output(path) as output:
        assert set(output.answered) == {"a"}
    assert ids(path) == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '{\n  "a": 1\n}',
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}',
        "notes\nwithout an end",
        answer("a") + '{"a": 1}',
        answer("a") + answer("b")[:-20] + "\n" + answer("c"),
        "\0" * 5,
    ],
)
def test_a_file_that_is_no_output_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    for retry in (False, True):
        with (
            pytest.raises(ValueError, match="is no line of a batch's output"),
            open_output(path, retry),
        ):
            pass
    assert path.read_text() == text


def refusal(capsys: pytest.CaptureFixture[str], source: object, target: object, *more: str) -> str:
    """The one line that says why nothing runs."""
    assert batch.main(["-i", str(source), "-o", str(target), *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_outputs_that_keep_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a"}\n')
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in ("/dev/full", "/dev/zero", "/dev/null", fifo, tmp_path):
        for flags in ([], ["--retry-failed"]):
            said = refusal(capsys, source, path, *flags)
            assert f"{path}: is no regular file" in said


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_output_that_is_printed_to_is_refused(tmp_path: Path, stream: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n")
    target.write_text(answer("a"))
    command = [sys.executable, str(ROOT / "scripts" / "batch.py"), "-i", str(source), "-o"]
    with target.open("a") as file:
        done = subprocess.run([*command, f"/dev/{stream}"], check=False, **{stream: file})
    assert done.returncode == 2
    assert target.read_text().startswith(answer("a"))


def test_inputs_that_do_not_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    for path in ("/dev/zero", "/dev/null", tmp_path):
        assert f"{path}: is neither a file nor a pipe" in refusal(capsys, path, target)
    assert not target.exists()


@pytest.fixture
def pipe_of(tmp_path: Path) -> Iterator[Callable[[bytes, int], Path]]:
    """A pipe into which `times` pieces are written, as long as somebody reads."""

    def make(piece: bytes, times: int) -> Path:
        def write() -> None:
            try:
                with path.open("wb") as file:
                    for _ in range(times):
                        file.write(piece)
            except BrokenPipeError:
                pass

        path = tmp_path / "pipe"
        os.mkfifo(path)
        writers.append(threading.Thread(target=write, daemon=True))
        writers[-1].start()
        return path

    writers: list[threading.Thread] = []
    yield make
    for writer in writers:
        writer.join(20)
        assert not writer.is_alive()


def test_a_pipe_is_read_once_and_answered_in_any_order(
    pipe_of: Callable[[bytes, int], Path],
) -> None:
    lines = [{"custom_id": f"r{i}", "body": {"prompt": "x" * i}} for i in range(3000)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    with open_input(pipe_of(text.encode(), 1), MOST) as wanted:
        assert len(wanted.lines) == 3000
        backwards = wanted.lines[::-1]
        assert [body for _, body in wanted.read(backwards)] == lines[::-1]


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (b'{"custom_id": "a"}\n', "line 2: custom_id 'a' is that of line 1"),
        (b"no JSON\n", "line 1 is not JSON"),
        (b"0" * 4096, "line 1 is longer than 1048576 bytes"),
    ],
)
def test_a_pipe_without_an_end_is_refused_where_it_is_wrong(
    pipe_of: Callable[[bytes, int], Path], piece: bytes, words: str
) -> None:
    with pytest.raises(ValueError, match=words), open_input(pipe_of(piece, 10**9), MOST):
        pass


def test_a_full_disk_for_the_pipe_is_no_fault_of_the_output(
    pipe_of: Callable[[bytes, int], Path],
) -> None:
    path = pipe_of(b'{"custom_id": "a", "body": "%s"}\n' % (b"x" * 10_000), 1)
    with full_disk(1000), pytest.raises(OSError, match="large") as failure:  # noqa: SIM117
        with open_input(path, MOST):
            pass
    assert failure.value.filename not in (None, str(path))


def test_a_line_as_long_as_allowed_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    text = b'{"custom_id": "a", "body": {"prompt": "%s"}}\n' % (b"x" * 1000)
    source.write_bytes(text)
    with open_input(source, len(text)) as wanted:
        assert [line.custom_id for line in wanted.lines] == ["a"]
    said = refusal(capsys, source, target, "--max-body-size", str(len(text) - 1))
    assert f"line 1 is longer than {len(text) - 1} bytes" in said
    assert "--max-body-size" in said
    assert not target.exists()


def test_an_input_that_changes_is_not_answered_under_wrong_names(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a", "body": 1}\n{"custom_id": "b", "body": 2}\n')
    with open_input(source, MOST) as wanted:
        os.rename(source, tmp_path / "old")
        source.write_text("another")
        assert [body["body"] for _, body in wanted.read(wanted.lines)] == [1, 2]
        for text in ('{"custom_id": "b", "body": 1}\n{"custom_id": "a", "body": 2}\n', "{", ""):
            (tmp_path / "old").write_text(text)
            with pytest.raises(ValueError, match=r"in\.jsonl, line 1: the file was changed"):
                list(wanted.read(wanted.lines))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_heard", [True, False])
def test_a_second_signal_ends_at_once(number: signal.Signals, is_heard: bool) -> None:
    """Where the first one is held back, as in a long step, and though nobody may read what is said."""
    code = (
        f"import sys, time\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from scripts.operate.batch_signals import Interrupt\n"
        "interrupt = Interrupt()\n"
        "with interrupt.handled(), interrupt.held():\n"
        "    print('held', flush=True)\n"
        "    for _ in range(6000):\n"
        "        if interrupt.requested:\n            break\n        time.sleep(0.01)\n"
        "    print('requested', flush=True)\n    time.sleep(1000)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        if not is_heard:
            process.stderr.close()
        for said in (b"held\n", b"requested\n"):
            assert process.stdout.readline() == said
            process.send_signal(number)
        wait_until(lambda: process.poll() is not None)
        errors = process.stderr.read() if is_heard else b""
    finally:
        process.kill()
    assert process.returncode == 130
    assert (b"run the same command again" in errors) == is_heard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_loading_with_advice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    loader = types.ModuleType("scripts.operate.batch_run")
    loader.answer = lambda *_: signal.raise_signal(number)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loader.__name__, loader)
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a"}\n')
    assert batch.main(["-i", str(source), "-o", str(tmp_path / "out.jsonl")]) == 130
    assert capsys.readouterr().err == "interrupted: run the same command again to go on\n"
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
