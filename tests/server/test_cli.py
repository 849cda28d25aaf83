"""The command line: spellings, files, and one helpful line for everything that cannot work."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.api.config import ConfigError, EngineConfig
from server import settings_check
from server.cli import main, parse
from server.config import VERSION, ServerConfig
from server.http_server import bind
from server.model_check import check_model, sampling_defaults
from server.settings_check import check_settings
from tests.server.conftest import ROOT


def test_defaults() -> None:
    server, engine = parse([])
    assert (server.host, server.port, server.served_model_name) == ("127.0.0.1", 8000, [])
    assert (engine.model, engine.enable_prefix_caching, engine.dtype) == ("", True, "auto")


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["/m"], "model", "/m"),
        (["--model", "/m"], "model", "/m"),
        (["--model=/m"], "model", "/m"),
        (["--max-model-len", "8k"], "max_model_len", "8k"),
        (["--max_model_len=8k"], "max_model_len", "8k"),
        (["--num-gpu-blocks-override", "7"], "num_blocks", 7),
        (["--disable-prefix-caching"], "enable_prefix_caching", False),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--no_enable_prefix_caching"], "enable_prefix_caching", False),
        (["--enable-prefix-caching"], "enable_prefix_caching", True),
        (["--enable-chunked-prefill", "false"], "enable_chunked_prefill", False),
        (["--enable-chunked-prefill=False"], "enable_chunked_prefill", False),
        (["--enforce-eager"], "enforce_eager", True),
        (["--enforce-eager", "/m"], "enforce_eager", True),
        (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
        (["--dtype", "half"], "dtype", "half"),
        (["--overlap", "on"], "overlap", "on"),
        (["--no-overlap"], "overlap", "off"),
        (["--no_overlap", "/m"], "overlap", "off"),
        # What vLLM's users also write, and what changes nothing here:
        (["--tensor-parallel-size", "1", "--dtype", "half"], "dtype", "half"),
        (["--kv-cache-dtype=fp8", "--swap-space", "0", "/m"], "kv_cache_dtype", "fp8"),
        (["--guided-decoding-backend", "auto", "/m"], "model", "/m"),
        (["--swap-space", "4", "/m"], "swap_space", 4.0),
        (["--preemption-mode=swap", "--swap-space=4"], "preemption_mode", "swap"),
    ],
)
def test_engine_flags(argv: list[str], field: str, value: object) -> None:
    _, engine = parse(argv)
    assert getattr(engine, field) == value


def test_server_flags() -> None:
    server, engine = parse(
        ["/m", "--served-model-name", "a", "B-1", "--port=0", "--enable-log-requests"]
    )
    assert (server.served_model_name, server.port, engine.model) == (["a", "B-1"], 0, "/m")
    assert server.log_requests == "on"
    assert parse(["--disable-log-requests"])[0].log_requests == "off"
    assert parse(["--log-requests", "prompts"])[0].log_requests == "prompts"
    assert parse(["--disable-log-stats", "/m"])[0].disable_log_stats


def test_names_add_up() -> None:
    server, _ = parse(["--served-model-name", "a", "--port", "0", "--served-model-name=b", "/m"])
    assert server.served_model_name == ["a", "b"]


def test_model_swallowed_as_a_name(tmp_path: Path) -> None:
    """`--served-model-name foo DIR` must not serve the default model under two names."""
    for model in (str(tmp_path), "/no/such/model", "./models/x", "x.gguf"):
        with pytest.raises(ConfigError, match=f"--model {model}") as caught:
            check_settings(*parse(["--served-model-name", "foo", model]))
        assert caught.value.exit_code == 2
    check_settings(*parse([str(tmp_path), "--served-model-name", "foo", str(tmp_path)]))
    check_settings(*parse(["--served-model-name", "foo", "org/name-1.5", "--seed", "1"]))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-modle-len", "3"], ["--max-modle-len", "did you mean --max-model-len"]),
        (["--frobnicate"], ["--frobnicate", "--help"]),
        (["--port", "many"], ["--port", "many"]),
        (["--dtype", "int4"], ["--dtype", "int4", "bfloat16"]),
        (["--overlap"], ["--overlap: expected one argument", "'auto', 'on', 'off'"]),
        (["--overlap", "--port", "1"], ["--overlap: expected one argument", "'auto', 'on', 'off'"]),
        (["/m", "--kv_cache_dtype"], ["--kv-cache-dtype: expected one argument", "'fp8_e5m2'"]),
        (["/a", "/b"], ["/b", "once"]),
        (["/a", "--model", "/b"], ["/a", "/b"]),
        (["--enforce-eager=maybe"], ["--enforce-eager"]),
        (["--tensor-parallel-size", "2"], ["--tensor-parallel-size 2", "only 1"]),
        (["--tensor_parallel_size=2"], ["--tensor-parallel-size 2"]),
        (["--quantization", "awq"], ["--quantization awq"]),
        (["--swap-space", "lots"], ["--swap-space", "lots"]),
        (["--preemption-mode", "drop"], ["--preemption-mode", "drop", "recompute"]),
        (["--kv-cache-dtype", "int8"], ["--kv-cache-dtype", "int8", "fp8_e5m2"]),
        (["--trust-remote-code"], ["--trust-remote-code", "never run"]),
        (["--enable-lora"], ["LoRA"]),
        (["--speculative-model", "/x"], ["speculative"]),
        (["--root-path", "/llm"], ["--root-path", "proxy"]),
        (["--config", "/nowhere.yaml"], ["/nowhere.yaml"]),
    ],
)
def test_refused(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "lots"], ["--max-model-len lots", "8k"]),
        (["--max-num-batched-tokens", "8", "--max-num-seqs", "16"], ["at least 16"]),
        (
            [
                "--no-enable-chunked-prefill",
                "--max-num-batched-tokens=100",
                "--max-model-len=1k",
            ],
            ["1024", "chunked"],
        ),
        (["--gpu-memory-utilization", "90"], ["90"]),
        (["--gpu-memory-utilization", "nan"], ["nan"]),
        (["--port", "70000"], ["70000"]),
        (["--max-num-seqs", "-1"], ["--max-num-seqs -1"]),
        (["--chat-template", "/nowhere.jinja"], ["/nowhere.jinja"]),
        (["--drain-timeout", "-2"], ["--drain-timeout"]),
        (["--drain-timeout", "nan"], ["--drain-timeout nan", "between 0 and"]),
        (["--stall-timeout", "inf"], ["--stall-timeout inf"]),
        (["--sse-keep-alive", "inf"], ["--sse-keep-alive inf"]),
        (["--kv-cache-gib", "inf"], ["--kv-cache-gib inf"]),
        (["--kv-cache-gib", "nan"], ["--kv-cache-gib nan"]),
        (["--swap-space", "nan"], ["--swap-space nan"]),
        (["--preemption-mode", "swap"], ["--preemption-mode swap", "--swap-space"]),
        (["--max-model-len", "inf"], ["--max-model-len inf", "8k"]),
        (["--max-model-len", "1e400k"], ["--max-model-len 1e400k", "8k"]),
        (["--max-model-len", "infk"], ["--max-model-len infk", "8k"]),
        (["--max-model-len", "nan"], ["--max-model-len nan", "8k"]),
        (["--cpu-threads", "1000000"], ["--cpu-threads 1000000", "1024"]),
        (["--num-blocks", "99999999999"], ["--num-blocks"]),
        (["--max-num-seqs", "1000000"], ["--max-num-seqs"]),
        (["--max-num-batched-tokens", "1000000000"], ["--max-num-batched-tokens"]),
        (["--seed", str(2**63)], ["--seed"]),
        (["--block-size", "7"], ["--block-size 7", "8, 16, 32, 64, 128"]),
        (["--device", "cpu", "--dtype", "half"], ["--dtype half", "bfloat16"]),
    ],
)
def test_contradictions(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(*parse(argv))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("size", [0, 8, 16, 32, 64, 128])
def test_block_sizes(size: int) -> None:
    check_settings(*parse(["--block-size", str(size)]))


def test_no_gpu_is_known_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = parse(["--device", "cuda"])

    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(settings_check.ctypes, "CDLL", no_library)
    with pytest.raises(ConfigError, match=r"driver.*--device cpu") as caught:
        check_settings(*cuda)
    assert caught.value.exit_code == 75
    monkeypatch.setattr(settings_check.ctypes, "CDLL", lambda name: None)
    check_settings(*cuda)


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "\x00"])
def test_names_that_cannot_be_printed(name: str) -> None:
    with pytest.raises(ConfigError, match="characters that cannot be printed") as caught:
        check_settings(ServerConfig(served_model_name=[name]), EngineConfig())
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/nowhere/a.pem", "there is no such file"),
        ("/dev/null", "is no regular file"),
        ("/dev/null/a", "Not a directory"),
        ("x" * 300, "File name too long"),
    ],
)
def test_files_that_cannot_be_read(name: str, why: str) -> None:
    for config in (
        ServerConfig(ssl_certfile=name),
        ServerConfig(chat_template=name),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            check_settings(config, EngineConfig())
        assert name in str(caught.value)


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_is_not_every_interface(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host is empty: .* 0\.0\.0\.0 for all"):
        check_settings(ServerConfig(host=host), EngineConfig())


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\udcff"])
def test_host_that_is_no_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host .*: is neither an address nor") as caught:
        bind(host, 0)
    assert caught.value.exit_code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"sluice {VERSION}\n"


def make_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    (path / "tokenizer.json").write_text("{}")
    return path


def test_model_directory(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")

    def check(*argv: str) -> None:
        check_model(parse(argv)[1])

    def refused(*argv: str) -> str:
        with pytest.raises(ConfigError) as caught:
            check(*argv)
        assert caught.value.exit_code == 2
        assert str(tmp_path) in str(caught.value)
        return str(caught.value)

    check(str(model))
    assert "no such directory" in refused(str(tmp_path / "none"))
    assert ".gguf" in refused(str(model / "config.json"))
    gguf = tmp_path / "m.gguf"
    assert "no such file" in refused(str(gguf))
    gguf.write_bytes(b"PK\3\4")
    message = refused(str(gguf))
    assert "is not a GGUF file" in message
    assert "PK" in message
    gguf.write_bytes(b"GGUF\3\0\0\0")
    check(str(gguf))
    (model / "tokenizer.json").unlink()
    assert "--tokenizer DIR" in refused(str(model))
    tokenizer = tmp_path / "t"
    assert "--tokenizer" in refused(str(model), "--tokenizer", str(tokenizer))
    tokenizer.mkdir()
    (tokenizer / "tokenizer_config.json").write_text("{}")
    check(str(model), "--tokenizer", str(tokenizer))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    argv = (str(model), "--tokenizer", str(tokenizer))
    assert "pytorch_model.bin" in refused(*argv)
    check(*argv, "--load-format", "dummy")
    shards = {f"w{i}": f"model-{i}.safetensors" for i in range(6)}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (model / "model-0.safetensors").write_bytes(b"")
    message = refused(*argv)
    assert "model-1.safetensors" in message
    assert "and 2 more" in message
    (model / "config.json").write_text("{")
    assert "JSON" in refused(*argv)
    (model / "config.json").write_text("[" * 100_000)
    assert "nested too deeply" in refused(*argv)
    (model / "config.json").unlink()
    assert "no config.json" in refused(*argv)


def test_generation_config(tmp_path: Path) -> None:
    """Usable values become defaults; impossible ones are left out rather than failing requests."""
    assert sampling_defaults(str(tmp_path)).values == {}
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 7, "top_k": 50, "max_new_tokens": 99, "x": 1})
    )
    defaults = sampling_defaults(str(tmp_path))
    assert defaults.values == {"temperature": 0.6, "top_k": 50}
    assert defaults.max_new_tokens == 99


def test_main_reports_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/no/such/model"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "/no/such/model" in captured.err


def test_help_is_fast_and_light() -> None:
    """Groups, defaults, and no torch: checked in a process of its own."""
    code = (
        "import sys\nfrom server.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: code = e.code\n"
        "print('heavy:', [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], code)"
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30
    )
    assert time.monotonic() - began < 20, "hangs are failures; speed is not tested here"
    assert "heavy: [] 0" in done.stdout, done.stderr
    for text in ("kv cache:", "http:", "--max-model-len N", "[8000]", "--no-enforce-eager"):
        assert text in done.stdout


def test_imports_are_light() -> None:
    code = (
        "import sys, server.app, server.launcher, server.cli\n"
        "print([m for m in ('torch', 'transformers', 'cupy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=30
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "flag", ["--served-model-name", "--model", "--tokenizer", "--chat-template"]
)
def test_settings_that_are_not_utf8(flag: str) -> None:
    """As the shell's $'\\xff' comes to Python: a lone surrogate, which no message can carry."""
    with pytest.raises(ConfigError) as caught:
        check_settings(*parse([flag, "a\udcff"]))
    message = str(caught.value)
    assert message.startswith(f"{flag} 'a\\udcff': is not UTF-8 text")
    assert message.isascii()
