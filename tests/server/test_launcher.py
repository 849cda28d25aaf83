"""scripts/serve.py with its three real processes on a tiny random model."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.api.config import ConfigError, EngineConfig
from server import launcher
from server.client import EngineClient
from server.config import ServerConfig
from server.health import EngineStatus
from server.http_server import bind, close_all
from server.launcher import Launcher
from server.run_dir import remove_abandoned
from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import children_of, is_alive
from tests.server.conftest import (
    ROOT,
    START_S,
    LiveServer,
    live_server,
    paused,
    spawned,
    wait_for,
)
from tests.waiting import wait_until

FLAGS = ("--cpu-threads", "1", "--dtype", "float32", "--served-model-name", "tiny")
FLAGS += ("--block-size", "16", "--num-blocks", "1100", "--max-num-seqs", "4")
FLAGS += ("--max-num-batched-tokens", "64")
LONG = 16_000  # tokens: seconds, however fast the engine is


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny("llama", folder, max_position_embeddings=LONG + 256)


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except FileNotFoundError:
        return ""


def child_running(server: LiveServer, module: str) -> int:
    (pid,) = [p for p in children_of(server.process.pid) if f"-m {module} " in command(p)]
    return pid


def post(server: LiveServer, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=60)


class StreamReader(threading.Thread):
    """Reads one endless stream; `lines` grows as it comes."""

    def __init__(self, server: LiveServer, **fields: Any) -> None:
        super().__init__(daemon=True)
        body = {"prompt": "One two", "stream": True, "max_tokens": 1000, "ignore_eos": True}
        self.response = post(server, {**body, **fields})
        self.lines: list[str] = []
        self.start()
        wait_until(lambda: len(self.lines) > 4)

    def run(self) -> None:
        try:
            for line in self.response:
                if text := line.decode().strip():
                    self.lines.append(text)
        except (OSError, ValueError):
            self.lines.append("broken")

    def last(self) -> str:
        self.join(20)
        assert not self.is_alive()
        return self.lines[-1]


@contextmanager
def run_dirs_watched(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary folder must be empty again afterwards."""
    yield {"TMPDIR": str(tmp_path)}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_serves_and_drains(model: str, tmp_path: Path, number: signal.Signals) -> None:
    with run_dirs_watched(tmp_path) as env, spawned(model, *FLAGS, env=env) as server:
        wait_for(server, "/live", 20)
        (run_dir,) = tmp_path.iterdir()
        assert run_dir.stat().st_mode & 0o777 == 0o700
        wait_for(server, "/ready", START_S)
        with post(server, {"prompt": "One two", "max_tokens": 4, "temperature": 0}) as response:
            answer = json.load(response)
        assert answer["model"] == "tiny"
        assert answer["usage"]["completion_tokens"] >= 1
        stream = StreamReader(server)
        pids = children_of(server.process.pid)
        assert len(pids) == 2
        with paused(child_running(server, "engine")):
            server.process.send_signal(number)
            wait_until(lambda: server.get("/ready")[0] == 503)
        assert stream.last() == "data: [DONE]", "the running stream finishes"
        assert server.process.wait(20) == 0
        assert not any(is_alive(pid) for pid in pids)
        log = server.log.read_text()
        assert "ready in" in log
        assert f"{number.name}: draining 1 request, which takes up to 30 s" in log
        assert "a signal again ends at once" in log
        assert log.endswith("server: stopped\n")
        assert "Traceback" not in log


def test_drain_timeout_ends_streams_with_an_error_event(model: str, tmp_path: Path) -> None:
    flags = (*FLAGS, "--drain-timeout", "0")
    with live_server(model, *flags) as server:
        stream = StreamReader(server, max_tokens=LONG)
        server.process.send_signal(signal.SIGTERM)
        last = stream.last()
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "draining"
        assert error["message"].startswith("The server is shutting down and ended this request")
        assert server.process.wait(20) == 0


def test_second_signal_ends_at_once(model: str) -> None:
    """A request that would hold the drain for ever (its engine stands still) is not waited for."""
    with live_server(model, *FLAGS, "--drain-timeout", "600") as server:
        StreamReader(server, max_tokens=LONG)
        engine = child_running(server, "engine")
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/ready")[0] == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        wait_until(lambda: not is_alive(engine))


def test_a_signal_when_draining_is_over_promises_nothing(model: str) -> None:
    """What is left has its own short limits; an engine that stands still takes all of them."""
    with live_server(model, *FLAGS) as server:
        os.kill(child_running(server, "engine"), signal.SIGSTOP)
        for number, said in ((signal.SIGTERM, "SIGTERM: "), (signal.SIGINT, "SIGINT")):
            server.process.send_signal(number)
            wait_until(lambda said=said: said in server.log.read_text())  # type: ignore[misc]
            time.sleep(0.3)
        assert server.process.wait(20) == 0
        log = server.log.read_text()
    assert "SIGTERM: stopping\n" in log
    assert "SIGINT: already stopping\n" in log
    assert "at once" not in log


