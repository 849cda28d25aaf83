"""Streams and connections: framing, disconnects in every phase, failures, drain, slow readers."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from engine.api.messages import Deltas, FinishReason, Generate, Phase, RequestError
from server import stream
from server.service import engine_dead, shut_down
from tests.server.conftest import Site, eventually, read_events, read_paced_events, running_site
from tests.server.fake_backend import Script

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


def stream_of(site: Site, **fields: Any) -> Any:
    body = {"prompt": "x", "stream": True, **fields}
    return site.session.post(site.url + TEXT, json=body)


@pytest.mark.parametrize("hold", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_aborts_in_every_phase(site: Site, hold: str, stream: bool) -> None:
    site.backend.script = lambda g: Script(hold=hold)
    body = {"prompt": ["x", "y"], "n": 2, "stream": stream}
    client = site.service.client
    task = asyncio.create_task(site.post(TEXT, body))
    await eventually(lambda: len(site.backend.generates) == 2)
    phases = {"queued": "queued", "prefill": "prefill", "decode": "decode"}
    await eventually(lambda: {c.phase for c in client._choices.values()} == {phases[hold]})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ids = {g.req_id + i for g in site.backend.generates for i in range(2)}
    await eventually(lambda: site.backend.aborted == ids)
    assert (client.num_live, client.num_queued) == (0, 0)
    assert await site.metric(f'srv:aborted_requests_total{{phase="{hold}"') == 4
    assert await site.metric("vllm:num_requests_waiting") == 0


async def test_late_messages_are_dropped_and_counted(site: Site) -> None:
    late = Deltas(
        req_ids=[77], texts=["x"], counts=[1], finished=[(0, FinishReason.STOP, None)],
        started=[(77, 0, 0)],
    )  # fmt: skip
    site.backend.send("replies", late)
    site.backend.send("replies", RequestError(req_id=77, n=1, status=400, code="x", message="x"))
    status, _ = await site.post(TEXT, {"prompt": "x"})
    assert status == 200
    assert await site.metric("srv:late_messages_total") == 3


async def test_a_client_that_closes_only_its_sending_side_counts_as_gone(site: Site) -> None:
    """docs/http.md, Streaming."""
    site.backend.script = lambda g: Script(hold="prefill")
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"prompt": "x"}'
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await eventually(lambda: len(site.backend.generates) == 1)
    writer.write_eof()
    await eventually(lambda: site.backend.aborted == {site.backend.generates[0].req_id})
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


async def test_finished_choices_are_not_aborted(site: Site) -> None:
    await site.post(TEXT, {"prompt": "x", "n": 3})
    await site.get("/health")
    assert site.backend.aborted == set()
    assert site.service.client.num_live == 0


async def test_a_request_that_cannot_be_sent_leaves_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two prompts fails: the first is aborted, and neither counts as queued."""
    client = site.service.client
    site.backend.script = lambda g: Script(hold="queued")
    send = client._link.send

    def broken(message: Any) -> None:
        if isinstance(message, Generate) and message.req_id > first:
            raise RecursionError
        send(message)

    first = client._next_id
    with monkeypatch.context() as patch:
        patch.setattr(client._link, "send", broken)
        assert (await site.post("/v1/completions", {"prompt": ["a", "b"], "n": 3}))[0] == 500
    assert (client.num_live, client.num_queued, client.status.has_work) == (0, 0, False)
    await eventually(lambda: set(range(first, first + 6)) <= site.backend.aborted)


def failing_after(pieces: int | None) -> Any:
    return lambda g: Script(
        pieces=["a", "b", "c"],
        error_after=pieces,
        error=RequestError(
            req_id=g.req_id, n=g.params.n, status=500, code="internal_error", message="NaN logits."
        ),
    )


async def test_error_after_the_first_text_is_an_event(site: Site) -> None:
    site.backend.script = failing_after(2)
    async with stream_of(site) as response:
        assert response.status == 200
        request_id = response.headers["X-Request-Id"]
        events = await read_events(response)
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert error["code"] == "internal_error"
    assert error["message"] == f"NaN logits. Request id: {request_id}"
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "ab"
    assert await site.metric('srv:rejected_requests_total{code="internal_error"') == 1
    assert await site.metric('vllm:request_success_total{engine="0",finished_reason="error"') == 1


