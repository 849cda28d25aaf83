"""Benchmarks of the engine: what they refuse, and how they end."""

import importlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest

from engine.api.config import ConfigError
from engine.api.messages import FinishReason, StepOutput
from engine.models.config import ModelConfig
from scripts.bench_command import CannotMeasure, run_benchmark, save, with_quiet_children
from tests.contracts.source import ROOT
from tests.engine_cpu.tiny_models import make_tiny

ALL = ("bench_latency", "bench_throughput", "bench_kernels", "bench_products", "build_kernels")
PREAMBLE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from scripts.bench_command import run_benchmark, with_quiet_children
"""


@pytest.fixture(autouse=True)
def scripts_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


def run_main(name: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """Exit code of a script, which must not come as far as to an engine."""
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    if hasattr(module, "Driver"):
        monkeypatch.setattr(module.Driver, "of_model", no_engine)
    try:
        return run_benchmark(module.main)
    except SystemExit as error:  # argparse's
        return int(error.code or 0)


def check_refusal(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """No figures, and a last line with all these."""
    out, err = capsys.readouterr()
    assert out == ""
    assert [word for word in words.split() if word not in err.splitlines()[-1]] == []


def no_engine(*args: object, **settings: object) -> NoReturn:
    raise AssertionError("an engine is built")


def driver_module() -> ModuleType:
    return importlib.import_module("engine_driver")


# --- what is refused ahead -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prefill 100 2048", "--prefill 2048: the model takes 2048 at most 2047"),
        ("--context 999999", "--context 999999: --steps 40 1000055 2048 lower"),
        ("--steps 1100", "--context 1000: --steps 1100 2116 2048 lower by 68"),
        ("--context 0", "--context '0' at least 1"),
        ("--steps 0", "--steps '0' at least 1"),
        ("--batch 0", "--batch '0' at least 1"),
        ("--batch 8 -1", "--batch '-1' at least 1"),
        ("--batch 1000000", "--batch 1000000 at most 65536"),
        ("--prefill 0", "--prefill '0' at least 1"),
        ("--dtype int3", "--dtype 'int3' bfloat16"),
        ("--device quux", "--device 'quux' cuda"),
        ("--kv-cache-dtype int3", "--kv-cache-dtype 'int3' fp8"),
        ("--model /nonexistent", "/nonexistent: no such directory"),
    ],
)
def test_latency_refuses_what_would_have_no_figures(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    words: str,
) -> None:
    assert run_main("bench_latency", monkeypatch, "--model", "tiny", *flags.split()) == 2
    check_refusal(capsys, words)


def test_engine_s_refusal_of_a_batch_names_our_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a GPU, whose most is not known before."""

    def refuse(*args: object, **settings: object) -> NoReturn:
        raise ConfigError("--max-num-seqs 2000: a decode step on a GPU takes up to 1024 requests")

    module = importlib.import_module("bench_latency")
    monkeypatch.setattr(sys, "argv", ["bench_latency.py", "--batch", "2000", "--device", "cuda"])
    monkeypatch.setattr(module.Driver, "of_model", refuse)
    assert run_benchmark(module.main) == 2
    told = "bench_latency.py: --batch 2000: a decode step on a GPU takes up to 1024 requests\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--work b", "--work b: 2176 model takes 2048 leave it out"),
        ("--work a b c d", "--work b d: 2176 2048"),
        ("--work", "--work expected at least one"),
        ("--scale 0", "--scale '0' above 0"),
        ("--scale -1", "--scale '-1' above 0"),
        ("--scale nan", "--scale 'nan' above 0"),
        ("--scale inf", "--scale inf at most 1000"),
        ("--model /nonexistent", "/nonexistent: no such directory"),
    ],
)
def test_throughput_refuses_what_would_have_no_figures(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: str,
    words: str,
) -> None:
    assert run_main("bench_throughput", monkeypatch, "--model", "tiny", *flags.split()) == 2
    check_refusal(capsys, words)


