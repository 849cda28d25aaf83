"""The benchmark's arithmetic, exactly, and its client against a server that counts along."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from scripts import bench_cpu
from scripts.bench_cpu import Client, Level, Result, Sample
from scripts.operate import process_tree
from tests.engine_cpu.tiny_models import make_tiny


def test_percentile_is_linear_between_values() -> None:
    assert bench_cpu.percentile([3.0], 0.99) == 3.0
    assert bench_cpu.percentile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert bench_cpu.percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert math.isnan(bench_cpu.percentile([], 0.5))


def test_summary_of_known_times() -> None:
    samples = [
        Sample(10.0, [10.5, 10.6, 10.8], end=11.0, prompt_tokens=5, completion_tokens=3),
        Sample(10.0, [11.5, 11.7], end=14.0, prompt_tokens=5, completion_tokens=5),
    ]
    level = bench_cpu.summarize(2, samples)
    assert level.requests == 2
    assert level.ttft_p50_s == pytest.approx(1.0)
    assert level.ttft_p99_s == pytest.approx(0.5 + 0.99)
    assert level.itl_p50_ms == pytest.approx(200.0)  # of 100, 200, 200
    assert level.tokens_per_s == pytest.approx(8 / 4.0)


def test_report_gives_ratios_that_favour_ours_above_one() -> None:
    level = Level(1, 2, 0.2, 0.25, 50.0, 60.0, 20.0)
    result = Result([level], prefill_tokens=1000, prefill_ttft_s=2.5)
    result.peers["slow"] = {"batch 1, tok/s": 10.0, "prefill 1000, tok/s": 800.0, "TTFT, s": 0.3}
    lines = bench_cpu.peer_table(result).splitlines()
    assert lines[1].split() == ["batch", "1,", "tok/s", "20", "10", "2.00"]
    assert lines[2].split() == ["prefill", "1000,", "tok/s", "400", "800", "0.50"]
    assert lines[3].split() == ["TTFT,", "s", "0.2", "0.3", "1.50"]
    assert len({len(line) for line in lines}) == 1


class Stub:
    """A server that streams as many tokens as asked, one event for each two, and remembers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.running = 0
        self.most_running = 0
        self.short_by = 0
        self.error_after: int | None = None
        self.not_ready = 2  # first answers of /ready

    async def ready(self, request: web.Request) -> web.Response:
        self.not_ready -= 1
        return web.json_response({}, status=503 if self.not_ready >= 0 else 200)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "stub/model"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: object) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        await send({"choices": [{"text": ""}], "usage": None})
        await response.write(b": keep-alive\n\n")
        for i in range(0, body["max_tokens"], 2):
            await asyncio.sleep(0.002)
            if i == self.error_after:
                await send({"error": {"message": "the engine is gone"}})
                return response
            await send({"choices": [{"text": "ab", "finish_reason": None}], "usage": None})
        count = body["max_tokens"] - self.short_by
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await send({"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.running -= 1
        return response


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Stub, str]]:
    server = Stub()
    app = web.Application()
    app.router.add_get("/ready", server.ready)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield server, f"http://127.0.0.1:{port}"
    await runner.cleanup()


async def test_client_counts_tokens_and_times_pieces(stub: tuple[Stub, str]) -> None:
    server, url = stub
    async with aiohttp.ClientSession() as session:
        sample = await Client(session, url, "m", {}).complete([5, 6, 7], 8)
    assert sample.completion_tokens == 8
    assert sample.prompt_tokens == 3
    assert len(sample.piece_times) == 4  # the empty first event is no piece of text
    assert sample.ttft >= 0.002
    assert all(gap > 0 for gap in sample.gaps)
    assert sample.end >= sample.piece_times[-1]
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_client_refuses_what_would_falsify_the_figures(stub: tuple[Stub, str]) -> None:
    server, url = stub
    async with aiohttp.ClientSession() as session:
        client = Client(session, url, "m", {})
        server.short_by = 1
        with pytest.raises(RuntimeError, match="asked 4 tokens, got 3"):
            await client.complete([1], 4)
        server.error_after = 2
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await client.complete([1], 4)
        with pytest.raises(RuntimeError, match="404"):
            await Client(session, f"{url}/nowhere", "m", {}).complete([1], 4)
        with pytest.raises(RuntimeError, match="the engine is gone"):
            await bench_cpu.run_level(client, 3, 1, (4, 8), limit_s=10)


