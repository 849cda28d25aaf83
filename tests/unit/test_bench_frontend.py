"""The front end's benchmark: its clock of words, its stand-in for the engine, its client, a short run."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest

from engine.api.messages import AbortRequests, AddRequest, FinishReason
from engine.api.sampling import SamplingParams
from scripts import bench_frontend
from scripts.frontend import figures
from scripts.frontend.client import Job, Load, Result
from scripts.frontend.engine import Steps
from scripts.frontend.processes import CpuWatch, find_processes
from scripts.frontend.word_clock import TICK_NS, WordClock
from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import children_of, is_alive
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000


def clock_of(directory: Path, names: list[str]) -> WordClock:
    """Of the words `names`, beside two that are no plain ones."""
    vocabulary = {name: 5 + i for i, name in enumerate(["x", "\u01201", *names])}
    tokenizer = {"model": {"vocab": vocabulary}}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return WordClock(str(directory))


@pytest.fixture
def words(tmp_path: Path) -> WordClock:
    return clock_of(tmp_path, [f"\u0120{'a' * n}" for n in range(1, 11)])


def add(req_id: int, tokens: int, step_us: int = 1000) -> AddRequest:
    params = SamplingParams(max_tokens=tokens, seed=step_us)
    return AddRequest(req_id=req_id, token_ids=b"", block_names=b"", params=params, arrival_ns=0)


def test_a_word_tells_its_age(words: WordClock) -> None:
    assert words.token_ids == list(range(7, 17))
    assert words.period_s == pytest.approx(10 * TICK_NS * 1e-9)
    for sent in (0, 3 * TICK_NS, 9 * TICK_NS, 12345 * TICK_NS):
        word = b"a" * (words.token_at(sent) - 6)
        assert words.age_ns(word, sent + 7 * TICK_NS) == 7 * TICK_NS
        assert words.age_ns(word, sent + TICK_NS // 2) == 0
        assert words.age_ns(word, sent + 10 * TICK_NS) == 0, "a period later it comes round"


def test_a_vocabulary_of_few_words_is_no_clock(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"\u0120a": 0}}}))
    with pytest.raises(ValueError, match="too few"):
        WordClock(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["a", 0.0]]}}))
    with pytest.raises(ValueError, match="BPE"):
        WordClock(str(tmp_path))


def test_steps_of_the_stand_in(words: WordClock) -> None:
    """A token a step for each, the last one with its end; who is aborted gets none."""
    steps = Steps(words, epoch=3)
    for message in (add(1, 2, 2500), add(2, 9), add(3, 1, 4000)):
        steps.handle(message)
    first = steps.make()
    assert (first.epoch, first.req_ids, first.counts) == (3, [1, 2, 3], [1, 1, 1])
    assert first.finished == [(2, FinishReason.LENGTH, None)]
    assert [req_id for req_id, _, _ in first.started] == [1, 2, 3]
    assert set(first.token_ids) <= set(words.token_ids)
    assert steps.period_ns == 4 * MS
    steps.handle(AbortRequests(req_ids=[2, 99]))
    second = steps.make()
    assert (second.req_ids, second.started) == ([1], [])
    assert second.finished == [(0, FinishReason.LENGTH, None)]
    assert not steps.left
    assert (steps.num_steps, steps.num_tokens) == (2, 4)


def test_the_client_counts_words_and_ages(tmp_path: Path) -> None:
    """Events cut in the middle, several in a read, several words in an event."""
    names = ["".join(letters) for letters in product("abcdefghijklmnopqrst", repeat=4)]
    words = clock_of(tmp_path, [f"\u0120{name}" for name in names])
    assert words.period_s == pytest.approx(8), "longer than any pause here"
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        peer, _ = listener.accept()
        asked = peer.recv(1 << 16)
        assert b'"max_tokens": 4' in asked
        assert b'"seed": 1000' in asked
        old = time.monotonic_ns() - 2 * TICK_NS
        word = b" " + names[words.token_at(old) - 7].encode()
        event = b'1f\r\ndata: {"delta":{"content":"%b"}}\n\n\r\n'
        # A header that looks like the end of a body must not be taken for it.
        peer.sendall(b"HTTP/1.1 200 OK\r\nX: 0\r\n\r\n" + event % b"")
        time.sleep(0.02)
        peer.sendall((event % word) + (event % (word + word))[:15])
        time.sleep(0.02)
        peer.sendall((event % (word + word))[15:] + event % word)
        peer.sendall(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        peer.close()

    server = threading.Thread(target=serve)
    server.start()
    host, port = listener.getsockname()
    job = Job(host, port, str(tmp_path), streams=1, tokens=4, step_us=1000, prompt="x")
    result = Load(job).run()
    server.join(5)
    listener.close()
    assert result.words == [1, 2, 1]
    assert len(result.ttft_ns) == len(result.first_ages_ns) == 1
    assert 2 * TICK_NS + 0.02e9 <= result.first_ages_ns[0] < 8e9
    assert 0 < result.ttft_ns[0] < 5e9
    assert result.times_ns == sorted(result.times_ns)


def test_an_error_of_the_server_ends_the_client(words: WordClock, tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    load = Load(Job(host, port, str(tmp_path), streams=1, tokens=4, step_us=1000, prompt="x"))
    with listener, listener.accept()[0] as peer:
        peer.sendall(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises(ConnectionError, match="429"):
            load.run()


def test_figures_of_a_level() -> None:
    """Only events while all streams run count; 4 tokens each 10 ms."""
    second = 10**9
    times = [second + i * 10 * MS for i in range(300)]
    result = Result(
        times_ns=times,
        words=[4] * 300,
        ages_ns=[2 * MS] * 290 + [8 * MS] * 10,
        first_ns=[second, second],
        last_ns=[times[-1], times[-1]],
        cpu_s=1.2,
    )
    job = Job("", 0, "", streams=4, tokens=300, step_us=10_000, prompt="")
    watch = CpuWatch({"server": 1, "tokenizer_proc": 2})
    watch.times = [0.0, 10.0]
    watch.samples = [{"server": 0.0, "tokenizer_proc": 1.0}, {"server": 5.0, "tokenizer_proc": 2.0}]
    level = figures.level_of(job, result, watch)
    assert level.offered == pytest.approx(400)
    assert level.tokens_per_s == pytest.approx(400, rel=0.01)
    assert level.tokens_per_event == 4
    assert (level.p50_ms, level.p99_ms) == (2, 8)
    assert level.cpu_ms_per_1k["server"] == pytest.approx(0.5 / 400 * 1e6, rel=0.01)
    assert level.cpu_percent["tokenizer_proc"] == pytest.approx(10)
    assert level.pair_ms_per_1k == pytest.approx(0.6 / 400 * 1e6, rel=0.01)
    assert level.is_sustained()
    result.last_ns = [second + 200 * MS]
    with pytest.raises(ValueError, match="--seconds"):
        figures.level_of(job, result, watch)


def test_the_search_gives_up_after_two_failures(capsys: pytest.CaptureFixture[str]) -> None:
    """One failure may be the machine's other work: the same load is tried again."""

    class Bench:
        def __init__(self) -> None:
            self.offered: list[float] = []

        def level(self, rate: float) -> figures.Level:
            self.offered.append(rate)
            is_late = rate > 3000 or (self.offered.count(rate) == 1 and rate == 2000)
            names = ("server", "tokenizer_proc", "engine", "client")
            cpu = dict.fromkeys(names, 1.0)
            return figures.Level(rate, rate, 1.0, 500.0 if is_late else 2.0, 1.0, cpu, cpu)

    bench = Bench()
    assert bench_frontend.climb(bench, start=1000, factor=2) == 2000  # type: ignore[arg-type]
    assert bench.offered == [1000, 2000, 2000, 4000, 4000]
    assert capsys.readouterr().out.count("not sustained") == 3


