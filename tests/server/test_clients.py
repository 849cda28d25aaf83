"""The official client's helpers against the three real processes: streams, parsing, errors, lists."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.engine_cpu.tiny_models import make_tiny
from tests.server.conftest import live_server

FLAGS = [
    "--dtype", "float32", "--cpu-threads", "1", "--max-num-seqs", "4", "--num-blocks", "800",
    "--max-num-batched-tokens", "512", "--served-model-name", "tiny", "--tool-call-parser", "hermes",
]  # fmt: skip
USER = [{"role": "user", "content": "Where is it warm?"}]


class City(BaseModel):
    name: Literal["Rome", "Paris"]
    warm: bool


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with live_server(
        make_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048), *FLAGS
    ) as running:
        yield running


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_parse_returns_the_pydantic_model(client) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=USER, response_format=City, max_tokens=200, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    assert answer.choices[0].message.refusal is None


def test_parse_returns_the_arguments_of_a_tool(client) -> None:
    answer = client.chat.completions.parse(
        model="tiny",
        messages=USER,
        tools=[openai.pydantic_function_tool(City, name="city")],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=400,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, City)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_the_stream_helper_accumulates_what_the_whole_answer_is(client) -> None:
    body = {"model": "tiny", "messages": USER, "max_tokens": 30, "seed": 3, "logprobs": True}
    with client.chat.completions.stream(**body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**body)
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == whole.choices[0].message.content
    found, wanted = (one.choices[0].logprobs.content for one in (final, whole))
    assert [entry.token for entry in found] == [entry.token for entry in wanted]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in wanted], abs=1e-3)


def test_the_stream_helper_parses_structured_answers(client) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=USER, response_format=City, max_tokens=200, seed=1
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


def test_raw_responses_show_the_request_id(client) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="a", max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    assert raw.parse()._request_id == "mine"


@pytest.mark.parametrize(
    ("kind", "body", "code", "param"),
    [
        (openai.NotFoundError, {"model": "x"}, "model_not_found", "model"),
        (openai.BadRequestError, {"max_tokens": 10**6}, "context_length_exceeded", None),
        (openai.BadRequestError, {"temperature": 9}, "invalid_value", "temperature"),
    ],
)
def test_errors_are_the_client_s_classes(client, kind, body, code, param) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": USER, **body})
    assert caught.value.code == code
    if code == "context_length_exceeded":  # by these words LiteLLM knows it
        assert "this model's maximum context length is" in caught.value.message
    assert caught.value.type in ("invalid_request_error", "not_found_error")
    if param:
        assert caught.value.param == param


def test_models_are_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "sluice"


async def test_many_async_streams(server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def text(seed: int) -> str:
            stream = await client.chat.completions.create(
                model="tiny", messages=USER, max_tokens=20, seed=seed, stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            pieces = [chunk async for chunk in stream]
            assert pieces[-1].usage.completion_tokens <= 20
            return "".join(c.choices[0].delta.content or "" for c in pieces if c.choices)

        together = await asyncio.gather(*(text(seed) for seed in range(8)))
        assert together == [await text(seed) for seed in range(8)]


def test_scoring_as_evaluation_harnesses_do(client) -> None:
    """Log-likelihood of a continuation by echo; is it the greedy one? Batches keep their order."""
    context, texts = "The capital of France is", [" Paris", " Rome", " a prompt"]
    answer = client.completions.create(
        model="tiny", prompt=[context + t for t in texts], max_tokens=0, echo=True, logprobs=1,
        temperature=0, seed=1234,
    )  # fmt: skip
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.text == context + text
        lists = choice.logprobs
        first = next(i for i, at in enumerate(lists.text_offset) if at >= len(context))
        assert all(value < 0 for value in lists.token_logprobs[first:])
        best = [max(top, key=top.get) for top in lists.top_logprobs[first:]]
        assert len(best) == len(lists.tokens) - first > 0
    one = client.completions.create(
        model="tiny", prompt=context + texts[1], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    scored = answer.choices[1].logprobs.token_logprobs
    assert one.choices[0].logprobs.token_logprobs[1 : len(scored)] == pytest.approx(
        scored[1:], abs=1e-3
    )


def test_fields_beyond_openai_go_through_extra_body(client) -> None:
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=8, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")
    answer = client.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=3,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert len(json.loads(answer.model_dump_json())["choices"][0]["token_ids"]) == 3
