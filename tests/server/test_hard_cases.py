"""Failures known from other servers, through the three real processes: preemption, min_tokens, biases."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.engine_cpu.tiny_models import VOCAB_SIZE, make_tiny
from tests.server.conftest import LiveServer, live_server

FLAGS = [
    "--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "8", "--block-size", "16",
    "--num-blocks", "28", "--admission", "greedy", "--max-num-batched-tokens", "512",
    "--served-model-name", "tiny",
]  # fmt: skip
SEVERAL_EOS = [2, 5, 9]
STRICT_TEMPLATE = """
{%- for m in messages -%}
  {%- if m.role == 'system' and not loop.first -%}
    {{ raise_exception('The system message comes first.') }}
  {%- elif m.role == 'assistant' and loop.first -%}
    {{ raise_exception('A conversation begins with the user.') }}
  {%- endif -%}
[{{ m.role }}] {{ m.content }}
{% endfor -%}
{%- if reasoning_effort and reasoning_effort not in ('low', 'high') -%}
  {{ raise_exception('Unknown effort: ' ~ reasoning_effort) }}
{%- endif -%}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A pool in which one long request fits well, and eight do not; a model with several EOS ids."""
    folder = make_tiny("llama", tmp_path_factory.mktemp("tiny"))
    Path(folder, "generation_config.json").write_text(json.dumps({"eos_token_id": SEVERAL_EOS}))
    template = Path(folder, "strict.jinja")
    template.write_text(STRICT_TEMPLATE)
    with live_server(folder, *FLAGS, "--chat-template", str(template)) as running:
        yield running


def preemptions(server: LiveServer) -> float:
    lines = server.get("/metrics")[1].decode().splitlines()
    return float(next(x for x in lines if x.startswith("vllm:num_preemptions_total")).split()[-1])


async def post(server: LiveServer, session: aiohttp.ClientSession, body: Any) -> Any:
    async with session.post(server.url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


async def streamed(server: LiveServer, session: aiohttp.ClientSession, body: Any) -> Any:
    """Text, end and number of tokens, put together from chunks."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(server.url + "/v1/completions", json=body) as response:
        assert response.status == 200
        events = [e.removeprefix("data: ") for e in (await response.text()).split("\n\n") if e]
    assert events.pop() == "[DONE]"
    *chunks, usage = map(json.loads, events)
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert len(ends) == 1
    text = "".join(c["choices"][0]["text"] for c in chunks)
    return text, ends[0], usage["usage"]["completion_tokens"]


async def test_preempted_streams_are_complete_and_the_same(server) -> None:
    """B16: penalties, seeds and stop strings survive being preempted, and so does each chunk."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"seed": 3, "stop": ["zzz", "qqq"]},
    ]
    common = {"max_tokens": 120, "ignore_eos": True}
    bodies = [{"prompt": f"Request {i}", **kinds[i % 4], **common} for i in range(8)]
    async with aiohttp.ClientSession() as session:
        alone = [await streamed(server, session, body) for body in bodies]
        before = preemptions(server)
        together = await asyncio.gather(*(streamed(server, session, body) for body in bodies))
    assert preemptions(server) > before
    assert together == alone
    assert all(count == 120 for _, reason, count in together if reason == "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["\n", " "]},
        {"logit_bias": {str(token): 100 for token in SEVERAL_EOS}},
        {"stop_token_ids": list(range(3, 131))},
        {"stop": ["e"], "logit_bias": {"2": 100}, "stop_token_ids": [7]},
    ],
)
async def test_nothing_ends_a_text_before_min_tokens(server, fields) -> None:
    """B08: neither stop strings nor stop ids nor any of several EOS ids, biased or not."""
    async with aiohttp.ClientSession() as session:
        for seed in range(3):
            body = {"prompt": "a", "seed": seed, "min_tokens": 20, "max_tokens": 40, **fields}
            _, answer = await post(server, session, body)
            assert 20 <= answer["usage"]["completion_tokens"] <= 40
            _, _, count = await streamed(server, session, body)
            assert count == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("bias", "status"),
    [
        ({str(VOCAB_SIZE): 1}, 400),
        ({str(VOCAB_SIZE - 1): 1}, 200),
        ({"-1": 1}, 400),
        ({"abc": 1}, 400),
        ({"1.5": 1}, 400),
        ({"5": 101}, 400),
        ({"5": "NaN"}, 400),
        ({"²": 1}, 400),
        ({" 5": 1}, 400),
        ({"5": 100}, 200),
    ],
)
async def test_biases_of_tokens_that_do_not_exist_are_refused(server, bias, status) -> None:
    """B05: and the next request works."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "a", "max_tokens": 2, "logit_bias": bias}
        got, answer = await post(server, session, body)
        assert got == status
        if status == 400:
            assert answer["error"]["param"] == "logit_bias"
        assert (await post(server, session, {"prompt": "a", "max_tokens": 1}))[0] == 200


async def test_text_cut_inside_a_character_ends_the_same_way_streamed_or_not(server) -> None:
    """B03: bytes of an emoji one by one; only the end may show a replacement character."""
    async with aiohttp.ClientSession() as session:
        async with session.post(
            server.url + "/tokenize", json={"prompt": "👩‍👩‍👧🇩🇪🙂"}
        ) as response:
            ids = (await response.json())["tokens"]
        for cut in range(1, min(12, len(ids))):
            body = {
                "prompt": ids[:cut],
                "max_tokens": 3,
                "echo": True,
                "ignore_eos": True,
                "seed": 1,
            }
            _, answer = await post(server, session, body)
            text, reason, _ = await streamed(server, session, body)
            assert text == answer["choices"][0]["text"]
            assert reason == answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("roles", "fields", "code", "words"),
    [
        (["user", "system"], {}, "invalid_messages", "The system message comes first."),
        (["system", "system", "user"], {}, "invalid_messages", "The system message comes first."),
        (["assistant"], {}, "invalid_messages", "A conversation begins with the user."),
        (["user"], {"reasoning_effort": "medium"}, "invalid_messages", "Unknown effort: medium"),
        (
            ["user"],
            {"chat_template_kwargs": {"reasoning_effort": "huge"}},
            "invalid_messages",
            "Unknown effort: huge",
        ),
        ([], {}, None, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_chat_template_refuses_is_400_in_its_own_words(
    server, roles, fields, code, words, stream
) -> None:
    """B11: not a 500, and no event of a stream that has begun; the next conversation is answered."""
    url = server.url + "/v1/chat/completions"
    good = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    bad = {
        "messages": [{"role": role, "content": "x"} for role in roles],
        "stream": stream,
        **fields,
    }
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=bad) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "messages")
            assert code is None or error["code"] == code
            assert words in error["message"]
        async with session.post(url, json=good) as response:
            assert response.status == 200
