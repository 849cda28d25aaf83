"""scripts/selftest.py: all passes on a real server, and a wrong one is caught."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.api.messages import Generate, TextPrompt
from scripts import selftest
from scripts.operate.checks import CHECKS
from scripts.operate.findings import Findings
from scripts.operate.probe_client import CheckFailed, CheckSkipped, check_ok
from scripts.operate.selftest_run import run_checks
from scripts.operate.server_process import ServerFailed, ServerProcess
from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import is_alive
from tests.server import certificates
from tests.server.conftest import ROOT, Site, running_site
from tests.server.fake_backend import Script
from tests.waiting import eventually


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


def test_a_server_of_its_own_passes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-model-len", "512", "--num-blocks", "800", "--dtype", "float32"]
    flags += ["--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    code = selftest.main([model, "--json", *flags])
    told = json.loads(capsys.readouterr().out)
    failed = [one for one in told["findings"] if one["level"] == "fail"]
    assert failed == []
    assert code == 0
    assert {one["name"] for one in told["findings"]} == {"start", *CHECKS}
    skipped = {one["name"] for one in told["findings"] if one["level"] == "skip"}
    assert skipped <= {"stop strings"}, "random text may hold nothing to stop at"


def test_a_server_of_its_own_may_speak_tls(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its certificate is for another name, and of nobody whom we trust."""
    certificate, key = certificates.write_first(tmp_path)
    file = tmp_path / "server.yaml"
    file.write_text(f"ssl-certfile: {certificate}\nssl-keyfile: {key}\nkv-cache-gib: 0.01\n")
    flags = [model, "--config", str(file), "--max-model-len", "128"]
    code = selftest.main([*flags, "--json", "--only", "models", "errors"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    assert "https://" in told["findings"][0]["detail"]

    client = [*flags, "--ssl-ca-certs", certificate, "--ssl-cert-reqs", "2"]
    assert selftest.main(client) == 2
    assert "--ssl-cert-reqs 2: this program has no certificate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (["--url", ""], "--url is empty"),
        (["--url", "127.0.0.1:8000"], "begin it with http:// or https://"),
        (["--url", "http://"], "write http://HOST:PORT"),
        (["--url", "http://h:99999"], "--url http://h:99999: Port out of range"),
        (["--url", "http://h", "--api-key", "a\nb"], "--api-key: a key has letters, digits"),
        (["--timeout", "-1"], "'-1': give a number above 0"),
        (["--timeout", "0"], "'0': give a number above 0"),
        (["--timeout", "nan"], "'nan': give a number above 0"),
    ],
)
def test_wrong_arguments_are_refused(
    wrong: list[str],
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("check", "check_own"):
        monkeypatch.setattr(selftest, name, lambda *args: pytest.fail("it started"))
    with pytest.raises(SystemExit) as end:
        selftest.main(wrong)
    assert end.value.code == 2
    assert advice in capsys.readouterr().err


async def levels(site: Site, *names: str) -> dict[str, tuple[str, str]]:
    found = Findings(quiet=True)
    await run_checks(found, site.url, "", "", 5.0, list(names))
    return {one.name: (one.level, one.detail) for one in found.all}


async def test_what_does_not_depend_on_a_model_passes(site: Site) -> None:
    found = await levels(site, "models", "errors", "metrics")
    assert {level for level, _ in found.values()} == {"pass"}


async def test_what_the_operator_limits_is_skipped() -> None:
    async with running_site(max_n=1, max_logprobs=0) as site:
        site.backend.script = lambda generate: Script(pieces=[f"seed {generate.params.seed}"])
        found = await levels(site, "logprobs", "seeds")
    assert found["logprobs"][0] == "skip"
    assert "logprobs is limited to 0 by this server (--max-logprobs)" in found["logprobs"][1]
    assert found["seeds"][0] == "pass"
    assert "not n=3" in found["seeds"][1]
    assert "(--max-n)" in found["seeds"][1]


def test_what_a_short_context_has_no_room_for_is_skipped(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--max-model-len", "16", "--kv-cache-gib", "0.01", "--dtype", "float32"]
    code = selftest.main([model, "--json", *flags])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    found = {one["name"]: one for one in told["findings"]}
    assert {name for name, one in found.items() if one["level"] == "pass"} >= {"models", "errors"}
    for name in ("completion", "streaming", "prefix cache", "disconnect", "concurrency"):
        assert found[name]["level"] == "skip"
        assert "maximum context length is 16 tokens" in found[name]["detail"]


@pytest.mark.parametrize("length", [4096, 8192])
def test_a_refusal_by_a_limit_that_is_high_enough_is_a_failure(length: int) -> None:
    message = f"this model's maximum context length is {length} tokens"
    with pytest.raises(CheckFailed, match="status 400"):
        check_ok(400, {"error": {"message": message}})


def test_a_full_queue_is_a_limit_and_a_spent_key_is_not() -> None:
    with pytest.raises(CheckSkipped, match="1 requests wait already"):
        check_ok(429, {"error": {"code": "queue_full", "message": "1 requests wait already"}})
    for status, answer in (
        (429, {"error": {"code": "rate_limit_exceeded"}}),
        (500, {}),
        (503, b""),
    ):
        with pytest.raises(CheckFailed, match=f"status {status}"):
            check_ok(status, answer)


async def test_wrong_answers_are_caught(site: Site) -> None:
    count = 0

    def script(generate: Generate) -> Script:
        nonlocal count
        count += 1
        is_whole = isinstance(generate.prompt, TextPrompt)
        return Script(pieces=["Hello", f" number {count}"] if is_whole else ["Hi"])

    site.backend.script = script
    found = await levels(
        site, "completion", "greedy repeats", "streaming", "structure", "seeds", "logprobs"
    )
    assert {level for level, _ in found.values()} == {"fail"}
    assert "usage is" in found["completion"][1]
    assert "number 2" in found["greedy repeats"][1]
    assert "is not JSON" in found["structure"][1]


async def test_a_request_that_outlives_its_client_is_caught(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.backend.script = lambda generate: Script(pieces=["a"] * 400, delay_s=0.01)
    assert (await levels(site, "disconnect"))["disconnect"][0] == "pass"
    await eventually(lambda: site.backend.aborted)
    monkeypatch.setattr("scripts.operate.checks.FREED_WITHIN_S", 0.3)
    monkeypatch.setattr(site.service.client, "abort", lambda stream: None)
    level, detail = (await levels(site, "disconnect"))["disconnect"]
    assert (level, "still running" in detail) == ("fail", True)


async def test_a_stream_without_an_answer_is_a_failure(site: Site) -> None:
    site.backend.script = lambda generate: Script(hold="prefill")
    found = Findings(quiet=True)
    await run_checks(found, site.url, "", "", 0.5, ["completion"])
    assert found.all[0].level == "fail"
    assert "no answer within" in found.all[0].detail


async def test_a_server_that_does_not_speak_is_told_from_none(tmp_path: Path) -> None:
    async def ask(url: str, timeout_s: float) -> None:
        await run_checks(Findings(quiet=True), url, "", "", timeout_s, ["models"])

    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections
        port = silent.getsockname()[1]
        with pytest.raises(CheckFailed, match=r"nothing answers .*\(no answer within 0.2 s\)"):
            await ask(f"http://127.0.0.1:{port}", 0.2)
    certificate, key = certificates.write_first(tmp_path)
    async with running_site(ssl_certfile=certificate, ssl_keyfile=key) as site:
        with pytest.raises(CheckFailed, match=r"TLS to .*SSL_CERT_FILE"):
            await ask(site.url, 20.0)


async def test_nobody_there_and_no_key() -> None:
    with pytest.raises(CheckFailed, match="nothing answers"):
        await run_checks(Findings(quiet=True), "http://127.0.0.1:9", "", "", 1.0, ["models"])
    async with running_site(api_key=["secret"]) as site:
        with pytest.raises(CheckFailed, match="give --api-key"):
            await run_checks(Findings(quiet=True), site.url, "", "", 1.0, ["models"])
        found = Findings(quiet=True)
        await run_checks(found, site.url, "secret", "", 5.0, ["models"])
        assert found.all[0].level == "pass"


def test_a_wrong_flag_is_told_by_the_server(tmp_path: Path) -> None:
    with (
        ServerProcess(["--max-num-seq", "4"], tmp_path / "log") as server,
        pytest.raises(ServerFailed, match="did you mean --max-num-seqs") as failure,
    ):
        server.wait_ready(30)
    assert failure.value.exit_code == 2
    assert selftest.main(["--max-num-seq", "4"]) == 2
    with pytest.raises(SystemExit):
        selftest.main(["--url", "http://127.0.0.1:9", "--dtype", "float32"])
    with pytest.raises(SystemExit):
        selftest.main(["--only", "everything"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_no_server_is_left_behind(model: str, tmp_path: Path, number: int) -> None:
    """However the tool ends, while the server is starting."""
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from scripts.operate.server_process import ServerProcess, interrupt_on_sigterm\n"
        "interrupt_on_sigterm()\n"
        f"with ServerProcess([{model!r}], Path({str(tmp_path / 'log')!r})) as server:\n"
        "    print(server.process.pid, flush=True)\n    server.wait_ready(60)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        await asyncio.sleep(0.5)
        process.send_signal(number)
        process.wait(30)
        process.stdout.close()
    finally:
        process.kill()
    await eventually(lambda: not is_alive(pid), why="the server outlived its tool")
