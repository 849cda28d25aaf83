"""scripts/bench_serve.py as a whole, with its client processes, against a stub that keeps its own clock."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_serve
from scripts.loadtest import plots, selftest
from scripts.loadtest.figures import Round, percentile
from scripts.loadtest.records import Level
from scripts.loadtest.result import LevelResult, RunResult
from scripts.loadtest.run import answer_notes, client_notes
from scripts.loadtest.workload import poisson_arrivals
from tests.server.openai_stub import OpenAIStub, Seen

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_serve.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with OpenAIStub() as running:
        yield running


def bench(stub: OpenAIStub, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON result of a run without warm-up and with short prompts."""
    path = tmp_path / "result.json"
    common = ["--url", stub.url, "--warmup", "0", "--input-len", "8", "--json", str(path)]
    code = bench_serve.main([*common, *flags])
    return code, json.loads(path.read_text()) if path.exists() else {}


def on_a_clock(test: Any) -> Any:
    """Up to five attempts: a machine busy with other work spoils some, a wrong formula spoils all."""

    @functools.wraps(test)
    def attempts(*args: Any, **named: Any) -> None:
        for _ in range(4):
            with contextlib.suppress(AssertionError):
                test(*args, **named)
                return
        test(*args, **named)

    return attempts


def within(measured: float, real: float) -> bool:
    return measured == pytest.approx(real, rel=0.03)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@on_a_clock
def test_times_and_throughput_are_those_of_the_stub(tmp_path: Path, endpoint: str) -> None:
    """4 clients, 2 requests each; 500 ms to the first of 8 pieces, 80 ms between them.

    So long because a busy machine may take milliseconds to carry a request over.
    """
    with OpenAIStub(first_s=0.5, gap_s=0.08) as stub:
        code, found = bench(
            stub, tmp_path,
            *("--endpoint", endpoint, "--concurrency", "4", "--requests", "8", "--rounds", "1"),
            *("--output-len", "8", "--slo", "ttft:10000"),
        )  # fmt: skip
        seen = stub.seen
    assert code == 0
    values = found["levels"][0]["rounds"][0]["values"]
    assert values["completed"] == len(seen) == 8

    def of(time_of: Any, q: float = 0.5) -> float:
        return 1e3 * percentile(sorted(time_of(s) for s in seen), q)

    def gaps(s: Seen) -> list[float]:
        return [b - a for a, b in zip(s.written, s.written[1:], strict=False)]

    assert within(values["ttft_p50_ms"], of(lambda s: s.written[0] - s.came))
    assert within(values["e2e_p50_ms"], of(lambda s: s.ended - s.came))
    assert within(values["itl_p50_ms"], 1e3 * statistics.median(g for s in seen for g in gaps(s)))
    # the stub's usage says two tokens a piece: 15 after the first
    assert within(values["tpot_p50_ms"], of(lambda s: (s.written[-1] - s.written[0]) / 15))
    duration = max(s.ended for s in seen) - min(s.came for s in seen)
    assert within(values["duration_s"], duration)
    assert within(values["output_tps"], 8 * 16 / duration)
    assert within(values["request_rps"], 8 / duration)
    assert within(values["goodput_rps"], 8 / duration)
    assert within(values["total_tps"], 8 * (16 + 7) / duration)
    assert values["in_flight_mean"] == pytest.approx(4, rel=0.05)


@on_a_clock
def test_open_loop_sends_when_planned_whatever_the_server_does(tmp_path: Path) -> None:
    """From two processes; answers take longer than the gaps between arrivals."""
    with OpenAIStub(first_s=0.5) as stub:
        code, found = bench(
            stub, tmp_path,
            *("--rate", "30", "--requests", "60", "--rounds", "1", "--output-len", "2"),
            *("--processes", "2", "--seed", "7"),
        )  # fmt: skip
        came = sorted(s.came for s in stub.seen)
        prompts = {json.dumps(s.body["prompt"]) for s in stub.seen}
    assert code == 0
    assert len(prompts) == 60
    planned = poisson_arrivals(30.0, 60, 7, 0, 0)
    shifts = [real - plan for real, plan in zip(came, planned, strict=True)]
    assert statistics.median(abs(s - statistics.median(shifts)) for s in shifts) < 0.02
    level = found["levels"][0]
    assert level["mode"] == "open"
    assert level["verdict"] != "falls behind"
    assert within(level["rounds"][0]["values"]["ttft_p50_ms"], 500.0 + median_lag(stub))
    assert level["rounds"][0]["values"]["in_flight_mean"] > 5


