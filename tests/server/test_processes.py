"""The three real processes on a tiny model: clients, disconnects, drain, kills."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import aiohttp
import openai
import pytest

from server.processes import DEFAULTS
from tests.engine_cpu.tiny_models import make_tiny
from tests.processes import children_of, is_alive
from tests.server.conftest import (
    START_S,
    LiveServer,
    live_server,
    paused,
    read_events,
    spawned,
    wait_for,
)
from tests.waiting import eventually

FLAGS = [
    "--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "64", "--block-size", "16", "--num-blocks", "2000",
    "--served-model-name", "tiny",
]  # fmt: skip
FOREVER = {"max_tokens": 20_000, "ignore_eos": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A context of 32k tokens, so that a request runs for as long as a test wants."""
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", folder, max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def server(model):
    with live_server(model, *FLAGS) as running:
        yield running


def metrics(server: LiveServer) -> dict[str, float]:
    """Values without labels, e.g. {"vllm:num_requests_running": 0.0}."""
    values = {}
    for line in server.get("/metrics")[1].decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            values[name.partition("{")[0]] = float(value)
    return values


GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


def is_idle(server: LiveServer, free_blocks: float) -> bool:
    now = metrics(server)
    return all(now[g] == 0 for g in GAUGES) and now["srv:free_blocks"] == free_blocks


def child_named(server: LiveServer, word: str) -> int:
    for pid in children_of(server.process.pid):
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"):
            return pid
    raise AssertionError(f"no child process {word}")


# --- clients ------------------------------------------------------------------------------------------


def test_official_client(server):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "Say something, please."}]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=20, logprobs=True, top_logprobs=2
    )
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, reasons = "", None, []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert text == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage.completion_tokens == whole.usage.completion_tokens
    completion = client.completions.create(model="tiny", prompt="One two", max_tokens=5, echo=True)
    assert completion.choices[0].text.startswith("One two")


async def test_official_async_client(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answers = await asyncio.gather(
        *(
            client.completions.create(model="tiny", prompt=f"Number {i}", max_tokens=8, seed=i)
            for i in range(8)
        )
    )
    assert len({a.id for a in answers}) == 8
    assert all(a.usage.completion_tokens <= 8 for a in answers)


async def test_streamed_equals_not_streamed_for_many_unicode_texts(server):
    """200 texts over all scripts: random tokens of a byte-level vocabulary make wild UTF-8."""
    prompts = ["Grüße", "中文提示", "🙂🚀", "עברית", "a b", "Ω≈ç√", "日本語テキスト", "नमस्ते"]

    async def both(session: aiohttp.ClientSession, i: int) -> None:
        body = {
            "prompt": prompts[i % len(prompts)],
            "temperature": 1.5,
            "seed": i,
            "max_tokens": 10 + i % 40,
            "ignore_eos": i % 3 > 0,
            "stop": [["e", "\n"], [], ["th", "�", " a"]][i % 3],
            "skip_special_tokens": i % 2 == 0,
        }
        url = f"{server.url}/v1/completions"
        async with session.post(url, json=body) as response:
            whole = await response.json()
            assert response.status == 200, whole
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post(url, json=streaming) as response:
            events = await read_events(response)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(e) for e in events[:-1]]
        pieces = [c["choices"][0] for c in chunks if c["choices"]]
        choice = whole["choices"][0]
        assert "".join(p["text"] for p in pieces) == choice["text"]
        for piece in pieces[:-1]:
            assert "\ufffd" not in piece["text"] or "\ufffd" in choice["text"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[-1]["stop_reason"] == choice["stop_reason"]
        assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]

    async with aiohttp.ClientSession() as session:
        limit = asyncio.Semaphore(8)

        parted: list[int] = []

        async def limited(i: int) -> None:
            async with limit:
                try:
                    await both(session, i)
                except AssertionError:
                    parted.append(i)

        await asyncio.gather(*(limited(i) for i in range(200)))
        assert len(parted) <= 4, "a GPU's last bits depend on the batch, but near ties are rare"
        for i in parted:
            await both(session, i)


def test_compiled_products_are_bounded_unless_the_environment_says_otherwise(server):
    """Else an engine on a CPU grows by a GB with the lengths of prompts (docs/performance.md)."""
    for name, value in DEFAULTS.items():
        environment = Path(f"/proc/{child_named(server, 'engine')}/environ").read_bytes()
        assert f"{name}={os.environ.get(name, value)}".encode() in environment.split(b"\0")


