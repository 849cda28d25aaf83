"""The load test's arithmetic, exactly: percentiles, lengths, arrivals, the scan of streams, the knee."""

import json
import math
import random
import statistics
from array import array
from pathlib import Path

import pytest

from scripts.loadtest.compare import compare
from scripts.loadtest.dataset import read_dataset
from scripts.loadtest.figures import (
    FALLS_BEHIND,
    KEEPS_UP,
    TOO_SHORT,
    Round,
    distribution,
    judge,
    over_rounds,
    percentile,
    summarize,
)
from scripts.loadtest.fleet import Fleet
from scripts.loadtest.knee import Point, find_knee
from scripts.loadtest.records import Level, Record
from scripts.loadtest.result import LevelResult, RunResult, read, write
from scripts.loadtest.scan import LONGEST_LINE, BadStream, StreamScan
from scripts.loadtest.slo import Slo
from scripts.loadtest.watch import ServerInfo, Watch, read_values
from scripts.loadtest.workload import Lengths, Workload, poisson_arrivals


def record(start: float, *pieces: float, end: float | None = None, **more: object) -> Record:
    last = pieces[-1] if pieces else start
    return Record(start, 4, last if end is None else end, array("d", pieces), **more)  # type: ignore[arg-type]


# --- figures ---------------------------------------------------------------------------------------


def test_percentiles_are_linear_between_values() -> None:
    values = [float(i) for i in range(101)]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.9, 0.99, 1.0)] == [0, 50, 90, 99, 100]
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([10.0, 20.0], 0.99) == pytest.approx(19.9)
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))
    assert distribution("x", []) == {}


def test_summary_of_known_times() -> None:
    records = [
        record(10.0, 10.5, 10.6, 10.8, prompt_tokens=5, completion_tokens=4, status=200),
        record(10.0, 11.5, 11.7, end=14.0, prompt_tokens=15, completion_tokens=6, status=200),
        record(11.0, 11.1, end=12.0, error="timeout", detail="no end"),
    ]
    found = summarize(records)
    v = found.values
    assert (v["requests"], v["completed"], v["failed"]) == (3, 2, 1)
    assert found.errors == {"timeout": 1}
    assert found.error_examples == {"timeout": "no end"}
    assert found.tokens_from == "usage"
    assert v["duration_s"] == pytest.approx(4.0)
    assert v["request_rps"] == pytest.approx(0.5)
    assert v["output_tps"] == pytest.approx(10 / 4)
    assert v["total_tps"] == pytest.approx(30 / 4)
    assert v["ttft_p50_ms"] == pytest.approx(1000.0)  # of 500, 1500
    assert v["itl_p50_ms"] == pytest.approx(200.0)  # of 100, 200, 200
    assert v["tpot_p50_ms"] == pytest.approx((100 + 40) / 2)  # 300 ms / 3 and 200 ms / 5
    assert v["e2e_p99_ms"] == pytest.approx(800 + 0.99 * 3200)
    assert v["in_flight_mean"] == pytest.approx(4.8 / 4)  # Little's law


def test_tokens_are_chunks_where_no_usage_came() -> None:
    plain, counted = record(0.0, 1.0, 2.0), record(0.0, 1.0, 2.0, completion_tokens=8)
    assert summarize([plain]).tokens_from == "chunks"
    assert summarize([plain]).values["output_tps"] == pytest.approx(1.0)
    assert summarize([plain, counted]).tokens_from == "both"
    assert summarize([plain, counted]).values["output_tps"] == pytest.approx(5.0)


def test_answers_without_text_have_no_ttft_and_are_told() -> None:
    values = summarize([record(0.0, end=1.0, completion_tokens=4)]).values
    assert values["without_text"] == 1
    assert values["output_tps"] == 4
    assert "ttft_p50_ms" not in values


def test_nothing_and_only_failures_are_no_crash() -> None:
    assert summarize([]).values["completed"] == 0
    failed = summarize([record(1.0, end=1.0, error="connection refused")])
    assert failed.values["failed"] == 1
    assert "output_tps" not in failed.values


