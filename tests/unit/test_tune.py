"""scripts/tune.py: the search on made-up figures, its files, and one real trial on a tiny model."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.ops.plan_decode import MAX_BATCH
from scripts import tune
from scripts.operate.candidates import AGAIN, BASELINE, Candidate, Load, own_candidates, parse_try
from scripts.operate.search import LEAST_SECONDS, RUNGS, OutOfTime, Search, State, planned
from scripts.operate.trial import Bench, LoadFailed, Trial, run_group, scores_of
from scripts.operate.verdict import decide, report, write_config
from server.cli import parse
from tests.engine_cpu.tiny_models import make_tiny
from tests.server import certificates

INFO = {
    "limits": {
        "device": "cpu", "max_num_batched_tokens": 512, "max_num_seqs": 64, "block_size": 16,
        "enable_prefix_caching": True, "dtype": "float32",
    },
    "engine": {"cpu_threads": 0, "overlap": "auto", "admission": "peak"},
}  # fmt: skip
GAINS = {"a 1": 1.3, "a 2": 1.1, "b 1": 1.2, "c 1": 0.8, "d 1": 1.001}


class MadeUp(Bench):
    """Each flag multiplies the score; rounds differ by 1%."""

    def __init__(self, gains: dict[str, float], lower: bool = False, base: float = 100.0) -> None:
        super().__init__([], [], 1, "ttft_p50_ms" if lower else "output_tps", Path())
        self.gains, self.lower, self.base = gains, lower, base
        self.runs: list[tuple[str, int]] = []
        self.stop_after = 10**9

    def run(self, candidate: Candidate, rung: int, seconds: float) -> tuple[Trial, dict[str, Any]]:
        if len(self.runs) >= self.stop_after:
            raise KeyboardInterrupt
        self.runs.append((candidate.name, rung))
        trial = Trial(candidate.name, rung, seconds, wall_s=seconds, start_s=0.0)
        factor = math.prod(self.gains[f"{k} {v}"] for k, v in candidate.flags.items())
        if math.isnan(factor):
            trial.error = "the server ended with exit code 70"
        else:
            score = self.base / factor if self.lower else self.base * factor
            trial.scores = [score * 0.99, score, score * 1.01]
        return trial, INFO


def search_of(bench: MadeUp, path: Path, budget_s: float = 600.0) -> Search:
    candidates = [Candidate.of(*name.split()) for name in bench.gains]
    state = State.load(path / "trials.json", "key")
    return Search(bench, state, lambda info: candidates, budget_s, bench.lower, lambda text: None)


@pytest.mark.parametrize("lower", [False, True])
def test_what_helps_alone_is_combined(tmp_path: Path, lower: bool) -> None:
    bench = MadeUp(GAINS, lower)
    search = search_of(bench, tmp_path)
    search.run()
    assert search.is_complete
    verdict = decide(search)
    assert verdict.flags == {"a": "1", "b": "1"}, "one value of each setting, the best"
    told = "\n".join(verdict.reasons)
    assert "c 1: " in told
    assert told.count("worse") == 1
    assert "d 1: " in told
    assert told.count("no difference beyond noise") == 1
    assert f"{bench.figure} {100 / 1.56 if lower else 156:.4g} instead of 100" in verdict.headline
    sizes = [len([run for run in bench.runs if run[1] == rung]) for rung in (0, 1, RUNGS)]
    assert sizes == [3 + 5, 2 + 3, 4], "halved; the baseline's first trial counts as rung 0 here"


def test_a_fluke_does_not_win(tmp_path: Path) -> None:
    bench = MadeUp({"a 1": 1.008, "b 1": 0.99, "c 1": math.nan})
    search = search_of(bench, tmp_path)
    search.run()
    verdict = decide(search)
    assert verdict.flags == {}
    assert "nothing was better" in verdict.headline
    assert "c 1: failed: the server ended with exit code 70" in verdict.reasons
    assert "nothing was better" in report(search, verdict)


def test_a_machine_that_slows_down_makes_no_winner(tmp_path: Path) -> None:
    """The baseline runs before and after: 20% better is less than that drift."""
    bench = MadeUp({"a 1": 1.2})
    search = search_of(bench, tmp_path)
    search.run()
    assert decide(search).flags == {"a": "1"}
    again = search.state.find(AGAIN, RUNGS)
    assert again is not None
    again.scores = [score * 1.5 for score in again.scores]
    assert decide(search).flags == {}


def test_goodput_from_nothing_is_a_gain(tmp_path: Path) -> None:
    bench = MadeUp({"a 1": 1.2}, base=0.0)
    search = search_of(bench, tmp_path)
    search.run()
    assert decide(search).flags == {}
    good = Trial("a 1", 0, 1.0, scores=[1.0, 1.0])
    assert search.is_better(good, Trial(BASELINE, 0, 1.0, scores=[0.0, 0.0]))


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    bench = MadeUp(GAINS)
    bench.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        search_of(bench, tmp_path).run()
    assert len(bench.runs) == 4
    bench.stop_after = 10**9
    search = search_of(bench, tmp_path)
    search.run()
    assert search.is_complete
    assert decide(search).flags == {"a": "1", "b": "1"}
    assert len(bench.runs) == 8 + 5 + 4, "no trial was run twice"
    with pytest.raises(ValueError, match="another load"):
        State.load(tmp_path / "trials.json", "other")
    (tmp_path / "trials.json").write_text("{}")
    with pytest.raises(ValueError, match="remove it"):
        State.load(tmp_path / "trials.json", "key")


def test_the_budget_is_kept(tmp_path: Path) -> None:
    bench = MadeUp(GAINS)
    search = search_of(bench, tmp_path, budget_s=1.0)
    search.run()
    assert not search.is_complete
    assert bench.runs == [(BASELINE, 0)], "one trial tells that there is no time for more"
    verdict = decide(search)
    assert verdict.flags == {}
    assert sum("for want of time" in reason for reason in verdict.reasons) == len(GAINS) - 1


def test_a_trial_that_the_budget_ended_is_no_failure(tmp_path: Path) -> None:
    bench = MadeUp({"a 1": math.nan, "b 1": 1.2})
    search = search_of(bench, tmp_path)
    search.state.trials.append(Trial(BASELINE, -1, 1.0, scores=[100.0]))
    bench.ends_at = 0.0
    with pytest.raises(OutOfTime):
        search.check_time(Trial("a 1", 0, 1.0, error="the load test ended with exit code -9"))
    search.check_time(Trial("b 1", 0, 1.0, scores=[1.0]))
    assert bench.time_for(60.0) == 0.0


@pytest.mark.parametrize("budget", [60.0, 300.0, 540.0, 3600.0])
def test_planned_trials_fit(budget: float) -> None:
    count, seconds = planned(11, 10.0, budget)
    sizes = [2 + math.ceil(count / 2**rung) for rung in range(RUNGS)] + [4]
    cost = sum(size * (10.0 + seconds * 2**rung) for rung, size in enumerate(sizes))
    assert seconds >= LEAST_SECONDS
    assert cost <= budget + 1e-6 or count == 1


def test_candidates_fit_the_machine_and_the_load() -> None:
    few = own_candidates(INFO, Load(4), set())
    names = {candidate.name for candidate in few}
    assert {"max-num-batched-tokens 1024", "overlap on", "block-size 8", "block-size 32"} <= names
    assert "enable-prefix-caching false" in names
    assert not any("max-num-seqs" in name for name in names), "4 clients never reach a limit of 64"
    many = {candidate.name for candidate in own_candidates(INFO, Load(None), set())}
    assert {"max-num-seqs 128", "max-num-seqs 32"} <= many
    fixed = own_candidates(INFO, Load(None), {"max-num-seqs", "overlap"})
    assert not any({"max-num-seqs", "overlap"} & candidate.flags.keys() for candidate in fixed)
    for candidate in few:
        parse(candidate.tokens)  # serve.py takes each
    gpu = {**INFO["limits"], "device": "cuda:0", "block_size": 64, "dtype": "bfloat16"}
    names = {c.name for c in own_candidates({**INFO, "limits": gpu}, Load(4), set())}
    assert {"overlap off", "block-size 128", "block-size 32"} <= names
    assert not any(name.startswith(("cpu-threads", "dtype")) for name in names)
    for seqs, expected in ((256, {512, 128}), (512, {1024, 256}), (MAX_BATCH, {512})):
        limits = {**gpu, "max_num_seqs": seqs, "max_num_batched_tokens": 8192}
        flags = [c.flags for c in own_candidates({**INFO, "limits": limits}, Load(None), set())]
        assert {int(f["max-num-seqs"]) for f in flags if "max-num-seqs" in f} == expected


def test_values_of_the_user(tmp_path: Path) -> None:
    assert [c.flags for c in parse_try("block_size=8, 32")] == [
        {"block-size": "8"},
        {"block-size": "32"},
    ]
    with pytest.raises(ValueError, match="NAME=VALUE"):
        parse_try("block-size")


def test_the_file_is_one_for_serve(tmp_path: Path) -> None:
    bench = MadeUp({"enable-prefix-caching false": 1.5, "max-num-seqs 8": 1.2, "overlap on": 1.3})
    search = search_of(bench, tmp_path)
    search.run()
    verdict = decide(search)
    given = tune.flags_given(["/models/tiny", "--api-key", "hush", "--dtype", "float32"])
    file = tmp_path / "config.yaml"
    write_config(file, search, verdict, given, ["--concurrency", "8"])
    text = file.read_text()
    assert "hush" not in text
    assert "give them again: api_key" in text
    assert "bench_serve.py --concurrency 8" in text
    _, engine = parse(["--config", str(file), "--max-num-seqs", "16"])
    assert (engine.model, engine.dtype, engine.overlap) == ("/models/tiny", "float32", "on")
    assert engine.enable_prefix_caching is False
    assert engine.max_num_seqs == 16, "the command line wins"
    file.write_text(text + "max-num-seq: 3\n")
    with pytest.raises(ValueError, match="did you mean --max-num-seqs"):
        parse(["--config", str(file)])


def test_wrong_commands_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    assert tune.main([*out, "--", "--max-num-seq", "3"]) == 2
    assert tune.main([*out, "--try", "no-such-flag=3"]) == 2
    assert tune.main([*out, "--figure", "goodput_rps"]) == 2
    assert "give --slo" in capsys.readouterr().err
    for wrong in (["--url", "http://x"], ["--rounds", "9"], ["--concurency", "3"]):
        with pytest.raises(SystemExit):
            tune.main([*out, *wrong])


@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ("port=1", "--try port=1: every trial listens on a free port"),
        ("--host=0.0.0.0", "every trial listens"),
        ("ssl_certfile=a.crt", "every trial speaks plain HTTP"),
        ("api-key=a", "every trial gets a key"),
        ("config=a.yaml", "give each of its settings"),
    ],
)
def test_what_the_tool_sets_itself_is_not_tried(
    setting: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(["--out", str(tmp_path), f"--try={setting}"]) == 2
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.yaml", "report.txt", "trials.new", "load.log"])
def test_results_that_could_not_be_written_are_told_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Search, "run", lambda search: pytest.fail("it ran"))
    (tmp_path / name).mkdir()
    assert tune.main(["--out", str(tmp_path), "--", "--dtype", "float32"]) == 2
    told = capsys.readouterr().err
    assert f"--out {tmp_path}: cannot be written (Is a directory" in told
    assert name in told


def test_trials_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "trials.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"trials\.json is not readable .*: remove it"):
        State.load(file, "key")


def test_a_budget_that_is_too_small_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny("llama", tmp_path / "model")
    out = ["--out", str(tmp_path / "out"), "--budget-minutes", "0.001"]
    assert tune.main([*out, "--", model]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the budget was spent after" in line
    assert "give more --budget-minutes" in line


def test_scores_are_means_over_levels() -> None:
    levels = [
        {"rounds": [{"values": {"output_tps": 10.0}}, {"values": {"output_tps": 20.0}}]},
        {"rounds": [{"values": {"output_tps": 30.0}}, {"values": {}}]},
    ]
    assert scores_of(levels, "output_tps") == [20.0]


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    assert run_group(["sleep", "30"], tmp_path / "log", 0.2) == -9


def test_a_real_trial(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path / "model")
    flags = ["--concurrency", "2", "--input-len", "16", "--output-len", "8", "--ignore-eos"]
    load = [*flags, "--token-ids", "10:500", "--warmup", "1"]
    certificate, key = certificates.write_first(tmp_path)  # as the load test would not trust it,
    tls = ["--ssl-certfile", certificate, "--ssl-keyfile", key]  # trials go over plain HTTP
    serve = [model, "--dtype", "float32", "--kv-cache-gib", "0.1", *tls]
    bench = Bench(load, serve, 1, "output_tps", tmp_path)
    trial, info = bench.run(Candidate(BASELINE), 0, 1.0)
    assert len(trial.scores) == 3
    assert trial.figures["ttft_p50_ms"] > 0
    assert own_candidates(info, Load(2), set())
    assert json.loads(json.dumps(trial.as_json()))["error"] == ""
    bench.load_flags = [*load, "--endpoint", "chat", "--prompts", "ids"]
    with pytest.raises(LoadFailed, match="chat takes no token ids") as failure:
        bench.run(Candidate.of("overlap", "on"), 0, 1.0)
    assert failure.value.is_usage