async def test_closed_loop_keeps_the_concurrency(stub: tuple[Stub, str]) -> None:
    server, url = stub
    async with aiohttp.ClientSession() as session:
        client = Client(session, url, "m", {})
        samples = await bench_cpu.run_level(client, 3, 2, (4, 8), limit_s=30)
        assert len(samples) == 6
        assert server.most_running == 3
        prompts = [tuple(body["prompt"]) for body in server.bodies]  # type: ignore[arg-type]
        assert len(set(prompts)) == 6
        assert all(len(prompt) == 4 for prompt in prompts)
        # out of time: what runs is finished, nothing more is started
        server.bodies.clear()
        samples = await bench_cpu.run_level(client, 2, 5, (4, 2), limit_s=0)
        assert 2 <= len(samples) <= 3


async def test_whole_run_against_a_running_server(
    stub: tuple[Stub, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server, url = stub
    out = tmp_path / "result.json"
    arguments = ["--url", url, "--no-peers", "--concurrency", "1", "2", "--output-tokens", "4"]
    arguments += ["--long-prompt", "20", "--json", str(out)]
    assert await asyncio.to_thread(bench_cpu.main, arguments) == 0
    result = json.loads(out.read_text())
    assert [level["concurrency"] for level in result["levels"]] == [1, 2]
    assert [level["requests"] for level in result["levels"]] == [2, 4]
    assert result["prefill_tokens"] == 20
    assert server.bodies[-1]["max_tokens"] == 1
    assert len(server.bodies[-1]["prompt"]) == 20  # type: ignore[arg-type]
    assert {body["model"] for body in server.bodies} == {"stub/model"}
    captured = capsys.readouterr()
    assert "prompt of 20 tokens" in captured.out
    assert "concurrency 1: 2 requests" in captured.err, "one line for each level without a terminal"
    assert "concurrency 2: 4 requests" in captured.err
    assert "prefill 20:" in captured.err


async def test_server_that_dies_while_starting_is_reported() -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    async with aiohttp.ClientSession() as session:
        with pytest.raises(RuntimeError, match="ended while starting"):
            await bench_cpu.wait_ready(session, "http://127.0.0.1:9", dead.pid, 30)
    dead.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_the_server_too(tmp_path: Path, number: signal.Signals) -> None:
    """Its temporary folder and its server, whose run directory is in the same place, go as well."""
    model = make_tiny("llama", tmp_path / "model")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [sys.executable, str(bench_cpu.ROOT / "scripts/bench_cpu.py"), "--model", str(model)],
        env={**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not any("listening" in log.read_text() for log in scratch.glob("bench-cpu-*/server.log")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.05)
    members = process_tree.tree_cpu_seconds(child.pid)
    child.send_signal(number)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert said == ""
    assert not any(process_tree.is_running(pid) for pid in members)
    assert list(scratch.iterdir()) == []


async def test_idle_watch_sees_a_grandchild_at_work() -> None:
    busy = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    child = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    try:
        seconds = 0.0
        for _ in range(200):
            members = process_tree.tree_cpu_seconds(child.pid)
            seconds = sum(members.values())
            if len(members) == 2 and seconds >= 0.2:
                break
            await asyncio.sleep(0.05)
        assert len(members) == 2
        assert seconds >= 0.2
        assert await process_tree.idle_cpu_percent(child.pid, 0.3) > 5
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_peer_without_its_library_says_so(tmp_path: Path) -> None:
    """llama-cpp-python is optional; a broken one stands in for an absent one."""
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('not on this machine')\n")
    done = subprocess.run(
        [sys.executable, "scripts/bench_cpu_peers.py", "llama.cpp", "none.gguf"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=bench_cpu.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "llama_cpp cannot be imported (not on this machine)" in done.stderr
    assert done.stdout == ""


def test_server_that_does_not_listen_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Another's, that is: a server of ours takes a while to."""
    url = f"http://127.0.0.1:{bench_cpu.free_port()}"
    assert bench_cpu.main(["--url", url, "--no-peers"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: --url {url}: ")
    assert err.endswith("is the server started?\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--json", "/dev/null/x.json"], "--json /dev/null/x.json: cannot be written"),
        (["--url", ""], "--url '': give http://HOST:PORT"),
        (["--url", "localhost:8000"], "--url 'localhost:8000': give http://HOST:PORT"),
        (["--concurrency", "0"], "--concurrency: '0': give a whole number of at least 1"),
        (["--repeats", "0"], "--repeats: '0': give a whole number of at least 1"),
        (["--threads", "-1"], "--threads: '-1': give a whole number of at least 1"),
        (["--start-timeout", "nan"], "--start-timeout: 'nan': give a number above 0"),
    ],
)
def test_arguments_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_cpu.main(flags)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