@pytest.mark.parametrize(
    "flags",
    [
        *("--arch ../../x", "--arch sm_", "--arch sm_75", "--arch sm_90a/x"),
        *("--block-size 0", "--block-size 7", "--workers -1", "--workers 0"),
    ],
)
def test_build_kernels_refuses_what_it_cannot_compile_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    assert run_main("build_kernels", monkeypatch, "model", *flags.split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert flags.split()[0] in last
    assert "sm_90a" in last or "choose from" in last or "at least 1" in last


def test_bench_products_refuses_to_measure_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in (["--rows", "0"], ["--rows"], ["--model"]):
        assert run_main("bench_products", monkeypatch, *flags) == 2
        assert flags[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", [name for name in ALL if name != "build_kernels"])
def test_file_for_figures_is_tried_first(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    (tmp_path / "file").write_text("no folder")
    path = tmp_path / "file" / "x.json"
    assert run_main(name, monkeypatch, "--json", str(path)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"--json {path}: cannot be written" in last
    assert "give a file" in last


def test_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not save(Path("/dev/full"), {"a": 1})
    assert capsys.readouterr().err == "error: --json /dev/full: No space left on device\n"
    assert save(None, {})
    assert save(tmp_path / "a.json", {"a": 1})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}


# --- what only shows when it runs ------------------------------------------------------------------


def test_driver_notices_requests_that_are_not_served() -> None:
    module = driver_module()
    driver = module.Driver.of_model("tiny", device="cpu", num_blocks=130, max_num_seqs=2)
    rng = np.random.default_rng(0)
    driver.add(driver.prompt(rng, 20), 4)
    assert driver.run() > 0
    assert driver.requests[1].tokens == 4
    driver.abort(driver.add(driver.prompt(rng, 20), 4))
    driver.run()  # nobody waits for it
    driver.add(driver.prompt(rng, 2048), 1)
    with pytest.raises(
        CannotMeasure, match=r"request 3 was refused: context_length_exceeded: .*2048"
    ):
        driver.run()


def test_driver_notices_requests_that_break_off() -> None:
    module = driver_module()
    driver = module.Driver.of_model("tiny", device="cpu", num_blocks=130, max_num_seqs=2)
    prompt = driver.prompt(np.random.default_rng(0), 20)
    first, second = driver.add(prompt, 4), driver.add(prompt, 4)
    output = StepOutput(0, 0, [first], [0], [], [(0, FinishReason.ABORT, None)])
    driver.receive(output)
    with pytest.raises(CannotMeasure, match="2 requests were not finished"):
        driver.check_finished()
    output.req_ids, output.finished = [second], [(0, FinishReason.ERROR, None)]
    with pytest.raises(CannotMeasure, match=f"request {second} failed"):
        driver.receive(output)


def run_script(name: str, *flags: str, scratch: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"scripts/{name}.py", *flags, "--device", "cpu"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_defaults_that_do_not_fit_are_left_out_and_told(tmp_path: Path) -> None:
    scratch, figures = tmp_path / "scratch", tmp_path / "new" / "figures.json"
    scratch.mkdir()
    flags = ["--model", "tiny", "--batch", "2", "--context", "20", "--json", str(figures)]
    done = run_script("bench_latency", *flags, scratch=scratch)
    assert done.returncode == 0, done.stderr
    assert "2048, 8192, 16384 left out, a request has room for 2047" in done.stdout
    assert sorted(json.loads(figures.read_text())) == ["decode_2", "model", "start_s"]
    flags = ["--model", "tiny", "--scale", "0.002", "--json", str(figures)]
    done = run_script("bench_throughput", *flags, scratch=scratch)
    assert done.returncode == 0, done.stderr
    assert "left out: b" in done.stdout
    assert {"a", "c"} <= set(json.loads(figures.read_text()))
    assert list(scratch.iterdir()) == []


def test_batch_that_never_runs_at_once_has_no_figure(tmp_path: Path) -> None:
    """64 prompts take 32 steps of 512 tokens or more, in which the first has ended."""
    model, figures = make_tiny("llama", tmp_path / "model"), tmp_path / "figures.json"
    flags = ["--model", str(model), "--batch", "64", "2", "--context", "400", "--steps", "1"]
    done = run_script(
        "bench_latency", *flags, "--prefill", "--json", str(figures), scratch=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "batch   64: no figure" in done.stdout
    assert "raise --steps" in done.stdout
    assert sorted(json.loads(figures.read_text())) == ["decode_2", "model", "start_s"]


def test_shapes_are_models() -> None:
    module = driver_module()
    lengths = {name: module.model_length(name) for name in module.SHAPES}
    assert lengths == {"7b": 32768, "1.5b": 32768, "0.5b": 32768, "tiny": 2048}
    assert ModelConfig.from_directory(module.model_directory("7b")).hidden_size == 3584
    assert module.model_directory("elsewhere") == "elsewhere"


# --- how they end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing(tmp_path: Path, number: signal.Signals) -> None:
    flags = ["--model", "tiny", "--device", "cpu", "--batch", "--prefill", *["500"] * 9999]
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "bench_latency.py"), *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("start: ")
        child.send_signal(number)
        _, said = child.communicate(timeout=60)
    finally:
        child.kill()
    if number == signal.SIGINT:
        assert child.returncode == 130
        assert said == "bench_latency.py: interrupted\n"
    else:
        assert child.returncode == -number
        assert said == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ALL)
def test_ctrl_c_is_one_line(name: str) -> None:
    """Of all scripts, as they hand their `main` to what catches it."""
    text = (ROOT / "scripts" / f"{name}.py").read_text()
    assert text.endswith("    sys.exit(run_benchmark(main))\n")


def test_ctrl_c_is_not_for_compiling_processes(tmp_path: Path) -> None:
    """A terminal sends it to all of them; the child's own end would be a traceback."""
    child = "import time; print('ready', flush=True); time.sleep(600)"
    code = PREAMBLE + (
        f"import subprocess\ndef work():\n    subprocess.run([sys.executable, '-c', {child!r}])\n"
        "sys.exit(run_benchmark(lambda: with_quiet_children(work)))"
    )
    (tmp_path / "tool.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "tool.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)  # both pipes end, so the child has ended, too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (130, "", "tool.py: interrupted\n")


def test_quiet_children_s_result_and_errors_are_those_of_the_work() -> None:
    assert with_quiet_children(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_quiet_children(lambda: 1 // 0)