def test_median_and_noise_over_rounds() -> None:
    figure = over_rounds([Round({"x": v}) for v in (10.0, 8.0, 9.0)])["x"]
    assert (figure.median, figure.low, figure.high, figure.rounds) == (9.0, 8.0, 10.0, 3)
    assert figure.noise == pytest.approx(1 / 9)
    assert over_rounds([Round({"x": 3.0})])["x"].noise is None


def test_an_interrupted_round_counts_only_alone() -> None:
    cut = Round({"x": 1.0}, interrupted=True)
    assert over_rounds([Round({"x": 5.0}), cut])["x"].median == 5.0
    assert over_rounds([cut])["x"].median == 1.0


def test_goodput_counts_requests_within_all_limits() -> None:
    slo = Slo.parse("ttft:500, itl:150")
    assert str(slo) == "ttft:500,itl:150"
    good = record(0.0, 0.4, 0.5, 0.6)
    late = record(0.0, 0.6, 0.7)
    slow = record(0.0, 0.4, 0.5, 0.9)
    failed = record(0.0, 0.1, 0.2, end=1.0, error="closed mid-stream")
    assert [slo.is_met(r) for r in (good, late, slow, failed)] == [True, False, False, False]
    assert Slo.parse("e2e:900").is_met(slow)
    assert not Slo.parse("tpot:249").is_met(slow)  # 500 ms / 2
    values = summarize([good, late, slow, failed], slo.is_met).values
    assert values["goodput_rps"] == pytest.approx(1.0)
    assert values["slo_met_percent"] == 25.0
    for wrong in ("", "ttft", "ttft:0", "speed:4", "ttft:x"):
        with pytest.raises(ValueError, match="NAME:MILLISECONDS"):
            Slo.parse(wrong)


def queue(rate: float, service_s: float, count: int, seed: int) -> list[Record]:
    """Records of a single server that takes `service_s` for each request, first come, first served."""
    free, records = 0.0, []
    for start in poisson_arrivals(rate, count, seed, 0, 0):
        free = max(free, start) + service_s
        records.append(record(start, free))
    return records


@pytest.mark.parametrize("seed", range(5))
def test_falling_behind_is_seen_and_keeping_up_is_not_blamed(seed: int) -> None:
    assert judge(queue(rate=2.0, service_s=1.0, count=200, seed=seed)) == FALLS_BEHIND
    assert judge(queue(rate=0.5, service_s=1.0, count=200, seed=seed)) == KEEPS_UP


def test_a_test_shorter_than_its_requests_cannot_tell() -> None:
    """Any number of requests at a time, 60 s each: under way grows until the first one ends."""
    arrivals = poisson_arrivals(2.0, 200, 0, 0, 0)  # 100 s
    assert judge([record(start, start + 60.0) for start in arrivals]) == TOO_SHORT
    assert judge([record(start, start + 20.0) for start in arrivals]) == KEEPS_UP


# --- what is sent ----------------------------------------------------------------------------------


def test_lengths_follow_their_distributions() -> None:
    rng = random.Random(3)

    def draws(text: str, count: int = 20_000) -> list[int]:
        lengths = Lengths.parse(text)
        return [lengths.draw(rng) for _ in range(count)]

    assert set(draws("512")) == {512}
    uniform = draws("uniform:10:20")
    assert (min(uniform), max(uniform)) == (10, 20)
    assert statistics.fmean(uniform) == pytest.approx(15, rel=0.01)
    normal = draws("normal:500:50")
    assert statistics.fmean(normal) == pytest.approx(500, rel=0.01)
    assert statistics.stdev(normal) == pytest.approx(50, rel=0.05)
    lognormal = draws("lognormal:300:0.5")
    assert statistics.median(lognormal) == pytest.approx(300, rel=0.03)
    assert statistics.fmean(lognormal) == pytest.approx(300 * math.exp(0.125), rel=0.03)
    assert max(draws("lognormal:300:2:400")) == 400
    assert min(draws("normal:2:10")) == 1
    for text in ("512", "uniform:10:20", "normal:500:50", "lognormal:300:0.5:400"):
        assert str(Lengths.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "x", "0", "uniform:5", "uniform:9:3", "zipf:1:2", "normal:1:nan"]
)
def test_wrong_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ValueError, match=r"uniform:LOW:HIGH|begin at 1"):
        Lengths.parse(text)


