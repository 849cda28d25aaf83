"""A short run of scripts/fuzz_http.py against the three real processes, and its parts."""

import asyncio
import random
import socket
import sys

import jsonschema
import pytest

from scripts import fuzz_http
from scripts.fuzz.bodies import Bodies
from scripts.fuzz.judge import judge, read_answers
from scripts.fuzz.run import Said, Target, Unusable, fuzz, metrics_when_idle, stream_text
from scripts.fuzz.values import right
from scripts.fuzz.wire import Attempt, Wire
from tests.engine_cpu.tiny_models import make_tiny
from tests.server.conftest import live_server, running_site
from tests.waiting import eventually

FLAGS = [
    "--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "16", "--num-blocks", "2000",
    "--max-num-batched-tokens", "512", "--served-model-name", "tiny", "--tool-call-parser", "hermes",
    "--max-body-size", "1000000",
]  # fmt: skip
NUM = 600


async def test_nothing_that_a_client_sends_harms_the_server(tmp_path) -> None:
    """Fuzzed requests beside four streams: no answer but documented ones, no hang, nothing left over."""
    model = make_tiny("llama", tmp_path)
    with live_server(model, *FLAGS) as server:
        report = await fuzz(server.url, NUM, seed=7, workers=8)
        log = server.log.read_text()
    assert report.findings == []
    assert sum(report.kinds.values()) == NUM
    assert report.num_streams >= 4
    assert report.outcomes["200"] > 50  # much was served,
    assert len(report.outcomes) > 12  # and refused in many ways
    assert "Traceback" not in log


async def test_without_a_server_it_gives_advice() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(Unusable, match=r"nothing answers .*start the server first"):
            await fuzz(f"127.0.0.1:{unused.getsockname()[1]}", 1, seed=0, workers=1)
    with pytest.raises(Unusable, match="plain http"):
        await fuzz("https://127.0.0.1:9", 1, seed=0, workers=1)
    async with running_site(ready=False) as site:
        with pytest.raises(Unusable, match="ready"):
            await fuzz(site.url, 1, seed=0, workers=1)
    async with running_site(api_key=["secret"]) as site:
        with pytest.raises(Unusable, match="needs no key"):
            await fuzz(site.url, 1, seed=0, workers=1)


