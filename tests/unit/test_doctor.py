"""scripts/doctor.py: what it finds on damaged copies of a tiny model, and that its table is the engine's."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.api.config import ConfigError, EngineConfig
from engine.build import account, build_engine
from engine.memory import GIB
from engine.models.config import ModelConfig
from engine.weights.loader import cpu_weight_bytes, load_model, weight_bytes
from scripts import doctor
from scripts.operate import certificate, installation, machine
from scripts.operate.findings import Findings
from scripts.operate.memory_table import predict_cpu, predict_gpu
from scripts.operate.model_folder import check_model_folder
from server.config import ServerConfig
from tests.engine_cpu.tiny_models import copy_model, edit_config, make_tiny
from tests.server import certificates

SCRIPT = Path(doctor.__file__)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def levels(found: Findings) -> dict[str, str]:
    return {one.name: one.level for one in found.all}


def folder_findings(path: Path | str, **server: str) -> Findings:
    found = Findings(quiet=True)
    check_model_folder(found, ServerConfig(**server), EngineConfig(model=str(path)))
    return found


@pytest.mark.parametrize("script", ["doctor", "selftest", "tune", "batch"])
def test_help_comes_at_once(script: str) -> None:
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({str(SCRIPT.with_name(script + '.py'))!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*[m for m in ('torch', 'numpy', 'aiohttp', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "", "nothing heavy is imported"


def test_a_whole_model_is_fine(model: str) -> None:
    found = folder_findings(model)
    assert set(levels(found).values()) == {"ok"}
    assert "LlamaForCausalLM, 2 layers" in found.all[0].detail


def test_damage_is_named(model: str, tmp_path: Path) -> None:
    cut = copy_model(model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    size = weights.stat().st_size
    weights.write_bytes(weights.read_bytes()[:-100])
    found = folder_findings(cut)
    assert levels(found)["weights"] == "fail"
    assert f"has {size - 100} bytes, and by its header {size}" in found.all[1].detail

    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in folder_findings(cut).all[1].detail

    extra = copy_model(model, tmp_path / "extra")
    (extra / "model.safetensors.incomplete").write_bytes(b"x")
    assert levels(folder_findings(extra))["weights"] == "warn"

    quantized = copy_model(model, tmp_path / "quantized")
    edit_config(quantized, quantization_config={"quant_method": "exl9"})
    found = folder_findings(quantized)
    assert levels(found) == {"model": "fail"}
    assert "exl9" in found.all[0].detail
    assert levels(folder_findings(tmp_path / "none")) == {"model": "fail"}


def test_a_missing_chat_template_is_told(model: str, tmp_path: Path) -> None:
    bare = copy_model(model, tmp_path / "bare")
    for file in (bare / "tokenizer_config.json", bare / "chat_template.jinja"):
        if file.suffix == ".json":
            config = json.loads(file.read_text())
            config.pop("chat_template", None)
            file.write_text(json.dumps(config))
        else:
            file.unlink(missing_ok=True)
    assert levels(folder_findings(bare))["chat template"] == "warn"
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    assert levels(folder_findings(bare, chat_template=str(template)))["chat template"] == "ok"


def test_the_predicted_table_is_the_one_of_the_start(model: str) -> None:
    config = EngineConfig(model=model, kv_cache_gib=0.01, max_model_len="256", dtype="float32")
    told = {
        line[:15].strip(): line[17:] for line in account(build_engine(config, lambda step: None))
    }
    predicted = dict(predict_cpu(config, ModelConfig.from_directory(model)))
    shared = set(told) & set(predicted) - {"weights"}
    assert {"dtype", "kv cache", "kv dtype", "concurrency", "max model len"} <= shared
    assert {name: told[name] for name in shared} == {name: predicted[name] for name in shared}
    sizes = [table["weights"].partition(" GiB")[0] for table in (told, predicted)]
    assert sizes[0] == sizes[1]


def test_weights_of_a_cpu_are_what_its_tensors_hold(tmp_path: Path) -> None:
    """Matrices are packed, and a tied head is a packed copy of the embedding."""
    for family in ("llama", "llama_tied"):
        path = make_tiny(family, tmp_path / family)
        config = ModelConfig.from_directory(path)
        loaded = load_model(path, config, torch.float32, torch.device("cpu"))
        tensors = {id(t): t for layer in loaded.weighted_layers() for t in held_tensors(layer)}
        assert cpu_weight_bytes(config, torch.float32) == 4 * sum(
            tensor.numel() for tensor in tensors.values()
        )


def held_tensors(layer: object) -> list[torch.Tensor]:
    return [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("family", ["llama_tied", "qwen3", "llama_biases"])
def test_predicted_weights_are_those_that_are_loaded(family: str, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path)
    config = ModelConfig.from_directory(path)
    loaded = load_model(path, config, torch.bfloat16, torch.device("cpu"), dummy=True)
    slots = [slot for layer in loaded.weighted_layers() for slot in layer.slots()]
    elements = sum(torch.Size(slot.shape).numel() for slot in slots)
    assert weight_bytes(config, torch.bfloat16) == 2 * elements


def test_a_gpu_is_predicted_without_one(model: str) -> None:
    config = EngineConfig(model=model, max_model_len="512")
    shape = ModelConfig.from_directory(model)
    rows = predict_gpu(config, shape, 24 * GIB)
    text = "\n".join(value for _, value in rows)
    assert "bfloat16 (auto: the checkpoint is float32)" in text
    parts = [float(value.split()[0]) for name, value in rows if name == "gpu memory"]
    assert parts[-1] == 24.0
    assert sum(parts[:-1]) == pytest.approx(24.0, abs=0.05), "the rows sum to the total"
    assert "unaccounted" in text
    with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
        predict_gpu(config, shape, GIB // 2)
    told = dict(predict_gpu(config, shape, 80 * GIB))
    assert told["max num seqs"] == "1024 (auto: fills a GPU of 64 GiB or more)"
    assert dict(rows)["max num seqs"].startswith("256 (auto: ")


def test_blocks_that_are_asked_for_are_predicted(model: str) -> None:
    """As a start takes them: whatever the share says, if they fit."""
    shape = ModelConfig.from_directory(model)

    def predicted(**settings: object) -> str:
        config = EngineConfig(model=model, max_model_len="512", **settings)  # type: ignore[arg-type]
        return "\n".join(value for _, value in predict_gpu(config, shape, 24 * GIB))

    assert "= 100 blocks of 64 = 6400 tokens (flag)" in predicted(num_blocks=100)
    assert "= 100 blocks of 64 = 6400 tokens (flag)" in predicted(
        num_blocks=100, gpu_memory_utilization=0.01
    )
    with pytest.raises(ConfigError, match=r"--num-blocks 9000000: .* are free beside the weights"):
        predicted(num_blocks=9_000_000)
    with pytest.raises(ConfigError, match=r"one sequence of 512 .* --num-blocks 8"):
        predicted(num_blocks=4)


@pytest.mark.parametrize(
    ("today", "level", "words"),
    [
        ("2019-12-31", "warn", "is not valid before 2020-01-01"),
        ("2020-01-02", "ok", "is valid until 2120-01-01"),
        ("2119-12-20", "warn", "expires soon, on 2120-01-01"),
        ("2120-01-01", "warn", "is expired since 2120-01-01"),
    ],
)
def test_the_days_of_a_certificate(
    today: str, level: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.fromisoformat(f"{today}T12:00+00:00").timestamp()
    monkeypatch.setattr(certificate.time, "time", lambda: now)
    file, key = certificates.write_first(tmp_path)
    found = Findings(quiet=True)
    certificate.check_certificate(found, ServerConfig(ssl_certfile=file, ssl_keyfile=key))
    (one,) = found.all
    assert (one.level, one.detail) == (level, f"{file} {words}")


def test_without_a_certificate_its_days_are_not_told(tmp_path: Path) -> None:
    found = Findings(quiet=True)
    (tmp_path / "no.crt").write_text("nothing")
    for file in ("", str(tmp_path / "no.crt"), str(tmp_path / "missing")):
        certificate.check_certificate(found, ServerConfig(ssl_certfile=file))
    assert found.all == []


def test_versions_are_compared_with_the_pins(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    own = installation.installed_version("msgspec")
    cases = {
        f"msgspec=={own}": "ok",
        "msgspec==0.0.1": "warn",
        "no-such-package==1.0": "fail",
        "cupy-cuda12x==14.2.0": "ok",  # needed with a GPU only, and looked for there
    }
    for line, level in cases.items():
        file.write_text(line + "\n")
        found = Findings(quiet=True)
        installation.check_packages(found, file)
        assert levels(found) == {"packages": level}, line
    assert installation.numbers("2.11.0+cu130") == (2, 11, 0)


@pytest.mark.parametrize(
    ("probe", "device", "driver", "level", "words"),
    [
        ({"cuda_build": None}, "auto", False, "ok", "none: the CPU computes"),
        ({"cuda_build": None}, "cuda", False, "fail", "no NVIDIA driver"),
        ({"cuda_build": None}, "auto", True, "warn", "built for CPUs only"),
        ({"cuda_build": "13.0"}, "auto", True, "warn", "sees no GPU"),
    ],
)
def test_a_gpu_that_is_not_seen_is_explained(
    monkeypatch: pytest.MonkeyPatch, probe: dict, device: str, driver: bool, level: str, words: str
) -> None:
    monkeypatch.setattr(installation, "has_driver", lambda: driver)
    found = Findings(quiet=True)
    installation.check_gpu(found, EngineConfig(device=device), {"has_gpu": False, **probe})
    assert levels(found) == {"gpu": level}
    assert words in found.all[0].detail


def test_limits_of_a_container_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_quota", lambda: 1.5)
    found = Findings(quiet=True)
    machine.check_processor(found, EngineConfig(cpu_threads=2))
    assert found.all[0].level == "warn"
    assert "--cpu-threads 1" in found.all[0].remedy
    monkeypatch.setattr(machine, "read", lambda path: "hpet")
    machine.check_clock(found)
    assert "clock source hpet" in found.all[1].detail
    monkeypatch.setattr(
        machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20, total=2**26)
    )
    machine.check_shared_memory(found)
    assert found.all[2].level == "warn"


def test_the_whole_of_it(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In another process: torch's answers are those of a child of the doctor."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert doctor.main([model, "--json", "--gpu-memory", "16", "--port", port]) == 1
    told = json.loads(capsys.readouterr().out)
    by_name = {one["name"]: one for one in told["findings"]}
    assert not told["passed"]
    assert by_name["port"]["level"] == "fail"
    assert by_name["torch"]["detail"].startswith(torch.__version__)
    assert by_name["memory plan"]["level"] == "ok"
    assert any(name == "gpu memory" for name, _ in told["memory"])
    assert doctor.main([model, "--max-num-seq", "4"]) == 2
    assert "did you mean --max-num-seqs" in capsys.readouterr().err