def workload(**more: object) -> Workload:
    settings: dict[str, object] = {
        "model": "m",
        "chat": False,
        "text": False,
        "input_len": Lengths.parse("uniform:50:150"),
        "output_len": Lengths.parse("uniform:5:9"),
    }
    return Workload(**{**settings, **more})  # type: ignore[arg-type]


def test_requests_repeat_with_the_seed_and_differ_otherwise() -> None:
    w = workload(seed=4)
    first = w.request(0, 1, 2)
    assert first == workload(seed=4).request(0, 1, 2)
    others = [w.request(*key).body for key in ((1, 1, 2), (0, 0, 2), (0, 1, 3))]
    others.append(workload(seed=5).request(0, 1, 2).body)
    assert first.body not in others
    body = json.loads(first.body)
    assert body["max_tokens"] == first.max_tokens
    assert 5 <= first.max_tokens <= 9
    assert 50 <= len(body["prompt"]) <= 150
    assert all(100 <= token < 10_000 for token in body["prompt"])
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_shared_prefix_is_the_given_share_and_no_more() -> None:
    w = workload(shared_prefix=0.4, input_len=Lengths.parse("100"))
    a, b = (json.loads(w.request(0, 0, i).body)["prompt"] for i in (0, 1))
    assert a[:40] == b[:40]
    assert a[40:44] != b[40:44]
    assert len(a) == len(b) == 100
    text = json.loads(workload(shared_prefix=0.5, text=True).request(0, 0, 0).body)["prompt"]
    assert 50 <= len(text.split()) <= 150


def test_fields_of_the_body() -> None:
    plain = json.loads(workload(usage=False).request(0, 0, 0).body)
    assert plain["temperature"] == 0.0
    assert not {"seed", "ignore_eos", "stream_options"} & plain.keys()
    full = workload(temperature=0.7, ignore_eos=True, extra={"top_p": 0.5}, chat=True, text=True)
    body = json.loads(full.request(0, 0, 0).body)
    assert body["ignore_eos"] is True
    assert body["top_p"] == 0.5
    assert isinstance(body["seed"], int)
    assert body["messages"][0]["role"] == "user"
    assert "prompt" not in body