@pytest.mark.parametrize(
    "wrong",
    [
        *(["--workers", "0"], ["--workers", "-1"], ["--requests", "0"], ["--requests", "-1"]),
        *(["--only", "-1"], ["--requests", "10", "--only", "10"]),
    ],
)
def test_a_run_that_would_send_nothing_is_refused(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz_http.py", "http://127.0.0.1:9", *wrong])
    monkeypatch.setattr(fuzz_http, "fuzz", lambda *args: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as end:
        fuzz_http.main()
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert f"{wrong[-2]}" in told
    assert wrong[-1] in told


async def test_a_server_that_others_use_is_not_fuzzed(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no finding, which exit code 1 means."""
    monkeypatch.setattr("scripts.fuzz.run.SETTLE_S", 0.1)

    async def metrics(self: Target) -> dict[str, float]:
        return {"vllm:num_requests_running": 1.0}

    monkeypatch.setattr(Target, "metrics", metrics)
    with pytest.raises(Unusable, match="others use this server"):
        await metrics_when_idle(Target("http://a"))


async def test_a_server_that_ends_on_the_way_is_a_finding(tmp_path) -> None:
    with live_server(make_tiny("llama", tmp_path), *FLAGS, "--log-requests", "on") as server:
        run = asyncio.create_task(fuzz(server.url, 100_000, seed=1, workers=2))
        await eventually(lambda: b"status=4" in server.log.read_bytes(), 30)
        server.process.kill()
        report = await run
    assert any("the run broke off" in finding for finding in report.findings)


@pytest.mark.parametrize(
    ("received", "text"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n",
            "ends within its chunks",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "has no end: ''"),
        (
            b'HTTP/1.1 200 OK\r\n\r\ndata: {"error": {}}\n\ndata: [DONE]\n\n',
            "a stream failed: .*error",
        ),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\ndead", "500 dead"),
        (b"", r"/v1/completions: \[\]"),
    ],
)
async def test_what_a_dying_server_leaves_of_a_stream_is_said(
    monkeypatch: pytest.MonkeyPatch, received: bytes, text: str
) -> None:
    async def send(self: Target, attempt: Attempt) -> bytes:
        return received

    monkeypatch.setattr(Target, "send", send)
    with pytest.raises(AssertionError, match=text):
        await stream_text(Target("http://a"), 0)


def test_a_disturbed_stream_is_told_from_other_last_bits() -> None:
    alone = Said(["a", "b"], [-0.5, -0.1], [{"a": -0.5, "x": -0.6}, {"b": -0.1, "c": -3.0}])
    assert alone.disturbed(alone) is None
    assert alone.disturbed(Said(["a", "b"], [-0.6, -0.1])) is None
    assert alone.disturbed(Said(["x", "y"], [-0.5, -9.0])) is None, "a near tie, then another text"
    assert alone.disturbed(Said(["a", "c"], [-0.5, -0.4])) == "token 1 is 'c', not 'b'"
    assert alone.disturbed(Said(["z", "b"], [-0.5, -0.1])) == "token 0 is 'z', not 'a'"
    assert alone.disturbed(Said(["a", "b"], [-2.0, -0.1])) == "token 0 has -2.000, not -0.500"
    assert alone.disturbed(Said(["a"], [-0.5])) == "1 tokens, not 2"


async def test_right_bodies_are_right_by_the_description() -> None:
    async with running_site() as site:
        _, document = await site.get("/openapi.json")
    rng = random.Random(5)
    names = [n for n in document["components"]["schemas"] if n.endswith("Request")]
    assert len(names) == 6
    for name in names:
        schema = document["components"]["schemas"][name]
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(60):
            value = right(schema, rng)
            is_both = {"prompt", "messages"} <= value.keys()  # of an object that has one of them
            assert validator.is_valid(value) or is_both, (name, value)


async def test_attempts_depend_on_their_number_alone() -> None:
    async with running_site() as site:
        _, document = await site.get("/openapi.json")
    wires = [Wire(Bodies(document), list(document["paths"])) for _ in range(2)]
    first, second = ([wire.draw(random.Random(f"0/{i}")) for i in range(200)] for wire in wires)
    assert first == second
    assert {attempt.name for attempt in first} > {"plain", "split", "piped", "chunks", "lengths"}


HEAD = b"HTTP/1.1 %b\r\nX-Request-Id: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def answer(status: bytes, body: bytes) -> bytes:
    return HEAD % (status, len(body)) + body


ERROR = b'{"error":{"message":"m","type":"t","param":null,"code":"%b"}}'


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (answer(b"200 OK", b"{}"), None),
        (answer(b"200 OK", b'{"a":NaN}'), "NaN is not JSON"),
        (answer(b"400 Bad", ERROR % b"invalid_value"), None),
        (answer(b"400 Bad", b"<html>"), "a body that is none"),
        (answer(b"500 Oh", ERROR % b"internal_error"), "500 internal_error"),
        (answer(b"503 Oh", ERROR % b"queue_timeout"), "503 queue_timeout"),
        (answer(b"200 OK", b"{}") * 2, "2 answers, not 1"),
        (answer(b"200 OK", b"{}")[:-1], "shorter than its Content-Length"),
        (b"", "0 answers, not 1"),
        (b"nonsense", "no response"),
    ],
)
def test_the_judge_sees_wrong_answers(data: bytes, complaint: str | None) -> None:
    complaints, _ = judge(Attempt("plain", [b"POST / HTTP/1.1"], num_answers=1), data)
    if complaint is None:
        assert complaints == []
    else:
        assert any(complaint in found for found in complaints)


def test_streams_without_an_end_are_seen() -> None:
    head = b"HTTP/1.1 200 OK\r\nX-Request-Id: a\r\nContent-Type: text/event-stream\r\n\r\n"
    attempt = Attempt("plain", [b"POST / HTTP/1.1"], num_answers=1)
    assert judge(attempt, head + b"data: {}\n\ndata: [DONE]\n\n")[0] == []
    assert judge(attempt, head + b"data: {}\n\n")[0] == ["the stream has no end"]
    failed = b'data: {"error": {"code": "internal_error"}}\n\n'
    assert "the stream failed" in judge(attempt, head + failed)[0][0]


def test_chunked_answers_are_read_strictly() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert read_answers(head + b"2\r\nab\r\n0\r\n\r\n")[0].body == b"ab"
    for cut in (b"2\r\nab", b"9\r\nab", b"2\r\nab\r\n"):
        with pytest.raises(ValueError, match="chunk"):
            read_answers(head + cut)