@pytest.mark.parametrize(
    ("num_live", "drain_timeout", "dead_reason", "is_ending", "said"),
    [
        (0, 30.0, "", False, "stopping"),
        (
            1,
            30.0,
            "",
            False,
            "draining 1 request, which takes up to 30 s; Ctrl-C or a signal again",
        ),
        (
            2,
            0.5,
            "",
            False,
            "draining 2 requests, which takes up to 0.5 s; Ctrl-C or a signal again",
        ),
        (2, 0.0, "", False, "stopping, which ends 2 requests (--drain-timeout 0)"),
        (2, 30.0, "the engine ended", False, "stopping"),
        (2, 30.0, "", True, "already stopping"),
    ],
)
def test_a_signal_offers_to_end_at_once_only_while_it_drains(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    num_live: int,
    drain_timeout: float,
    dead_reason: str,
    is_ending: bool,
    said: str,
) -> None:
    listeners = bind("127.0.0.1", 0)
    config = ServerConfig(drain_timeout=drain_timeout)
    running = Launcher(config, EngineConfig(model="m"), listeners, str(tmp_path))
    monkeypatch.setattr(EngineClient, "num_live", num_live)
    running.status.dead_reason = dead_reason
    running.is_ending = is_ending
    try:
        told = running.describe_stop()
    finally:
        running.client.close()
        close_all(listeners)
    assert told.startswith(said)
    assert ("at once" in told) == ("again" in said)


def test_signals_that_whoever_started_it_had_blocked_end_it(model: str) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with spawned(model, *FLAGS) as server:  # the child inherits the mask
            wait_for(server, "/live", 20)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(20) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("is_off", [False, True])
async def test_the_log_of_rates_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_off: bool
) -> None:
    logged: list[EngineStatus] = []

    async def log_status(status: EngineStatus) -> None:
        logged.append(status)

    async def fail(self: Launcher) -> tuple[str, str]:
        await asyncio.sleep(0)  # lets tasks begin
        raise ConfigError("no model")

    monkeypatch.setattr(launcher, "log_status", log_status)
    monkeypatch.setattr(Launcher, "prepare_model", fail)
    listeners = bind("127.0.0.1", 0)
    config = ServerConfig(disable_log_stats=is_off)
    starting = Launcher(config, EngineConfig(model="m"), listeners, str(tmp_path))
    try:
        assert await starting.start_and_watch() == 2
    finally:
        starting.client.close()
        close_all(listeners)
    assert logged == ([] if is_off else [starting.status])


@pytest.mark.parametrize("module", ["engine", "tokenizer_proc"])
def test_death_of_a_child(model: str, module: str, tmp_path: Path) -> None:
    with run_dirs_watched(tmp_path) as env, spawned(model, *FLAGS, env=env) as server:
        wait_for(server, "/ready", START_S)
        pids = children_of(server.process.pid)
        victim = child_running(server, module)
        os.kill(victim, signal.SIGSTOP)  # so that the stream cannot end by itself
        body = {"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
        outcome: list[str] = []

        def request() -> None:
            try:
                with post(server, body) as response:
                    outcome.append(response.read().decode())
            except urllib.error.HTTPError as error:
                outcome.append(error.read().decode())

        thread = threading.Thread(target=request)
        thread.start()
        time.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        assert server.process.wait(20) == 70
        thread.join(10)
        assert '"engine_dead"' in outcome[0]
        assert f"(pid {victim}) was killed by SIGKILL" in server.log.read_text()
        assert not any(is_alive(pid) for pid in pids)


def test_killed_server_takes_its_children_along(model: str, tmp_path: Path) -> None:
    """And what it leaves in the temporary folder is removed by the next start."""
    with spawned(model, *FLAGS, env={"TMPDIR": str(tmp_path)}) as server:
        wait_for(server, "/ready", START_S)
        pids = children_of(server.process.pid)
        assert len(pids) == 2
        server.process.kill()
        server.process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        (left,) = tmp_path.iterdir()
        remove_abandoned(tmp_path)
        assert not left.exists()


def test_signals_while_loading(model: str, tmp_path: Path) -> None:
    """Stopped in the middle of the start: nothing stays behind, exit code 0."""
    with run_dirs_watched(tmp_path) as env, spawned(model, *FLAGS, env=env) as server:
        wait_for(server, "/live", 20)
        assert server.get("/ready")[0] == 503
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(20) == 0


def test_hangup_that_is_ignored_stays_so(model: str) -> None:
    """nohup starts programs like that, and they are to outlive their terminal."""
    command = ["nohup", sys.executable, str(ROOT / "scripts/serve.py"), model, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        line = b""
        while b"listening" not in line:
            line = process.stderr.readline()
            assert line, "the log ended"
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read().decode()
        assert process.wait(20) == 0
    assert "SIGTERM" in said
    assert "SIGHUP" not in said


def test_files_where_it_is_started_are_not_imported(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with `engine/` or numpy.py in it is a place to start from like any other."""
    (tmp_path / "engine").mkdir()
    for name in ("engine/__init__.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('imported by mistake')\n")
    monkeypatch.chdir(tmp_path)
    with live_server(model, *FLAGS) as server:
        assert server.stop() == 0
        assert "by mistake" not in server.log.read_text()


def test_interrupted_before_it_serves(model: str, tmp_path: Path) -> None:
    """Ctrl-C while Python still imports: no traceback."""
    (tmp_path / "uvloop.py").write_text("import os\nos.kill(os.getpid(), 2)\nimport time\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/serve.py"), model, "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_missing_package_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(name='msgspec')\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/serve.py")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 75
    assert done.stderr.count("\n") == 1
    assert "no package msgspec" in done.stderr
    assert "requirements.txt" in done.stderr


def test_configuration_that_the_engine_refuses(model: str) -> None:
    """Known only once the model is read: the engine's exit code and its reason come out."""
    with spawned(model, *FLAGS, "--max-model-len", "99999999") as server:
        assert server.process.wait(60) == 2
        assert "--max-model-len 99999999: the model was made for" in server.log.read_text()


def test_port_in_use(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts/serve.py"), model, "--port", port],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "--port" in done.stderr