def test_dataset(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n{"prompt": "c"}\n')
    w = workload(dataset=read_dataset(path))
    bodies = [json.loads(w.request(0, 0, i).body) for i in range(3)]
    assert sorted(str(body["prompt"]) for body in bodies) == ["[1, 2]", "a", "c"]
    assert [body["max_tokens"] for body in bodies if body["prompt"] == "a"] == [3]
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    body = json.loads(workload(chat=True, dataset=read_dataset(path)).request(0, 0, 9).body)
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    for text, message in (
        ('{"prompt": "a"}\n{oops', "line 2: not JSON"),
        ('{"text": "a"}', "line 1: give an object"),
        ("\n", "holds no prompts"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_dataset(path)


def test_arrivals_are_poisson() -> None:
    times = poisson_arrivals(4.0, 20_000, seed=1, round_number=0, level=0)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.03)  # exponential: equals the mean
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.01)
    counts = [0] * int(times[-1])
    for time in times:
        if time < len(counts):
            counts[int(time)] += 1
    assert statistics.variance(counts) / statistics.fmean(counts) == pytest.approx(1, abs=0.1)
    assert times == poisson_arrivals(4.0, 20_000, seed=1, round_number=0, level=0)
    assert times != poisson_arrivals(4.0, 20_000, seed=1, round_number=1, level=0)


@pytest.mark.parametrize("processes", [1, 3, 8])
@pytest.mark.parametrize("level", [Level("closed", 5), Level("open", 10.0)])
def test_processes_share_a_round_without_loss(processes: int, level: Level) -> None:
    fleet = Fleet(None, workload(seed=2), processes)  # type: ignore[arg-type]
    jobs = fleet.deal(level, 0, 1, 23, math.inf)
    assert sorted(i for job in jobs for i in job.indices) == list(range(23))
    if level.mode == "closed":
        assert sum(job.clients for job in jobs) == 5
        assert all(job.clients for job in jobs)
    else:
        planned = sorted(time for job in jobs for time in job.arrivals or ())
        assert planned == poisson_arrivals(10.0, 23, 2, 1, 0)


# --- the scan of a stream --------------------------------------------------------------------------

STREAM = (
    b': keep-alive\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
    b'data: {"choices": [{"delta": {"content": "a \\"text\\":\\"b\\" \xc3\xa9"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"","reasoning_content":"hm"}}],"error":null}\r\n\r\n'
    b'data: {"choices":[{"text":"c","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_scan_is_the_same_however_the_bytes_are_cut(size: int) -> None:
    scan = StreamScan(array("d"))
    for at in range(0, len(STREAM), size):
        scan.feed(STREAM[at : at + size], float(at + size))
    assert len(scan.pieces) == 3
    assert scan.usage == {"prompt_tokens": 3, "completion_tokens": 9}
    assert scan.finished
    assert scan.done is not None
    assert scan.error is None
    ends = [
        STREAM.index(mark) + len(mark) for mark in (b'\xa9"}}]}\n', b"null}\r\n", b'"length"}]}\n')
    ]
    for time, end in zip(scan.pieces, ends, strict=True):
        assert end <= time < end + size


def test_scan_takes_a_last_line_without_its_end() -> None:
    scan = StreamScan(array("d"))
    scan.feed(b'data: {"choices":[{"text":"x"}]}', 1.0)
    assert len(scan.pieces) == 0
    scan.close(2.0)
    assert list(scan.pieces) == [2.0]


def test_scan_names_errors() -> None:
    scan = StreamScan(array("d"))
    scan.feed(b'data: {"error": {"message": "engine died"}}\n\n', 0.0)
    assert scan.error == "engine died"
    with pytest.raises(BadStream, match="not JSON"):
        StreamScan(array("d")).feed(b'data: {"usage": {\n\n', 0.0)
    endless = StreamScan(array("d"))
    with pytest.raises(BadStream, match="4 MiB"):
        endless.feed(b"x" * (LONGEST_LINE + 1), 0.0)


# --- knee, comparison, metrics ---------------------------------------------------------------------


def batching_server(levels: list[int], a: float, b: float) -> list[Point]:
    """A step takes a + b * clients ms: throughput c / (a + bc), power c / (a + bc)^2, best at a / b."""
    return [Point(f"concurrency {c}", 1e3 * c / (a + b * c), 100 * (a + b * c)) for c in levels]


@pytest.mark.parametrize(("a", "b", "expected"), [(8.0, 1.0, 8), (32.0, 1.0, 32), (10.0, 5.0, 2)])
def test_knee_of_synthetic_curves(a: float, b: float, expected: int) -> None:
    knee = find_knee(batching_server([1, 2, 8, 32, 128], a, b))
    assert knee is not None
    assert knee.name == f"concurrency {expected}"
    assert f"Run at about concurrency {expected}" in knee.advice
    assert "power" in knee.rule


def test_of_levels_that_tie_the_one_with_more_throughput_is_the_knee() -> None:
    # power: 14/900, 16/1024, 18/1156, less than half a percent apart
    knee = find_knee(batching_server([4, 14, 16, 18, 64], 16.0, 1.0))
    assert knee is not None
    assert knee.name == "concurrency 18"


def test_knee_at_the_ends_says_so() -> None:
    last = find_knee(batching_server([1, 2, 4], 100.0, 1.0))
    assert last is not None
    assert (last.name, "measure higher levels" in last.advice) == ("concurrency 4", True)
    first = find_knee(batching_server([4, 8, 16], 1.0, 1.0))
    assert first is not None
    assert (first.name, "already the knee" in first.advice) == ("concurrency 4", True)
    assert find_knee(batching_server([4], 1.0, 1.0)) is None


def test_knee_respects_falling_behind_and_the_slo() -> None:
    points = [
        Point("rate 1", 100, 50, 100.0),
        Point("rate 2", 200, 55, 99.5),
        Point("rate 4", 400, 60, 40.0, falls_behind=True),
    ]
    knee = find_knee(points)
    assert knee is not None
    assert knee.name == "rate 2"
    assert "falls behind at rate 4" in knee.advice
    assert "Rate 2 gives the most throughput with 99% within the SLO" in knee.advice


def result_of(values: list[float], **settings: object) -> RunResult:
    rounds = [Round({"output_tps": v, "e2e_p50_ms": 1e4 / v, "ttft_p50_ms": 5.0}) for v in values]
    return RunResult(dict(settings), {"models": ["m"]}, [LevelResult(Level("closed", 4), rounds)])


def written(tmp_path: Path, name: str, result: RunResult) -> dict[str, object]:
    write(result, tmp_path / name)
    return read(tmp_path / name)


def test_comparison_tells_settings_ratios_and_noise(tmp_path: Path) -> None:
    a = written(tmp_path, "a.json", result_of([98.0, 100.0, 102.0], seed=0, input_len="512"))
    b = written(tmp_path, "b.json", result_of([118.0, 120.0, 122.0], seed=0, input_len="256"))
    lines = {line.split("  ")[0]: line.split() for line in compare(a, b).splitlines() if line}
    assert lines["client input_len"] == ["client", "input_len", "512", "256"]
    assert "client seed" not in lines
    # noise: 1.2 * sqrt(0.02^2 + (1/60)^2)
    assert lines["output tok/s"][2:] == ["100.00", "120.00", "1.200", "±0.031", "B", "better"]
    assert lines["e2e p50"][-2:] == ["B", "better"]
    assert lines["TTFT p50"][-2:] == ["no", "difference"]


def test_comparison_within_noise_or_without_rounds_claims_nothing(tmp_path: Path) -> None:
    a = written(tmp_path, "a.json", result_of([90.0, 100.0, 110.0]))
    b = written(tmp_path, "b.json", result_of([95.0, 105.0, 115.0]))
    text = compare(a, b)
    assert "All settings are the same" in text
    assert "better" not in text
    single = written(tmp_path, "c.json", result_of([200.0]))
    assert "noise unknown" in compare(a, single)
    other = result_of([1.0])
    other.levels[0].level = Level("closed", 9)
    text = compare(a, written(tmp_path, "d.json", other))
    assert "concurrency 4: only in A" in text
    assert "concurrency 9: only in B" in text


def test_results_have_no_nan_and_wrong_files_are_refused(tmp_path: Path) -> None:
    result = result_of([1.0], rate=math.inf)
    result.levels[0].rounds[0].values["odd"] = math.nan
    found = written(tmp_path, "a.json", result)
    assert found["settings"] == {"rate": None}
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json").write_text("oops")
    for name, message in (("b", "no result of"), ("c", "not JSON"), ("missing", "cannot read")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / f"{name}.json")


def test_watch_gives_peaks_and_growth() -> None:
    watch = Watch(ServerInfo("http://127.0.0.1:9"))
    watch.seen = [
        {"kv_use": 0.2, "gpu_memory_bytes": 0.0, "prefix_queries": 100.0, "prefix_hits": 50.0},
        {"kv_use": 0.7, "gpu_memory_bytes": 0.0, "prefix_queries": 200.0, "prefix_hits": 75.0},
        {"kv_use": 0.1, "gpu_memory_bytes": 0.0, "prefix_queries": 300.0, "prefix_hits": 80.0},
    ]
    assert watch.figures() == {"server_kv_use_peak": 0.7, "server_prefix_hit_percent": 15.0}


def test_metrics_of_several_servers_are_understood() -> None:
    ours = (
        "# HELP vllm:num_requests_running Requests.\n"
        'vllm:num_requests_running{engine="0",model_name="a b"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:gpu_cache_usage_perc{engine="0"} 0.25\n'
        'srv:process_resident_memory_bytes{process="server"} 1e9\n'
        'srv:process_resident_memory_bytes{process="engine"} 2e9\n'
        "process_resident_memory_bytes 5\n"
    )
    assert read_values(ours) == {"kv_use": 0.25, "memory_bytes": 3e9, "running": 3.0}
    assert read_values("sglang:token_usage 0.5\nbad line\nx NaNope\n") == {"kv_use": 0.5}
    assert read_values("<html>not metrics</html>") == {}