def median_lag(stub: OpenAIStub) -> float:
    """Milliseconds by which the stub itself was later than it meant to be."""
    return 1e3 * statistics.median(s.written[0] - s.came - stub.first_s for s in stub.seen)


@on_a_clock
def test_open_loop_sees_that_a_server_falls_behind(tmp_path: Path, capsys: Any) -> None:
    """60 a second are asked of a server that does one at a time in 25 ms: 40 a second."""
    with OpenAIStub(gap_s=0.0125) as stub:
        stub.slots = asyncio.Semaphore(1)
        code, found = bench(
            stub, tmp_path,
            *("--rate", "4", "60", "--seconds", "2.5"),
            *("--rounds", "1", "--output-len", "3"),
        )  # fmt: skip
    assert code == 0
    slow, fast = found["levels"]
    assert (slow["verdict"], fast["verdict"]) == ("keeps up", "falls behind")
    assert slow["rounds"][0]["values"]["requests"] < 25
    assert 100 < fast["rounds"][0]["values"]["requests"] < 210
    assert found["knee"]["name"] == "rate 4"
    assert "falls behind at rate 60" in capsys.readouterr().out


@on_a_clock
def test_closed_loop_fills_the_time_it_is_given(tmp_path: Path) -> None:
    with OpenAIStub(first_s=0.05) as stub:
        flags = ("--concurrency", "2", "--seconds", "1", "--rounds", "1", "--output-len", "1")
        code, found = bench(stub, tmp_path, *flags)
        prompts = {json.dumps(s.body["prompt"]) for s in stub.seen}
    assert code == 0
    values = found["levels"][0]["rounds"][0]["values"]
    assert values["completed"] == len(stub.seen) == len(prompts)
    starts = [start for start, _, _ in found["levels"][0]["rounds"][0]["timeline"]]
    assert max(starts) <= 1.1  # a busy machine may hold the client between its look and its start
    assert 0.8 <= values["duration_s"] < 5.0
    assert 1.5 < values["in_flight_mean"] <= 2.01