def test_cpu_time_of_a_process_that_works() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = CpuWatch({"busy": busy.pid})
        watch.start()
        time.sleep(0.4)
        watch.end()
        used = watch.used(watch.times[0], watch.times[-1])["busy"]
        assert 0 < used < 2
        assert find_processes(busy.pid) == {}
    finally:
        busy.kill()
        busy.wait()


def test_a_short_run(tmp_path: Path) -> None:
    """All of it on a tiny tokenizer: the launcher, tokenizer_proc, the stand-in, the client."""
    make_tiny("llama", tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts/bench_frontend.py"), "--model", str(tmp_path)),
            *("--streams", "4", "--seconds", "2", "--tokens-per-s", "200", "--requests", "3"),
        ],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"added TTFT, .*: p50 \d+\.\d\d ms", done.stdout)) == 2
    row = done.stdout.splitlines()[-1].split()
    assert 0 < float(row[0]) < 400
    assert row[1] == "200"


def programs_of(parent: int) -> list[bytes | None]:
    """The command lines of its children; None for one that has still its parent's."""
    ours, *others = (
        Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (parent, *children_of(parent))
    )
    return [None if other == ours else other for other in others]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(tmp_path: Path, number: int) -> None:
    """However it ends in the middle of a level; Ctrl-C reaches the whole group of a terminal."""
    model, folders = make_tiny("llama", tmp_path / "model"), tmp_path / "folders"
    folders.mkdir()
    process = subprocess.Popen(
        [
            *(sys.executable, str(ROOT / "scripts/bench_frontend.py"), "--model", model),
            *("--streams", "2", "--seconds", "600", "--tokens-per-s", "20", "--requests", "1"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folders), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    started: list[int] = []
    try:
        assert process.stdout is not None
        while "CPU ms per 1,000 tokens" not in (line := process.stdout.readline()):
            assert line, "it ended before the first level"
        # the server and the client; one that is only forked yet would have the signal as well
        wait_until(lambda: len(programs := programs_of(process.pid)) == 2 and None not in programs)
        direct = children_of(process.pid)
        started = [*direct, *(pid for child in direct for pid in children_of(child))]
        assert len(started) == 4
        os.killpg(process.pid, number)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_alive, started)))
    if number != signal.SIGKILL:
        assert told == "interrupted: the levels above were measured\n"
        assert process.returncode == 130
        assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (["--streams", "0"], "'0': give a whole number of at least 1"),
        (["--tokens-per-s", "0"], "'0': give a number above 0"),
        (["--tokens-per-s", "100", "-5"], "'-5': give a number above 0"),
        (["--tokens-per-s", "nan"], "'nan': give a number above 0"),
        (["--seconds", "0"], "'0': give a number above 0"),
        (["--seconds", "inf"], "not infinite"),
        (["--requests", "0"], "at least 1"),
        (["--start", "-1"], "above 0"),
        (["--factor", "1"], "'1': give a number above 1"),
        (["--tokens-per-s", "8000", "9"], "--tokens-per-s 9: 256 streams get less than 2 tokens"),
        (["--start", "10"], "raise it or --seconds, or lower --streams"),
    ],
)
def test_wrong_arguments_are_refused_before_the_start(
    wrong: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_frontend.py", *wrong])
    monkeypatch.setattr(bench_frontend, "run", lambda args: pytest.fail("it started"))
    with pytest.raises(SystemExit) as end:
        bench_frontend.main()
    assert end.value.code == 2
    assert advice in capsys.readouterr().err