def test_bad_requests_leave_the_server_up(server):
    """A mix of everything wrong at once; each gets a 4xx in the error shape."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    wrong = [
        {"model": "other", "prompt": "a"},
        {"model": "tiny", "prompt": ""},
        {"model": "tiny", "prompt": [5, 512]},
        {"model": "tiny", "prompt": "a", "max_tokens": 40_000},
        {"model": "tiny", "prompt": [7] * 33_000},
        {"model": "tiny", "prompt": "a", "temperature": 3},
        {"model": "tiny", "prompt": "a", "logit_bias": {"512": 1}},
        {"model": "tiny", "prompt": "a", "stop": [""]},
        {"model": "tiny", "prompt": [7] * 100, "max_tokens": 32_000},  # more than the KV pool holds
    ]
    for body in wrong:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(**body)
        assert 400 <= caught.value.status_code < 500, body
        assert caught.value.body["message"], body
    assert (
        client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text
        is not None
    )


# --- disconnects --------------------------------------------------------------------------------------

LONG_PROMPT = [7, 8, 9] * 4000  # 12,000 tokens, 64 a step: a prefill of nearly 200 steps
SCENARIOS = {
    "decode, streamed": {"prompt": "a", "stream": True},
    "decode, whole": {"prompt": "a"},
    "prefill, streamed": {"prompt": LONG_PROMPT, "stream": True},
    "prefill, whole": {"prompt": LONG_PROMPT},
    "four choices": {"prompt": "a", "n": 4, "stream": True},
    "five prompts": {"prompt": ["a", "b", "c", "d", "e"]},
    "queued behind others": {"prompt": ["q"] * 12, "stream": True},
}


@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_client_that_leaves_leaves_nothing_behind(server, name):
    baseline = metrics(server)["srv:free_blocks"]
    assert is_idle(server, baseline)
    async with aiohttp.ClientSession() as session:
        body = {**FOREVER, "max_tokens": 5000, **SCENARIOS[name]}
        request = asyncio.create_task(session.post(f"{server.url}/v1/completions", json=body))
        await eventually(
            lambda: metrics(server)["vllm:num_requests_running"] > 0, 10, "it never started"
        )
        await asyncio.sleep(0.1)
        assert not is_idle(server, baseline)
        if request.done():  # streamed: headers are here
            request.result().close()
        request.cancel()
    await eventually(
        lambda: is_idle(server, baseline), 1.0, "not idle a second after the client left"
    )


async def test_neighbours_of_a_leaving_client_get_their_whole_text(server):
    body = {"prompt": "The harbour", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    async with aiohttp.ClientSession() as session:

        async def text() -> str:
            async with session.post(url, json=body) as response:
                return (await response.json())["choices"][0]["text"]

        undisturbed = await text()
        staying = [asyncio.create_task(text()) for _ in range(2)]
        for _ in range(10):
            leaving = asyncio.create_task(session.post(url, json={**FOREVER, "prompt": "x"}))
            await asyncio.sleep(0.03)
            leaving.cancel()
        assert await asyncio.gather(*staying) == [undisturbed] * 2


# --- ends ---------------------------------------------------------------------------------------------


async def open_stream(session: aiohttp.ClientSession, server: LiveServer, **more):
    body = {**FOREVER, "prompt": "a", "stream": True, **more}
    response = await session.post(f"{server.url}/v1/completions", json=body)
    assert response.status == 200
    await response.content.readuntil(b"\n\n")
    return response


async def test_sigterm_lets_running_streams_finish_and_refuses_new_requests(model):
    with live_server(model, *FLAGS) as server:
        async with aiohttp.ClientSession() as session:
            stream = await open_stream(session, server, max_tokens=1500)
            with paused(child_named(server, "engine")):
                server.process.send_signal(signal.SIGTERM)
                await eventually(lambda: server.get("/ready")[0] == 503, why="/ready stays 200")
                url = f"{server.url}/v1/completions"
                async with session.post(url, json={"prompt": "b"}) as refused:
                    assert refused.status == 503
                    assert (await refused.json())["error"]["code"] == "draining"
                    assert int(refused.headers["Retry-After"]) >= 1
            rest = (await stream.read()).decode()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in rest
        assert server.process.wait(10) == 0


async def test_drain_timeout_ends_streams_with_an_error_event(model):
    with live_server(model, *FLAGS, "--drain-timeout", "0.3") as server:
        async with aiohttp.ClientSession() as session:
            stream = await open_stream(session, server)
            server.process.send_signal(signal.SIGTERM)
            rest = (await stream.read()).decode()
        assert '"error"' in rest.split("data: ")[-1]
        assert "[DONE]" not in rest
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("victim", ["engine", "tokenizer_proc"])
async def test_a_killed_child_ends_each_request_once_and_the_server_with_70(model, victim):
    with live_server(model, *FLAGS) as server:
        children = children_of(server.process.pid)
        async with aiohttp.ClientSession() as session:
            streams = [await open_stream(session, server) for _ in range(3)]
            url = f"{server.url}/v1/completions"
            whole = asyncio.create_task(session.post(url, json={**FOREVER, "prompt": "b"}))
            await asyncio.sleep(0.2)
            os.kill(child_named(server, victim), signal.SIGKILL)
            for stream in streams:
                rest = (await asyncio.wait_for(stream.read(), 10)).decode()
                assert rest.count('"error"') == 1
                assert "[DONE]" not in rest
            answer = await asyncio.wait_for(whole, 10)
            assert answer.status in (500, 503)
            assert (await answer.json())["error"]["type"] == "server_error"
        assert server.process.wait(10) == 70
        assert not any(is_alive(pid) for pid in children)
        log = server.log.read_text()
        assert "SIGKILL" in log
        assert "Traceback" not in log


async def test_a_killed_server_takes_its_children_along(model):
    with live_server(model, *FLAGS) as server:
        children = children_of(server.process.pid)
        assert len(children) == 2
        server.process.kill()
        server.process.wait()
        await eventually(
            lambda: not any(map(is_alive, children)), why="a child outlived the server"
        )


async def test_the_port_answers_while_weights_load(model):
    with spawned(model, *FLAGS) as server:
        started = time.monotonic()
        wait_for(server, "/live", 10)
        assert server.get("/ready")[0] == 503 or time.monotonic() - started > 1
        body = json.loads(server.get("/ready")[1])
        assert body.get("phase") or body["status"] == "ok"
        wait_for(server, "/ready", START_S)


def test_an_idle_server_uses_no_core(server):
    """Not a matter of speed: a loop that spins would burn whole seconds here."""

    def cpu_seconds() -> float:
        total = 0
        for pid in [server.process.pid, *children_of(server.process.pid)]:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    time.sleep(3)
    assert cpu_seconds() - before < 0.5
