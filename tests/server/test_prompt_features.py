"""Prompts and log-probabilities through all three processes: what scoring clients rely on."""

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine_cpu.tiny_models import make_tiny
from tests.server.conftest import LiveServer, live_server

MODEL_LEN = 128
ATOL = 1e-3  # of log-probabilities: processors add in different orders
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The capital of France 🙂 über"
MESSAGES = [{"role": "user", "content": "Say something, please."}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model_dir):
    flags = ["--served-model-name", "tiny", "--max-model-len", str(MODEL_LEN), "--dtype", "float32"]
    flags += ["--max-num-batched-tokens", "8", "--max-num-seqs", "4", "--cpu-threads", "1"]
    flags += ["--block-size", "16", "--num-blocks", "200"]
    with live_server(model_dir, *flags) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return transformers.AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def reference(model_dir):
    """Log-probabilities of the vocabulary at each token of a prompt but the first, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(prompt: list[int]) -> np.ndarray:  # [len(prompt) - 1, vocabulary]
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1).numpy()

    return logprobs


class Client:
    """Bodies in, bodies out; streams are put together to what the whole response would be."""

    def __init__(self, server: LiveServer, session: aiohttp.ClientSession) -> None:
        self.url, self.session = server.url, session

    async def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        async with self.session.post(self.url + path, json=body) as response:
            text = await response.text()
            answer = strict_json(text)
            assert response.status == status, (body, answer)
            return answer

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        async with self.session.post(self.url + path, json={**body, "stream": True}) as response:
            text = await response.text()
            assert response.status == 200, text
        events = [e.removeprefix("data: ") for e in text.strip().split("\n\n")]
        assert events.pop() == "[DONE]"
        return [strict_json(event) for event in events]

    async def streamed(self, path: str, **body: Any) -> tuple[dict[int, dict[str, Any]], Any]:
        """Choices by index, in the form of the whole response, and the usage."""
        choices: dict[int, dict[str, Any]] = {}
        usage = None
        options = {"stream_options": {"include_usage": True}}
        for event in await self.events(path, **body, **options):
            usage = event.get("usage") or usage
            for part in event["choices"]:
                text = part["text"] if "text" in part else part["delta"].get("content") or ""
                choice = choices.setdefault(
                    part["index"], {"text": "", "logprobs": None, "token_ids": []}
                )
                assert "finish_reason" not in choice, "a chunk after the last one"
                choice["text"] += text
                choice["token_ids"] += part.get("token_ids", [])
                if part["logprobs"] is not None:
                    lists = choice["logprobs"] = choice["logprobs"] or {}
                    for name, values in part["logprobs"].items():
                        if isinstance(values, list):
                            lists.setdefault(name, []).extend(values)
                if part["finish_reason"] is not None:
                    choice["finish_reason"] = part["finish_reason"]
                    choice["stop_reason"] = part["stop_reason"]
        return choices, usage


def strict_json(text: str) -> Any:
    """As strict parsers read it: neither NaN nor Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
async def client(server) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession() as session:
        yield Client(server, session)


def close(value: Any) -> Any:
    """The value with its fractions approximate: a cached prefix was computed in other chunks."""
    if isinstance(value, float):
        return pytest.approx(value, abs=ATOL)
    if isinstance(value, dict):
        return {name: close(entry) for name, entry in value.items()}
    return [close(entry) for entry in value] if isinstance(value, list) else value