def test_three_rounds_of_two_levels_with_all_outputs(
    stub: OpenAIStub, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("matplotlib")
    stub.gap_s = 0.01
    stub.metrics = (
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
        'srv:process_resident_memory_bytes{process="engine"} 3221225472\n'
        'vllm:cache_config_info{block_size="16",engine="0"} 1.0\n'
    )
    code, found = bench(
        stub, tmp_path,
        *("--concurrency", "1", "2", "--requests", "4", "--output-len", "3"),
        *("--plots", str(tmp_path / "plots"), "--api-key", "sk-secret", "--header", "X-Who: secret"),
    )  # fmt: skip
    assert code == 0
    out, progress = capsys.readouterr()
    assert [len(level["rounds"]) for level in found["levels"]] == [3, 3]
    figure = found["levels"][1]["figures"]["output_tps"]
    assert figure["low"] <= figure["median"] <= figure["high"]
    assert figure["rounds"] == 3
    assert found["levels"][0]["figures"]["server_kv_use_peak"]["median"] == 0.5
    assert found["server"]["cache_config.block_size"] == "16"
    assert found["server"]["models"] == ["stub-model"]
    # prompts are never the same, in no level and no round
    assert len({json.dumps(s.body["prompt"]) for s in stub.seen}) == len(stub.seen) == 24
    assert {s.headers["Authorization"] for s in stub.seen} == {"Bearer sk-secret"}
    assert {s.headers["X-Who"] for s in stub.seen} == {"secret"}
    assert "secret" not in json.dumps(found) + out + progress
    for heading in ("out tok/s", "TTFT", "KV peak %", "3.00", "Knee: concurrency", "usage"):
        assert heading in out
    assert progress.count("\n") == 6
    for name in ("curve.png", "ttft.png"):
        data = (tmp_path / "plots" / name).read_bytes()
        assert data.startswith(PNG)
        assert len(data) > 5_000
    assert bench_serve.main(["compare", *[str(tmp_path / "result.json")] * 2]) == 0
    assert "All settings are the same" in capsys.readouterr().out


def test_without_matplotlib_there_is_a_note(
    stub: OpenAIStub, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = ("--concurrency", "1", "--requests", "1", "--rounds", "1", "--output-len", "2")
    code, _ = bench(stub, tmp_path, *flags, "--plots", str(tmp_path / "plots"))
    assert code == 0
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_errors_are_counted_and_a_hopeless_run_stops(
    stub: OpenAIStub, tmp_path: Path, capsys: Any
) -> None:
    stub.mode, stub.retry_after = "http_429", "5"
    code, found = bench(stub, tmp_path, "--concurrency", "2", "4", "--requests", "6")
    assert code == 1
    assert found["levels"][0]["errors"] == {"HTTP 429": 6}
    assert len(found["levels"]) == 1
    out = capsys.readouterr().out
    assert "6 x HTTP 429 (the queue is full)" in out
    assert "Retry-After was 5.0 s" in out
    assert "Not one request of round 1/3, concurrency 2 succeeded" in out
    assert len(stub.seen) == 6


def test_some_errors_leave_the_rest_measured(stub: OpenAIStub, tmp_path: Path, capsys: Any) -> None:
    stub.mode, stub.refusals, stub.usage = "http_429", 2, False
    flags = ("--concurrency", "2", "--requests", "8", "--rounds", "1", "--output-len", "3")
    code, found = bench(stub, tmp_path, *flags)
    assert code == 0
    values = found["levels"][0]["rounds"][0]["values"]
    assert (values["completed"], values["failed"]) == (6, 2)
    assert "Tokens are chunks of text" in capsys.readouterr().out


def test_a_dead_server_is_named_at_once(tmp_path: Path, capsys: Any) -> None:
    with OpenAIStub() as stub:
        pass
    for flags in ((), ("--model", "m")):
        code, found = bench(stub, tmp_path, *flags)
        assert (code, found) == (1, {})
        assert f"nothing answers at {stub.url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--concurrency", "0"), "whole number of at least 1"),
        (("--rate", "0"), "above 0"),
        (("--input-len", "zipf:1"), "uniform:LOW:HIGH"),
        (("--slo", "ttft"), "NAME:MILLISECONDS"),
        (("--concurrency", "1", "--rate", "1"), "not allowed with"),
        (("--extra-body", "[1]"), "JSON object"),
        (("--token-ids", "9:3"), "LOW below HIGH"),
        (("--header", "nocolon"), "Name: value"),
        (("--shared-prefix", "2"), "from 0 to 1"),
        (("--endpoint", "chat", "--prompts", "ids", "--model", "m"), "chat takes no token ids"),
        (("--url", "localhost:8000"), "http://"),
        (("--url", "http://[::1"), "--url http://[::1: Invalid IPv6"),
        (("--input-len", "lognormal:5:1000"), "SIGMA of at most"),
        (("--concurrency", "9", "--requests", "4", "--model", "m"), "fewer than 9 clients busy"),
        (("--dataset", "/nowhere.jsonl", "--model", "m"), "/nowhere.jsonl"),
    ],
)
def test_wrong_arguments_are_advised(flags: tuple[str, ...], message: str, capsys: Any) -> None:
    try:
        code: Any = bench_serve.main(list(flags))
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "name", "reason"),
    [
        ("--json", "folder", "Is a directory"),
        ("--json", "file/a.json", "File exists: "),
        ("--json", "/proc/nowhere/a.json", "No such file"),
        ("--json", "x" * 300, "File name too long"),
        ("--plots", "file", "File exists"),
        ("--plots", "file/plots", "Not a directory"),
        ("--plots", "taken", "Is a directory"),
    ],
)
def test_results_that_have_no_place_are_refused_before_anything_is_sent(
    stub: OpenAIStub, tmp_path: Path, capsys: Any, flag: str, name: str, reason: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "curve.png").mkdir(parents=True)
    assert bench_serve.main(["--url", stub.url, flag, str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{flag} " in line
    assert reason in line
    assert stub.seen == []


def test_a_dataset_is_refused_by_file_and_line(
    stub: OpenAIStub, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "max_tokens": "x"}\n')
    assert bench_serve.main(["--url", stub.url, "--dataset", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}, line 2: `max_tokens` is 'x'")
    assert stub.seen == []


SHORT = ("--concurrency", "1", "--requests", "1", "--rounds", "1", "--warmup", "0")


def script(
    *flags: str, out: Any = subprocess.PIPE, err: Any = subprocess.PIPE
) -> tuple[int, str, str]:
    """Exit code and both outputs of a process, whose streams may be files."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], stdout=out, stderr=err, text=True, timeout=120
    )
    return done.returncode, done.stdout or "", done.stderr or ""


def test_a_full_disk_takes_the_report_and_leaves_the_json(stub: OpenAIStub, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with open("/dev/full", "w") as full:
        code, _, err = script("--url", stub.url, *SHORT, "--json", str(path), out=full)
        assert code == 1
        said = "error: standard output could not be written: No space left on device"
        assert err.splitlines()[1:] == [said]  # after the round's line
        assert json.loads(path.read_text())["levels"]
        assert script("compare", str(path), str(path), out=full) == (1, "", f"{said}\n")


def test_a_full_disk_takes_the_json_and_leaves_the_report(stub: OpenAIStub) -> None:
    code, out, err = script("--url", stub.url, *SHORT, "--json", "/dev/full")
    assert code == 1
    assert "out tok/s" in out
    assert "Figures:" not in out
    said = "error: --json /dev/full could not be written: No space left on device"
    assert err.splitlines()[1:] == [said]


def test_progress_that_cannot_be_shown_ends_nothing(stub: OpenAIStub) -> None:
    with open("/dev/full", "w") as full:
        code, out, _ = script("--url", stub.url, *SHORT, err=full)
    assert code == 0
    assert "out tok/s" in out


def test_plots_that_cannot_be_written_are_told_in_a_line(
    stub: OpenAIStub, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(found: RunResult, folder: Path) -> list[Path]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plots, "draw", draw)
    code, found = bench(stub, tmp_path, *SHORT, "--plots", str(tmp_path / "plots"))
    assert code == 1
    assert found["levels"]
    assert "plots could not be written: No space left on device" in capsys.readouterr().err


def test_an_existing_result_is_overwritten(stub: OpenAIStub, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("old" * 100_000)
    code, found = bench(stub, tmp_path, *SHORT)
    assert code == 0
    assert found["levels"]


@pytest.mark.parametrize("text", ["{}", '{"format": 1}', '{"format": 1, "levels": ' + "[" * 10**5])
def test_comparing_what_is_no_result_is_refused_in_a_line(
    tmp_path: Path, capsys: Any, text: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert bench_serve.main(["compare", str(path), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path} is ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reports_what_there_is(number: int, tmp_path: Path) -> None:
    """To the whole group, as terminals and `timeout` do; one answered request, then a server that stalls."""
    with OpenAIStub() as stub:
        command = [sys.executable, str(SCRIPT), "--url", stub.url, "--warmup", "0"]
        command += ["--concurrency", "1", "--output-len", "3", "--input-len", "4"]
        command += ["--json", str(tmp_path / "r.json"), "--processes", "1"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            wait_for_requests(stub, 1)
            stub.mode = "stall"
            wait_for_stall(stub)
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=20)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "a client process ended" not in err
    assert "Interrupted: this is what there was" in out
    values = json.loads((tmp_path / "r.json").read_text())["levels"][0]["rounds"][0]["values"]
    assert 1 <= values["completed"] < 16
    assert values["given_up"] == 1


def wait_for_requests(stub: OpenAIStub, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(stub.seen) < count:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def wait_for_stall(stub: OpenAIStub) -> None:
    """Until the last request hangs: two of its three pieces are written, and nothing follows."""
    deadline = time.monotonic() + 20
    while not (len(stub.seen[-1].written) == 2 and time.perf_counter() - stub.seen[-1].came > 0.5):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['x', '--help']; sys.path.insert(0, 'scripts')\n"
        "import bench_serve\n"
        "try: bench_serve.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'aiohttp', 'numpy', 'matplotlib', 'torch', 'uvloop'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.endswith("[]\n"), done.stderr
    assert "--concurrency" in done.stdout
    assert "compare" in done.stdout


def test_the_self_test_reads_every_chunk() -> None:
    """Its figures are for an idle machine; here only that they are made of all chunks."""
    measured = selftest.measure(0.0)
    assert measured.chunks_per_s > 0
    assert 0 < measured.reads_per_chunk <= 1
    assert measured.capacity > 0


def test_prompts_that_the_server_knows_are_named() -> None:
    level = LevelResult(Level("closed", 1), [Round({"server_prefix_hit_percent": 55.0})])
    assert answer_notes(RunResult({"shared_prefix": 0.5}, levels=[level])) == []
    notes = answer_notes(RunResult({"shared_prefix": 0.0}, levels=[level]))
    assert "up to 55% of the prompt tokens" in notes[0]
    assert "--seed" in notes[0]


def test_a_busy_client_is_named_as_the_limit() -> None:
    def level(value: float, **values: float) -> LevelResult:
        return LevelResult(Level("closed", value), [Round(dict(values))])

    calm = level(4, client_cpu_percent=40.0, late_p99_ms=1.0)
    busy = level(64, client_cpu_percent=97.0, late_p99_ms=80.0, duration_s=5.0)
    short = level(8, client_cpu_percent=97.0, duration_s=0.1)
    assert client_notes(RunResult(levels=[calm, short])) == []
    notes = client_notes(RunResult(levels=[calm, busy]))
    assert "limit at concurrency 64 (97% of a core)" in notes[0]
    assert "--processes" in notes[0]
    assert "late at concurrency 64" in notes[1]
