"""Structured output, allowed ids and bad words through all three processes."""

import asyncio
import json
import re
import time
from typing import Any

import aiohttp
import pytest

from tests.engine_cpu.tiny_models import VOCAB_SIZE, make_tiny
from tests.server.conftest import LiveServer, live_server, read_events

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "n": {"type": "integer", "maximum": 9999}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny("llama", folder, max_position_embeddings=32_768)
    flags = ["--served-model-name", "tiny", "--dtype", "float32", "--cpu-threads", "1"]
    flags += ["--block-size", "16", "--max-num-batched-tokens", "512"]
    with live_server(model, *flags, "--max-num-seqs", "8", "--num-blocks", "3000") as server:
        yield server


class Client:
    def __init__(self, server: LiveServer, session: aiohttp.ClientSession) -> None:
        self.url, self.session = server.url, session

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def text(self, **body: Any) -> tuple[str, str]:
        """Text and finish_reason of a completion."""
        status, answer = await self.post(TEXT, prompt="A server", **body)
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["text"], choice["finish_reason"]

    async def streamed(self, **body: Any) -> tuple[str, str]:
        body = {"prompt": "A server", "stream": True, **body}
        async with self.session.post(self.url + TEXT, json=body) as response:
            assert response.status == 200, await response.text()
            events = await read_events(response)
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events if event[0] == "{"]
        return "".join(c["text"] for c in choices), choices[-1]["finish_reason"]


@pytest.fixture
async def client(server):
    async with aiohttp.ClientSession() as session:
        yield Client(server, session)


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"guided_regex": r"[a-c]{3,9}é\d"}, lambda t: re.fullmatch(r"[a-c]{3,9}é\d", t)),
    ({"guided_choice": ["yes", "no 😀"]}, lambda t: t in ("yes", "no 😀")),
    (
        {"structured_outputs": {"grammar": 'start: "<" n ">"\nn: %json {"type": "null"}'}},
        lambda t: t == "<null>",
    ),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, lambda t: set(json.loads(t))),
]


@pytest.mark.parametrize(("form", "is_valid"), FORMS)
async def test_texts_have_their_form_streamed_or_not(client, form, is_valid):
    params = {**form, "temperature": 1.0, "max_tokens": 200}
    for seed in range(5):
        text, finish = await client.text(seed=seed, **params)
        assert finish == "stop"
        assert is_valid(text), text
        assert await client.streamed(seed=seed, **params) == (text, finish)


async def test_chat_with_a_response_format(client):
    """Choices differ; the count of tokens is that of the text, as no end-of-sequence token is needed."""
    status, answer = await client.post(
        CHAT,
        messages=[{"role": "user", "content": "JSON, please."}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True},
        },
        n=4,
        temperature=1.5,
        max_tokens=400,
        seed=5,
        logprobs=True,
    )
    assert status == 200, answer
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"kind", "n"}
        tokens = choice["logprobs"]["content"]
        assert "".join(t["token"] for t in tokens) == choice["message"]["content"]
    total = sum(len(c["logprobs"]["content"]) for c in answer["choices"])
    assert answer["usage"]["completion_tokens"] == total


async def test_stop_strings_count_inside_a_form(client):
    text, finish = await client.text(guided_regex="aaab+", stop="ab", max_tokens=50)
    assert (text, finish) == ("aa", "stop")


async def test_allowed_ids_and_bad_words(client):
    """B05's kinds of ids."""
    text, _ = await client.text(allowed_token_ids=[VOCAB_SIZE - 1], max_tokens=3)
    assert text
    for ids, param in (
        ([VOCAB_SIZE], "allowed_token_ids[0]"),
        ([1, -1], "allowed_token_ids[1]"),
        ([], "allowed_token_ids"),
        (["abc"], "allowed_token_ids[0]"),
        ([1.5], "allowed_token_ids[0]"),
    ):
        status, answer = await client.post(TEXT, prompt="A", allowed_token_ids=ids)
        assert (status, answer["error"]["param"]) == (400, param)
    params = {"max_tokens": 40, "temperature": 0}
    free, _ = await client.text(**params)
    word = max(re.findall("[a-z]+", free), key=len)
    bound, _ = await client.text(bad_words=[word], **params)
    assert word not in bound
    assert (await client.text(**params))[0] == free


async def test_a_form_that_compiles_and_gives_up_in_the_text_names_its_field(client):
    """No error of the server's: the schema has too many optional properties in one object."""
    properties = {f"p{i}": {"type": "null"} for i in range(2000)}
    body = {"guided_json": {"type": "object", "properties": properties}, "max_tokens": 50}
    status, answer = await client.post(TEXT, prompt="A", **body)
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, "invalid_schema", "guided_json")
    assert error["message"].startswith(
        "guided_json: the form asked for is too large or too complex"
    )
    async with client.session.post(
        client.url + TEXT, json={"prompt": "A", "stream": True, **body}
    ) as response:
        events = await read_events(response) if response.status == 200 else [await response.text()]
    assert json.loads(events[-1])["error"] == error
    fewer = {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}
    assert (await client.text(guided_json=fewer, max_tokens=50))[0].startswith("{")


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "(?:a|b)?" * 25_000}, "guided_regex"),
    ({"structured_outputs": {"regex": "((a{1,999}){1,999}){1,999}" * 40}}, ""),
    ({"guided_json": {"$ref": "#/$defs/nowhere"}}, "guided_json"),
    ({"guided_json": '{"items":' * 5000 + "{}" + "}" * 5000}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "".join(f'a{i}: "x" a{i + 1}\n' for i in range(9000))}, "guided_grammar"),
    ({"guided_grammar": "start: " + "(" * 50_000}, "guided_grammar"),
]


async def test_hostile_forms_are_refused_and_streams_run_on(client):
    """B19. One that compiles may run; it must not hold up the others for long."""
    body = {"prompt": "A", "stream": True, "ignore_eos": True, "max_tokens": 30_000}
    gaps: list[float] = []

    async def read_stream() -> None:
        last = time.monotonic()
        while True:  # a fast engine ends it early
            async with client.session.post(client.url + TEXT, json=body) as response:
                assert response.status == 200
                async for _ in response.content:
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()

    stream = asyncio.create_task(read_stream())
    try:
        for form, param in HOSTILE:
            assert await client.text(guided_regex="[ab]c", max_tokens=5) in (
                ("ac", "stop"),
                ("bc", "stop"),
            )
            started = time.monotonic()
            status, answer = await client.post(TEXT, prompt="A", max_tokens=3, **form)
            assert time.monotonic() - started < 5
            if param:
                assert (status, answer["error"]["param"]) == (400, param), answer
                assert answer["error"]["code"] in ("invalid_schema", "invalid_value")
        assert not stream.done()
        assert len(gaps) > 100
        assert max(gaps) < 2, "a stream stood still"
    finally:
        stream.cancel()
    assert (await client.text(max_tokens=3))[1] == "length"