def check_lists(choice: dict[str, Any], num_top: int) -> dict[str, Any]:
    """The four lists: of equal length, in step with the text, and finite."""
    lists = choice["logprobs"]
    length = len(lists["tokens"])
    assert {len(values) for values in lists.values()} == {length}
    assert "".join(lists["tokens"]) == choice["text"]
    offset = 0
    for token, begin in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert begin == offset
        offset += len(token)
    for value, top in zip(lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert (value is None) == (top is None)
        if value is not None:
            assert -9999.0 <= value <= 0
            assert value in top.values()
            assert max(1, num_top) - 1 <= len(top) <= num_top + 1  # texts may be equal
    return lists


# --- B06: minus infinity ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"allowed_token_ids": [300]},
        {"logit_bias": {"300": 100}, "min_p": 1.0},
    ],
)
async def test_log_probabilities_are_always_numbers(client, fields, stream):
    body = {**fields, "max_tokens": 4, "ignore_eos": True}
    text = {"prompt": PROMPT, "echo": True, "logprobs": 5}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}
    if stream:
        choices, _ = await client.streamed(TEXT, **body, **text)
        check_lists(choices[0], 5)
        choices, _ = await client.streamed(CHAT, **body, **chat)
        entries = choices[0]["logprobs"]["content"]
    else:
        check_lists((await client.post(TEXT, **body, **text))["choices"][0], 5)
        answer = await client.post(CHAT, **body, **chat)
        entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 20
        assert all(math.isfinite(e["logprob"]) for e in (entry, *entry["top_logprobs"]))


# --- B07: scoring a text by echo ----------------------------------------------------------------------


async def prompt_values(client: Client, ids: list[int], num_top: int) -> list[Any]:
    answer = await client.post(TEXT, prompt=ids, max_tokens=1, prompt_logprobs=num_top)
    return answer["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize(
    ("length", "max_tokens"),
    [(1, 0), (1, 1), (2, 0), (33, 0), (33, 1), (MODEL_LEN - 1, 1), (MODEL_LEN, 0)],
)
async def test_echo_scores_the_prompt(client, reference, tokenizer, length, max_tokens):
    ids = np.random.default_rng(length).integers(3, 259, length).tolist()
    body = {
        "prompt": ids,
        "echo": True,
        "logprobs": 10,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    answer = await client.post(TEXT, **body)
    [choice] = answer["choices"]
    lists = check_lists(choice, 10)
    assert len(lists["tokens"]) == length + max_tokens
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["prompt_tokens"] == length
    assert choice["text"].startswith(tokenizer.decode(ids))

    expected = reference(ids) if length > 1 else np.zeros((0, 1))
    found = lists["token_logprobs"][1:length]
    np.testing.assert_allclose(
        found, [row[i] for row, i in zip(expected, ids[1:], strict=True)], atol=ATOL
    )
    if length < MODEL_LEN:
        by_id = (await prompt_values(client, ids, 10))[1:]
        for value, entries, token in zip(found, by_id, ids[1:], strict=True):
            assert entries[str(token)]["logprob"] == close(value)
    choices, usage = await client.streamed(TEXT, **body)
    assert choices[0]["text"] == choice["text"]
    assert choices[0]["logprobs"] == close(lists)
    assert choices[0]["token_ids"] == choice["token_ids"]
    assert usage["completion_tokens"] == max_tokens


async def test_the_first_chunk_of_a_stream_is_the_prompt(client):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 3, "ignore_eos": True}
    for logprobs in (None, 2):
        first, *others = await client.events(TEXT, **body, logprobs=logprobs)
        assert first["choices"][0]["text"] == PROMPT
        if logprobs is not None:
            assert "".join(first["choices"][0]["logprobs"]["tokens"]) == PROMPT
        assert all(not e["choices"][0]["text"].startswith(PROMPT) for e in others)


async def test_log_likelihood_as_evaluation_harnesses_take_it(client, reference):
    """Context and continuation as one prompt; the sum over the continuation, and is it greedy?"""
    rng = np.random.default_rng(7)
    contexts = [rng.integers(3, 512, 5 + 7 * i).tolist() for i in range(4)]
    continuations = [rng.integers(3, 512, 3).tolist() for _ in range(3)]
    row = reference([*contexts[3], 3])[-1]
    continuations.append([int(row.argmax())])  # this one is greedy
    prompts = [c + t for c, t in zip(contexts, continuations, strict=True)]
    for max_tokens in (0, 1):
        answer = await client.post(
            TEXT, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
        )
        for choice, context, prompt in zip(answer["choices"], contexts, prompts, strict=True):
            end = len(prompt)
            values = choice["logprobs"]["token_logprobs"][len(context) : end]
            tops = choice["logprobs"]["top_logprobs"][len(context) : end]
            rows, tokens = reference(prompt)[len(context) - 1 :], prompt[len(context) :]
            expected = sum(float(r[t]) for r, t in zip(rows, tokens, strict=True))
            assert sum(values) == pytest.approx(expected, abs=ATOL)
            is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
            assert is_greedy == all(r.argmax() == t for r, t in zip(rows, tokens, strict=True))
        assert is_greedy
        assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)


