"""Text completions over HTTP, with a scripted backend."""

import json

import openai
import pytest

from engine.api.messages import Generate, TextPrompt, TokenPrompt
from tests.server.conftest import Site, read_events
from tests.server.fake_backend import Script, logprob


async def test_defaults(site: Site) -> None:
    status, answer = await site.post("/v1/completions", {"prompt": "Once"})
    assert status == 200
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "Hello world!",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    (generate,) = site.backend.generates
    assert generate.prompt == TextPrompt(text="Once", add_special_tokens=True)
    assert generate.params.max_tokens == 16


def by_prompt(generate: Generate) -> Script:
    assert isinstance(generate.prompt, TextPrompt)
    text = generate.prompt.text
    return Script([text.upper(), "!"], prompt_tokens=len(text), delay_s=0.005)


async def test_batch_with_n_is_complete_and_ordered(site: Site) -> None:
    site.backend.script = by_prompt
    _, answer = await site.post("/v1/completions", {"prompt": ["a", "bb", "ccc"], "n": 2})
    texts = [(c["index"], c["text"]) for c in answer["choices"]]
    assert texts == [(0, "A!"), (1, "A!"), (2, "BB!"), (3, "BB!"), (4, "CCC!"), (5, "CCC!")]
    assert answer["usage"]["prompt_tokens"] == 6  # each prompt once, whatever n is
    assert answer["usage"]["completion_tokens"] == 12


async def test_batch_stream(site: Site) -> None:
    site.backend.script = by_prompt
    body = {
        "prompt": ["a", "bb"],
        "n": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with site.session.post(site.url + "/v1/completions", json=body) as response:
        events = await read_events(response)
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 3 + 8
    texts = dict.fromkeys(range(4), "")
    ends = dict.fromkeys(range(4), 0)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert ends[choice["index"]] == 0, "nothing follows the end of a choice"
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
        assert chunk["usage"]["total_tokens"] >= chunk["usage"]["prompt_tokens"]
    assert texts == {0: "A!", 1: "A!", 2: "BB!", 3: "BB!"}
    assert set(ends.values()) == {1}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2, 3], [[1, 2, 3]]), ([[1], [2, 999]], [[1], [2, 999]]), ([5.0], [[5]])],
)
async def test_token_prompts(site: Site, prompt: object, expected: list[list[int]]) -> None:
    status, answer = await site.post("/v1/completions", {"prompt": prompt})
    assert status == 200
    got = []
    for generate in site.backend.generates:
        assert isinstance(generate.prompt, TokenPrompt)
        got.append(list(memoryview(generate.prompt.token_ids).cast("i")))
    assert got == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_echo(site: Site) -> None:
    site.backend.script = lambda g: Script([" there"], prompt_text="Hello")
    _, answer = await site.post("/v1/completions", {"prompt": "Hello", "echo": True})
    assert answer["choices"][0]["text"] == "Hello there"
    body = {"prompt": "Hello", "echo": True, "stream": True}
    async with site.session.post(site.url + "/v1/completions", json=body) as response:
        events = await read_events(response)
    first = json.loads(events[0])["choices"][0]
    assert first["text"] == "Hello"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == "Hello there"


async def test_logprobs_lists(site: Site) -> None:
    """Equal lengths; the sampled token is added; of two equal texts the likelier one counts."""
    entries = [
        logprob("é", -1.0, [("x", -0.1), ("x", -3.0)]),
        logprob("b", -9999.0, [("b", -9999.0)]),
    ]
    site.backend.script = lambda g: Script(["é", "b"], logprobs=entries)
    _, answer = await site.post("/v1/completions", {"prompt": "p", "logprobs": 2})
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["é", "b"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"x": -0.1, "é": -1.0}, {"b": -9999.0}],
        "text_offset": [0, 1],
    }


async def test_streamed_logprobs_equal_whole_ones(site: Site) -> None:
    entries = [logprob("a", -1.0, []), logprob("é", -2.0, []), logprob("c", -3.0, [])]
    # The second token's text is held back: its log-probability comes with the third's text.
    site.backend.script = lambda g: Script(["a", "", "éc"], logprobs=entries)
    body = {"prompt": "p", "logprobs": 0}
    _, whole = await site.post("/v1/completions", body)
    request = site.session.post(site.url + "/v1/completions", json={**body, "stream": True})
    async with request as response:
        events = await read_events(response)
    merged: dict[str, list[object]] = {}
    for event in events[:-1]:
        choice = json.loads(event)["choices"][0]
        for name, values in choice["logprobs"].items():
            merged.setdefault(name, []).extend(values)
    assert merged == whole["choices"][0]["logprobs"]
    assert merged["text_offset"] == [0, 1, 2]


async def test_official_client(site: Site) -> None:
    client = openai.AsyncOpenAI(base_url=site.url + "/v1", api_key="none", max_retries=0)
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == "Hello world!"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "'tiny'" in str(caught.value)
    models = await client.models.list()
    assert [m.id for m in models.data] == ["tiny"]
    await client.close()


async def test_tokenize_and_detokenize(site: Site) -> None:
    status, answer = await site.post("/tokenize", {"prompt": "abc", "return_token_strs": True})
    assert status == 200
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [0, 1, 2],
        "token_strs": ["a", "b", "c"],
    }
    _, answer = await site.post("/v1/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert answer["count"] == 4
    _, answer = await site.post("/detokenize", {"tokens": [0, 1]})
    assert answer == {"prompt": "ab"}
    site.backend.call_error = (400, "invalid_token_id", "token 7 does not exist")
    status, answer = await site.post("/v1/detokenize", {"tokens": [7]})
    assert (status, answer["error"]["code"]) == (400, "invalid_token_id")
    status, answer = await site.post("/tokenize", {})
    assert (status, answer["error"]["param"]) == (400, "prompt")