async def test_official_client_raises_on_the_error_event(site: Site) -> None:
    site.backend.script = failing_after(1)
    client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    with pytest.raises(openai.APIError):
        _ = [chunk async for chunk in stream]
    await client.close()


async def test_one_failed_prompt_ends_the_batch(site: Site) -> None:
    """The other prompts of the request are aborted: nobody waits for them any more."""

    def script(generate: Any) -> Script:
        is_second = len(site.backend.generates) == 2
        return failing_after(None)(generate) if is_second else Script(hold="decode")

    site.backend.script = script
    status, answer = await site.post(TEXT, {"prompt": ["x", "y"], "stream": True})
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    await eventually(lambda: site.backend.aborted == {site.backend.generates[0].req_id})


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
async def test_engine_side_ends_are_errors_not_finish_reasons(
    site: Site, reason: FinishReason
) -> None:
    site.backend.script = lambda g: Script(["a"], finish=reason)
    status, answer = await site.post(TEXT, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (500, "internal_error")


async def test_keep_alive_comments() -> None:
    async with running_site(sse_keep_alive=0.05) as site:
        site.backend.script = lambda g: Script(["a", "b"], paced=True)
        async with stream_of(site) as response, asyncio.timeout(20):
            assert response.status == 200
            events = await read_paced_events(site, response, num_comments=4)
        assert "".join(json.loads(e)["choices"][0]["text"] for e in events if e[0] == "{") == "ab"
        # Still queued when the first comment is due: from then on errors are events.
        site.backend.script = lambda g: Script(hold="queued")
        async with stream_of(site) as response:
            assert await response.content.readline() == b": keep-alive\n"
            site.service.client.fail_all(shut_down())
            rest = (await response.read()).decode()
        assert '"draining"' in rest
        assert "ended this request" in rest


async def test_silence_without_keep_alive() -> None:
    async with running_site(sse_keep_alive=0) as site:
        site.backend.script = lambda g: Script(["a"], delay_s=0.1)
        async with stream_of(site) as response:
            events = await read_events(response)
        assert all(not event.startswith(":") for event in events)


async def test_headers_wait_for_the_start(site: Site) -> None:
    site.backend.script = lambda g: Script(hold="queued")
    task = asyncio.create_task(stream_of(site).__aenter__())
    await eventually(lambda: len(site.backend.generates) == 1)
    (choice,) = site.service.client._choices.values()
    await eventually(lambda: choice.stream.is_accepted)
    await asyncio.sleep(0.02)
    assert not task.done()
    (generate,) = site.backend.generates
    started = Deltas(
        req_ids=[], texts=[], counts=[], finished=[], started=[(generate.req_id, 0, 0)]
    )
    site.backend.send("replies", started)
    response = await asyncio.wait_for(task, 5)
    assert response.status == 200
    response.close()


async def test_slow_reader_gets_merged_deltas_and_delays_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that stops: text is merged for it, and another stream runs through meanwhile."""
    num_pieces, size = 400, 20_000  # more than sockets buffer
    monkeypatch.setattr(stream, "MAX_PENDING_CHARS", num_pieces * size)
    site.backend.script = lambda g: Script(["x" * size] * num_pieces)
    async with stream_of(site) as slow:
        assert slow.status == 200
        await eventually(lambda: len(site.backend.finished) == 1)
        site.backend.script = lambda g: Script()
        status, _ = await asyncio.wait_for(site.post(TEXT, {"prompt": "x"}), 5)
        assert status == 200
        events = await read_events(slow)
    texts = [json.loads(e)["choices"][0]["text"] for e in events[:-1]]
    assert "".join(texts) == "x" * (size * num_pieces)
    assert len(texts) < num_pieces


async def test_a_reader_that_stops_for_good_is_dropped() -> None:
    async with running_site(write_timeout=0.3) as site:
        site.backend.script = lambda g: Script(
            ["x" * 20_000] * 1500, hold="decode"
        )  # more than sockets buffer
        async with stream_of(site) as stuck:
            assert stuck.status == 200
            ids = {generate.req_id for generate in site.backend.generates}
            await eventually(lambda: site.backend.aborted == ids)
            assert site.service.client.num_live == 0
            with pytest.raises(aiohttp.ClientError):
                await stuck.read()


async def test_a_quiet_stream_is_no_slow_reader() -> None:
    async with running_site(write_timeout=0.05) as site:
        site.backend.script = lambda g: Script(["a", "b"], delay_s=0.2)
        async with stream_of(site) as response:
            assert (await read_events(response))[-1] == "[DONE]"


async def test_many_streams_at_once(site: Site) -> None:
    def script(generate: Any) -> Script:
        return Script([f"{generate.req_id}:", "a", "b"], delay_s=0.001)

    site.backend.script = script

    async def one() -> str:
        async with stream_of(site) as response:
            events = await read_events(response)
        assert events[-1] == "[DONE]"
        return "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1])

    texts = await asyncio.gather(*(one() for _ in range(50)))
    assert sorted(texts) == sorted(f"{g.req_id}:ab" for g in site.backend.generates)


@pytest.mark.parametrize("wish", [b"", b"Connection: keep-alive\r\n"])
async def test_http_1_0_stream(site: Site, wish: bytes) -> None:
    """No chunked coding there: the stream ends with the connection, whatever the client wishes."""
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "x", "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b" % (len(body), wish, body)
    )
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    head, _, events = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"chunked" not in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_stream_says_what_becomes_of_the_connection(site: Site, connection: str) -> None:
    body = {"prompt": "x", "stream": True}
    wish = {"Connection": connection}
    async with site.session.post(site.url + TEXT, json=body, headers=wish) as response:
        assert response.headers["Connection"] == connection
        assert (await read_events(response))[-1] == "[DONE]"


async def test_not_ready() -> None:
    async with running_site(ready=False) as site:
        assert await site.get("/live") == (200, {"status": "ok"})
        site.backend.state(Phase.LOADING, 0.25, detail="layer 3")
        await eventually(lambda: site.service.client.status.progress == 0.25)
        status, body = await site.get("/ready")
        assert status == 503
        assert body["status"] == "loading"
        assert (body["phase"], body["progress"], body["detail"]) == (
            "loading weights",
            0.25,
            "layer 3",
        )
        status, body = await site.get("/health")
        assert (status, body["status"]) == (503, "loading")
        assert "25%" in body["reason"]
        status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert headers["Retry-After"]
        site.backend.ready()
        await eventually(lambda: site.service.client.status.is_loaded)
        assert await site.get("/ready") == (200, {"status": "ok"})
        assert await site.get("/ping") == (200, {"status": "ok"})
        assert (await site.post(TEXT, {"prompt": "x"}))[0] == 200


async def test_draining(site: Site) -> None:
    site.backend.script = lambda g: Script(["a", "b"], paced=True)
    running = asyncio.create_task(site.post(TEXT, {"prompt": "x"}))
    await eventually(lambda: site.service.client.num_live == 1)
    site.service.client.status.set_draining()
    status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "draining")
    assert headers["Retry-After"]
    assert (await site.get("/ready"))[1]["status"] == "draining"
    assert (await site.get("/health"))[0] == 200
    await eventually(lambda: site.backend.generates)
    site.backend.go_on()
    assert (await running)[0] == 200


@pytest.fixture
async def stalled_site() -> AsyncIterator[Site]:
    async with running_site(stall_timeout=1.0) as running:
        yield running


async def test_health_sees_a_standstill_only_while_there_is_work(stalled_site: Site) -> None:
    site, status = stalled_site, stalled_site.service.client.status
    site.backend.stats(steps=5, generation_tokens=5)
    await eventually(lambda: status.stats is not None)

    async def health_after_a_while() -> int:
        status.progress_at -= 5
        return (await site.get("/health"))[0]

    assert await health_after_a_while() == 200, "there is nothing to do"
    site.backend.script = lambda g: Script(hold="decode")
    task = asyncio.create_task(site.post(TEXT, {"prompt": "x"}))
    await eventually(lambda: site.service.client.num_live == 1)
    assert (await site.get("/health"))[0] == 200, "work has only begun"
    await eventually(lambda: len(site.backend.generates) == 1 and not site.backend._due)
    await asyncio.sleep(0.05)
    status.progress_at -= 5
    code, body = await site.get("/health")
    assert (code, body["status"]) == (503, "stalled")
    assert "tokenizer" in body["reason"]

    # An engine that idles proves nothing, nor one whose tokens reach nobody.
    site.backend.state(Phase.SERVING, 1.0, loop_count=2)
    site.backend.stats(steps=6, generation_tokens=6)
    await eventually(lambda: status.stats is not None and status.stats.steps == 6)
    assert (await site.get("/health"))[0] == 503
    site.backend.stats(steps=7, generation_tokens=6, prompt_tokens=100)
    await eventually(lambda: status.stats is not None and status.stats.steps == 7)
    assert (await site.get("/health"))[0] == 200, "a long prompt is being computed"
    assert await health_after_a_while() == 503
    site.backend.send("replies", Deltas(req_ids=[], texts=[], counts=[], finished=[]))
    await eventually(lambda: time.monotonic() - status.progress_at < 1)
    assert (await site.get("/health"))[0] == 200

    status.heartbeat_at -= 60
    code, body = await site.get("/health")
    assert (code, body["status"]) == (503, "stalled")
    assert "heartbeat" in body["reason"]
    task.cancel()


async def test_calls_are_work_too(stalled_site: Site) -> None:
    status = stalled_site.service.client.status
    stalled_site.backend.hold_calls = True
    task = asyncio.create_task(stalled_site.post("/tokenize", {"prompt": "x"}))
    await eventually(lambda: len(stalled_site.backend.tokenizes) == 1)
    status.progress_at -= 5
    assert (await stalled_site.get("/health"))[0] == 503
    call_id = stalled_site.backend.tokenizes[0].call_id
    task.cancel()
    await eventually(lambda: not status.has_work)
    assert (await stalled_site.get("/health"))[0] == 200
    await eventually(lambda: stalled_site.backend.aborted == {call_id})


async def test_dead_engine(site: Site) -> None:
    """What the launcher does when a child dies: one error for everybody."""
    site.backend.script = lambda g: Script(hold="decode")
    whole = asyncio.create_task(site.post(TEXT, {"prompt": "x"}))
    async with stream_of(site) as response:
        await eventually(lambda: site.service.client.num_live == 2)
        site.service.client.status.set_dead("the engine process (pid 1) was killed by SIGKILL")
        died = engine_dead("the engine process (pid 1) was killed", has_begun=True)
        site.service.client.fail_all(died)
        events = await read_events(response)
    assert json.loads(events[-1])["error"]["code"] == "engine_dead"
    status, answer = await whole
    assert (status, answer["error"]["code"]) == (500, "engine_dead"), (
        "503 would be repeated elsewhere"
    )
    status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "engine_dead")
    assert headers["x-should-retry"] == "false"
    assert (await site.get("/health"))[1]["status"] == "dead"


async def test_request_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_site(log_requests="on") as site:
        await site.post(TEXT, {"prompt": "secret text"}, headers={"X-Request-Id": "abc"})
        await eventually(lambda: "id=abc" in caplog.text)
        for probe in ("/ready", "/live", "/health", "/ping/", "/metrics"):
            async with site.session.get(site.url + probe) as response:
                assert response.status == 200
        await site.get("/version")
        await eventually(lambda: "GET /version" in caplog.text)
    assert sum("request id=" in r.getMessage() for r in caplog.records) == 2, "probes are not told"
    (line,) = [r.getMessage() for r in caplog.records if "id=abc" in r.getMessage()]
    assert "status=200 prompt_tokens=5 completion_tokens=3" in line
    assert "secret" not in caplog.text


async def test_sync_client_streams_from_another_thread(site: Site) -> None:
    def talk() -> str:
        client = openai.OpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0)
        messages: Any = [{"role": "user", "content": "Hi"}]
        with client:
            stream = client.chat.completions.create(model="tiny", messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(talk) == "Hello world!"