# --- B13: prompts about as long as the context --------------------------------------------------------


async def test_lengths_at_the_edge(client):
    prompts = {length: [7] * length for length in (MODEL_LEN - 1, MODEL_LEN, MODEL_LEN + 1)}
    last = prompts[MODEL_LEN - 1]
    for fields in ({}, {"max_tokens": 1}):
        answer = await client.post(TEXT, prompt=last, ignore_eos=True, **fields)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 1
    await client.post(TEXT, 400, prompt=last, max_tokens=2)
    for length in (MODEL_LEN, MODEL_LEN + 1):
        for fields in ({}, {"max_tokens": 1}, {"max_tokens": 1, "echo": True}):
            answer = await client.post(TEXT, 400, prompt=prompts[length], **fields)
            assert answer["error"]["code"] == "context_length_exceeded"
            assert str(length) in answer["error"]["message"]
            assert str(MODEL_LEN) in answer["error"]["message"]
    alone = {"echo": True, "max_tokens": 0}
    for length in (MODEL_LEN - 1, MODEL_LEN):
        answer = await client.post(TEXT, prompt=prompts[length], **alone)
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["choices"][0]["finish_reason"] == "length"
    answer = await client.post(TEXT, 400, prompt=prompts[MODEL_LEN + 1], **alone)
    assert "shorten the prompt by at least 1 token" in answer["error"]["message"]


# --- B15: prompt_logprobs, again and again ------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
async def test_prompt_logprobs_come_complete_each_time(client, reference, tokenizer, length):
    ids = np.random.default_rng(length).integers(3, 512, length).tolist()
    first, second = [await prompt_values(client, ids, 1) for _ in range(2)]
    assert first == second
    assert len(first) == length
    assert first[0] is None
    expected = reference(ids) if length > 1 else []
    for row, entries, token in zip(expected, first[1:], ids[1:], strict=True):
        entry = entries[str(token)]
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=ATOL)
        above = [int((row > row[token] + margin).sum()) for margin in (ATOL, -ATOL)]
        assert above[0] < entry["rank"] <= above[1]
        assert len(entries) == (1 if entry["rank"] == 1 else 2)
        [best] = [e for e in entries.values() if e["rank"] == 1]
        assert best["logprob"] == pytest.approx(float(row.max()), abs=ATOL)
        text = tokenizer.decode([token])
        assert entry["decoded_token"] == text or entry["decoded_token"].startswith("bytes:")


async def test_prompt_logprobs_of_a_chat(client, reference, tokenizer):
    answer = await client.post(
        CHAT, messages=MESSAGES, prompt_logprobs=0, max_tokens=2, n=2, return_token_ids=True
    )
    ids = answer["prompt_token_ids"]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == text
    first, *others = answer["prompt_logprobs"]
    assert first is None
    values = [
        entries[str(token)]["logprob"] for entries, token in zip(others, ids[1:], strict=True)
    ]
    rows = reference(ids)
    np.testing.assert_allclose(
        values, [r[t] for r, t in zip(rows, ids[1:], strict=True)], atol=ATOL
    )
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [2, 2]
    assert (
        sum(len(c["token_ids"]) for c in answer["choices"])
        == (answer["usage"]["completion_tokens"])
    )


