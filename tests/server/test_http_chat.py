"""Chat completions over HTTP, with a scripted backend."""

import json

import openai

from engine.api.messages import ChatPrompt, FinishReason
from tests.server.conftest import Site, read_events
from tests.server.fake_backend import Script, logprob

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_whole_response(site: Site) -> None:
    site.backend.script = lambda g: Script(["Hello", " 😀"], stop_reason="END", cached_tokens=4)
    status, answer = await site.post("/v1/chat/completions", {"messages": MESSAGES})
    assert status == 200
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello 😀", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    (generate,) = site.backend.generates
    assert isinstance(generate.prompt, ChatPrompt)
    assert generate.prompt.messages == MESSAGES
    assert generate.params.max_tokens is None


async def test_stream_order(site: Site) -> None:
    site.backend.script = lambda g: Script(["a", "", "b"], finish=FinishReason.LENGTH)
    body = {
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with site.session.post(site.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache, no-transform"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in response.headers
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [c["choices"][0]["delta"].get("content") for c in chunks[1:-1]]
    assert "".join(t for t in texts if t) == "ab"
    assert "" not in texts
    reasons = [c["choices"][0]["finish_reason"] for c in chunks[:-1]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert reasons[-1] == "length"
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


async def test_official_async_client(site: Site) -> None:
    client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0)
    site.backend.script = lambda g: Script(["x", "y"], delay_s=0.01)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, n=2)
    texts = {0: "", 1: ""}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "xy", 1: "xy"}
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert whole.choices[0].message.content == "xy"
    await client.close()


async def test_logprobs(site: Site) -> None:
    entries = [logprob("a", -0.5, [("a", -0.5), ("b", -9999.0)])]
    site.backend.script = lambda g: Script(["a"], logprobs=entries)
    _, answer = await site.post(
        "/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    )
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    b = {"token": "b", "logprob": -9999.0, "bytes": [98]}
    assert answer["choices"][0]["logprobs"] == {
        "content": [{**a, "top_logprobs": [a, b]}],
        "refusal": None,
    }
    _, answer = await site.post("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True})
    assert answer["choices"][0]["logprobs"]["content"] == [{**a, "top_logprobs": []}]
