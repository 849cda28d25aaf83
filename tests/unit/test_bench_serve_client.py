"""The load test's client against a server that misbehaves: every failure has a name and an end."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.loadtest import client
from scripts.loadtest.client import Target, open_session, send
from scripts.loadtest.records import Record
from scripts.loadtest.workload import Lengths, Workload
from tests.server.openai_stub import OpenAIStub


@pytest.fixture
def stub() -> Iterator[OpenAIStub]:
    with OpenAIStub() as running:
        yield running


async def one(url: str, chat: bool = False, timeout_s: float = 20.0, retries: int = 0) -> Record:
    one_length = Lengths.parse("4")
    request = Workload("m", chat, chat, one_length, one_length).request(0, 0, 0)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    target = Target(url + path, {"X-Test": "1"}, timeout_s, retries)
    async with open_session(target) as session:
        return await send(session, target, request)


@pytest.mark.parametrize("chat", [False, True])
async def test_a_good_answer(stub: OpenAIStub, chat: bool) -> None:
    record = await one(stub.url, chat)
    assert record.error is None
    assert len(record.pieces) == 4
    assert (record.prompt_tokens, record.completion_tokens, record.status) == (7, 8, 200)
    assert record.tokens == 8
    assert record.end >= record.pieces[-1] >= record.pieces[0] > record.start
    assert stub.seen[0].headers["X-Test"] == "1"


@pytest.mark.parametrize(
    ("mode", "kind", "detail", "pieces"),
    [
        ("http_500", "HTTP 500", "broken", 0),
        ("http_429", "HTTP 429", "the queue is full", 0),
        ("drop", "closed before an answer", "", 0),
        ("cut", "closed mid-stream", "", 2),
        ("no_end", "closed mid-stream", "without finish_reason", 2),
        ("error_event", "error in the stream", "the engine died", 2),
        ("json", "not a stream", "application/json", 0),
        ("garbage", "bad stream", "oops", 0),
    ],
)
async def test_failures_have_names(
    stub: OpenAIStub, mode: str, kind: str, detail: str, pieces: int
) -> None:
    stub.mode = mode
    record = await one(stub.url)
    assert record.error == kind
    assert detail in record.detail
    assert len(record.pieces) == pieces
    assert record.end >= record.start


@pytest.mark.parametrize(
    ("broken", "detail"),
    [
        (b'data: {"text": "a"\n\n', 'not a JSON object: {"text": "a"'),
        (b'data: "text"\n\n', "not a JSON object"),
        (b"data: <html>\r\n\r\n", "not a JSON object: <html>"),
        (b'data: {"usage": {"a": ' + b"[" * 100_000 + b"\n\n", "not JSON"),
        (b'data: {"choices": [1], "finish_reason": "x"}\n\n', "no list of objects"),
        (b'data: {"choices": 5, "finish_reason": "x"}\n\n', "no list of objects"),
    ],
)
async def test_a_broken_event_is_a_bad_stream_though_done_follows(
    stub: OpenAIStub, broken: bytes, detail: str
) -> None:
    stub.broken = broken
    record = await one(stub.url)
    assert record.error == "bad stream"
    assert detail in record.detail


async def test_what_is_no_event_is_passed_over(stub: OpenAIStub) -> None:
    stub.broken = b': hello\n\nevent: message\nid: 3\ndata:\n\ndata:{"choices":[]} \r\n\r\n'
    assert (await one(stub.url)).error is None


@pytest.mark.parametrize("count", [10**400, -2, True, "8", 1.5, None, [1]])
async def test_a_count_that_cannot_be_true_is_no_count(stub: OpenAIStub, count: Any) -> None:
    stub.counts = {"completion_tokens": count}
    record = await one(stub.url)
    assert record.error is None
    assert (record.prompt_tokens, record.completion_tokens, record.tokens) == (7, None, 4)


async def test_refusals_are_shown_without_control_characters(stub: OpenAIStub) -> None:
    stub.mode, stub.refusal = "http_500", '{"error": {"message": "\\u001b[31mno\\ud800\\n"}}'
    assert (await one(stub.url)).detail == "\\x1b[31mno\\ud800\\n"
    stub.refusal = "[" * 100_000
    record = await one(stub.url)
    assert (record.error, record.detail) == ("HTTP 500", "[" * 300)


async def two(stub: OpenAIStub, timeout_s: float = 60.0) -> list[Record]:
    """One after the other in one session."""
    length = Lengths.parse("4")
    workload = Workload("m", False, False, length, length)
    target = Target(stub.url + "/v1/completions", timeout_s=timeout_s)
    async with open_session(target) as session:
        return [await send(session, target, workload.request(0, 0, i)) for i in range(2)]


async def test_an_answer_ends_at_done_and_its_open_connection_is_not_used_again(
    stub: OpenAIStub,
) -> None:
    stub.mode = "linger"
    for record in await two(stub):
        assert record.error is None
        assert len(record.pieces) == 4
    first, second = stub.seen
    assert first.peer != second.peer


async def test_a_body_that_ends_leaves_its_connection_for_the_next(
    stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "END_PATIENCE_S", 20.0)
    assert [record.error for record in await two(stub)] == [None, None]
    first, second = stub.seen
    assert first.peer == second.peer


async def test_the_time_limit_between_done_and_the_bodys_end_spoils_nothing(
    stub: OpenAIStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[asyncio.Timeout] = []
    real = asyncio.timeout

    def timeout(delay: float | None) -> asyncio.Timeout:
        limits.append(real(delay))
        return limits[-1]

    async def await_end(response: object) -> None:
        limits[0].reschedule(asyncio.get_running_loop().time())  # that of the request
        await asyncio.sleep(60)

    monkeypatch.setattr(asyncio, "timeout", timeout)
    monkeypatch.setattr(client, "await_end", await_end)
    record = await one(stub.url)
    assert record.error is None
    assert record.completion_tokens == 8


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("silent", "timeout before the first text"), ("stall", "timeout mid-stream")],
)
async def test_waiting_has_an_end(stub: OpenAIStub, mode: str, kind: str) -> None:
    stub.mode = mode
    record = await one(stub.url, timeout_s=0.3)
    assert record.error == kind
    assert "no end after 0.3 s" in record.detail
    assert 0.3 <= record.e2e < 10


async def test_a_dead_server_refuses_the_connection() -> None:
    with OpenAIStub() as stub:
        url = stub.url
    record = await one(url)
    assert record.error == "connection refused"
    assert record.status == 0


async def test_429_is_counted_with_its_retry_after_and_not_retried(stub: OpenAIStub) -> None:
    stub.mode, stub.retry_after = "http_429", "3"
    record = await one(stub.url)
    assert (record.retry_after, record.retries, len(stub.seen)) == (3.0, 0, 1)
    stub.retry_after = "Wed, 21 Oct 2015 07:28:00 GMT"  # a date: allowed, and not a number
    assert (await one(stub.url)).retry_after is None
    for odd in ("\u00b2", "\u0661", "9" * 400, "1.2.3", "-1", "inf", "."):
        stub.retry_after = odd
        record = await one(stub.url)
        assert (record.error, record.retry_after) == ("HTTP 429", None)


async def test_429_is_retried_when_asked_and_the_wait_is_latency(stub: OpenAIStub) -> None:
    stub.mode, stub.refusals, stub.retry_after = "http_429", 2, "0.2"
    record = await one(stub.url, retries=5)
    assert record.error is None
    assert (record.retries, len(stub.seen), len(record.pieces)) == (2, 3, 4)
    assert record.ttft is not None
    assert record.ttft >= 0.4
    stub.refusals = 10
    assert (await one(stub.url, retries=1)).error == "HTTP 429"


async def test_gaps_are_those_of_the_server() -> None:
    """At once, without a run around it: the client adds next to nothing."""
    with OpenAIStub(first_s=0.2, gap_s=0.1) as stub:
        before = time.perf_counter()
        record = await one(stub.url)
        seen = stub.seen[0]
    assert before <= record.start <= seen.came
    for mine, theirs in zip(record.pieces, seen.written, strict=True):
        assert mine == pytest.approx(theirs, abs=0.02)