async def test_echo_and_prompt_logprobs_keep_their_own_numbers_of_alternatives(client):
    body = {"prompt": [9, 8, 7, 6], "max_tokens": 1, "ignore_eos": True}
    for echo_k, prompt_k in ((5, 2), (2, 5)):
        answer = await client.post(
            TEXT, **body, echo=True, logprobs=echo_k, prompt_logprobs=prompt_k, n=2, temperature=1
        )
        for choice in answer["choices"]:
            check_lists(choice, echo_k)
            for entries in choice["prompt_logprobs"][1:]:
                assert len(entries) in (prompt_k, prompt_k + 1)


# --- B20: which logprobs fields go together -----------------------------------------------------------


async def test_top_logprobs_need_logprobs(client):
    body = {"messages": MESSAGES, "max_tokens": 2, "ignore_eos": True}
    for fields, length in (
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ):
        answer = await client.post(CHAT, **body, **fields)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [length, length]
    for fields in (
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"logprobs": False, "top_logprobs": 3},
        {"top_logprobs": 3},
        {"logprobs": True, "top_logprobs": "3"},
    ):
        answer = await client.post(CHAT, 400, **body, **fields)
        assert answer["error"]["param"] == "top_logprobs"


# --- candidates, ids, truncation ----------------------------------------------------------------------


async def test_best_of_returns_the_likeliest(client):
    body = {
        "prompt": ["One two", "Three"],
        "temperature": 1.5,
        "seed": 4,
        "max_tokens": 6,
        "ignore_eos": True,
    }
    everyone = await client.post(TEXT, **body, n=5, logprobs=0)
    answer = await client.post(TEXT, **body, n=2, best_of=5)
    assert answer["usage"] == everyone["usage"] | {
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]
    }
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    for prompt in range(2):
        candidates = everyone["choices"][5 * prompt : 5 * prompt + 5]
        candidates.sort(key=lambda c: -sum(c["logprobs"]["token_logprobs"]))
        found = answer["choices"][2 * prompt : 2 * prompt + 2]
        assert [c["text"] for c in found] == [c["text"] for c in candidates[:2]]


async def test_choices_that_cannot_differ_are_equal(client):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    one = await client.post(TEXT, **body)
    answer = await client.post(TEXT, **body, n=4, logprobs=1, return_token_ids=True)
    assert {c["text"] for c in answer["choices"]} == {one["choices"][0]["text"]}
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 24
    assert all(c["logprobs"] == answer["choices"][0]["logprobs"] for c in answer["choices"])
    choices, usage = await client.streamed(TEXT, **body, n=4)
    assert [choices[i]["text"] for i in range(4)] == [one["choices"][0]["text"]] * 4
    assert usage["completion_tokens"] == 24
    best = await client.post(TEXT, **body, n=2, best_of=4)
    assert best["usage"]["completion_tokens"] == 12


async def test_token_ids_and_names_by_id(client, tokenizer):
    body = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, "seed": 3, "logprobs": 2}
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = await client.post(TEXT, **body, **fields)
    [choice] = answer["choices"]
    assert choice["prompt_token_ids"] == tokenizer.encode(PROMPT)
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 5
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    names = {name for top in choice["logprobs"]["top_logprobs"] for name in top}
    assert all(name.startswith("token_id:") for name in names)
    chunks = await client.events(TEXT, **body, **fields)
    told = [
        c["choices"][0]["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c["choices"][0]
    ]
    assert told == [choice["prompt_token_ids"]]
    assert [i for c in chunks for i in c["choices"][0]["token_ids"]] == choice["token_ids"]
    plain = await client.post(TEXT, **body)
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["text"] == choice["text"]

    chat = {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, "seed": 3, "n": 2}
    answer = await client.post(CHAT, **chat, **fields, logprobs=True, top_logprobs=1)
    events = await client.events(CHAT, **chat, **fields)
    assert [e["prompt_token_ids"] for e in events if "prompt_token_ids" in e] == [
        answer["prompt_token_ids"]
    ]
    for choice in answer["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert [i for p in parts for i in p.get("token_ids", [])] == choice["token_ids"]
        named = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert named == [f"token_id:{i}" for i in choice["token_ids"]]


async def test_truncation_keeps_the_end(client, tokenizer):
    ids = list(range(3, 203))
    body = {"temperature": 0, "max_tokens": 4, "echo": True, "ignore_eos": True}
    await client.post(TEXT, 400, prompt=ids, **body)
    for keep, left in ((20, 20), (-1, MODEL_LEN - 4)):
        answer = await client.post(TEXT, prompt=ids, **body, truncate_prompt_tokens=keep)
        assert answer["usage"]["prompt_tokens"] == left
        same = await client.post(TEXT, prompt=ids[-left:], **body)
        assert answer["choices"][0]["text"] == same["choices"][0]["text"]
    answer = await client.post(
        CHAT,
        messages=[{"role": "user", "content": "word " * 300}],
        truncate_prompt_tokens=-1,
        max_tokens=3,
        ignore_eos=True,
    )
    assert answer["usage"]["prompt_tokens"] == MODEL_LEN - 3


# --- B12, and in general: streamed equals not streamed ------------------------------------------------

BODIES = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(
            [
                "Grüße",
                "🙂🚀 a",
                "One two",
                [5, 300, 0xA3, 1, 7],
                ["a b", "日本語"],
                [[9] * 17, [2, 4]],
            ]
        ),
        "temperature": st.sampled_from([0, 1.0, 1.8]),
        "seed": st.integers(0, 50),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(0, 24),
        "echo": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 3]),
        "stop": st.sampled_from([[], ["e", "\n"], ["th", "\ufffd", " a"]]),
        "include_stop_str_in_output": st.booleans(),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
    }
)


async def test_streamed_equals_not_streamed(client):
    examples: list[dict[str, Any]] = []

    @settings(
        max_examples=50,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(BODIES)
    def collect(body: dict[str, Any]) -> None:
        if body["max_tokens"] == 0:
            body = {**body, "echo": True}
        examples.append(body)

    collect()
    for body in examples:
        whole = await client.post(TEXT, **body)
        choices, usage = await client.streamed(TEXT, **body)
        assert sorted(choices) == [choice["index"] for choice in whole["choices"]]
        for choice in whole["choices"]:
            parts = choices[choice["index"]]
            for name in ("text", "logprobs", "finish_reason", "stop_reason"):
                assert parts[name] == close(choice[name]), (body, name)
            assert parts["token_ids"] == choice.get("token_ids", [])
            if body["logprobs"] is not None:
                check_lists(choice, body["logprobs"])
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[count] == whole["usage"][count]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        if body["return_token_ids"]:
            counted = sum(len(choice["token_ids"]) for choice in whole["choices"])
            assert counted == usage["completion_tokens"]


async def test_streamed_chats_equal_not_streamed(client):
    for seed in range(12):
        body = {
            "messages": MESSAGES,
            "temperature": 1.7,
            "seed": seed,
            "n": 1 + seed % 3,
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": seed % 4,
            "stop": [[], ["e"], [" a", "\ufffd"]][seed % 3],
            "ignore_eos": seed % 2 == 0,
        }
        whole = await client.post(CHAT, **body)
        choices, usage = await client.streamed(CHAT, **body)
        for choice in whole["choices"]:
            parts = choices[choice["index"]]
            assert parts["text"] == choice["message"]["content"]
            found = (parts["logprobs"] or {"content": []})["content"]
            assert found == close(choice["logprobs"]["content"])
            assert parts["finish_reason"] == choice["finish_reason"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


async def test_official_client_types(server):
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    answer = await client.completions.create(
        model="tiny", prompt="One two", max_tokens=0, echo=True, logprobs=2
    )
    assert answer.choices[0].text == "One two"
    assert answer.choices[0].logprobs is not None
    assert "".join(answer.choices[0].logprobs.tokens or []) == "One two"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    await client.close()
