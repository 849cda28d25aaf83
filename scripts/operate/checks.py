"""The checks of scripts/selftest.py, each a coroutine that returns what it saw or raises.

They ask for greedy completions of a fixed length, which any model can give, and compare answers with each
other rather than with a text that only one model would write.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from scripts.operate.probe_client import CheckFailed, CheckSkipped, Client, expect

Check = Callable[[Client], Awaitable[str]]

PROMPT = "The five largest cities of the world, with their populations, are"
LONG_PROMPT = PROMPT + " one two three four five six seven eight nine ten" * 20
FREED_WITHIN_S = 10.0
CONCURRENT = 8


async def models(client: Client) -> str:
    status, body = await client.get("/v1/models")
    expect(status == 200, f"status {status}")
    names = [entry["id"] for entry in json.loads(body)["data"]]
    expect(client.model in names, f"{client.model} is not among {names}")
    status, _ = await client.get(f"/v1/models/{client.model}")
    expect(status == 200, f"/v1/models/{client.model} answered {status}")
    return ", ".join(names)


async def completion(client: Client) -> str:
    answer = await client.complete(PROMPT, max_tokens=12)
    check_usage(answer, 12)
    expect(answer["object"] == "text_completion", f"object is {answer['object']!r}")
    expect(answer["choices"][0]["finish_reason"] == "length", "finish_reason is not length")
    return repr(answer["choices"][0]["text"][:40])


async def chat(client: Client) -> str:
    answer = await client.chat("Say hello.")
    message = answer["choices"][0]["message"]
    expect(message["role"] == "assistant", f"role is {message['role']!r}")
    check_usage(answer)
    return repr((message.get("content") or "")[:40])


def check_usage(answer: dict[str, Any], completion_tokens: int | None = None) -> None:
    usage = answer["usage"]
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    expect(usage["total_tokens"] == total and usage["prompt_tokens"] > 0, f"usage is {usage}")
    if completion_tokens is not None:
        expect(usage["completion_tokens"] == completion_tokens, f"usage is {usage}")


async def greedy_repeats(client: Client) -> str:
    first = await client.complete(PROMPT, max_tokens=24)
    second = await client.complete(PROMPT, max_tokens=24)
    expect(text(first) == text(second), f"{text(first)!r}, then {text(second)!r}")
    return "two equal answers"


async def streaming(client: Client) -> str:
    """Completions and, if the model has a template, chats: the pieces make the whole."""
    whole = await client.complete(PROMPT, max_tokens=24)
    fields = {"temperature": 0, "max_tokens": 24, "stream_options": {"include_usage": True}}
    pieces, usage = [], None
    async for chunk in client.events("/v1/completions", prompt=PROMPT, ignore_eos=True, **fields):
        pieces += [choice["text"] for choice in chunk["choices"]]
        usage = chunk.get("usage") or usage
    expect("".join(pieces) == text(whole), f"{''.join(pieces)!r} streamed, {text(whole)!r} whole")
    expect(usage is not None, "no usage although it was asked for")
    assert usage is not None
    expect(usage["completion_tokens"] == 24, f"usage is {usage}")
    try:
        answer = await client.chat("Name a colour.")
    except CheckSkipped:
        return f"{len(pieces)} pieces"
    messages = [{"role": "user", "content": "Name a colour."}]
    joined = ""
    async for chunk in client.events(
        "/v1/chat/completions", messages=messages, temperature=0, max_tokens=16
    ):
        for choice in chunk["choices"]:
            joined += choice["delta"].get("content") or ""
    content = answer["choices"][0]["message"].get("content") or ""
    expect(joined == content, f"{joined!r} streamed, {content!r} whole")
    return f"{len(pieces)} pieces, and a chat"


async def seeds(client: Client) -> str:
    async def sample(seed: int) -> str:
        return text(await client.complete(PROMPT, temperature=1.0, seed=seed, max_tokens=16))

    first = [await sample(seed) for seed in (1, 2, 3)]
    again = [await sample(seed) for seed in (1, 2, 3)]
    expect(first == again, "the same seed gave another text")
    expect(len(set(first)) > 1, "three seeds gave one text")
    try:
        choices = (await client.complete(PROMPT, temperature=1.0, seed=1, n=3))["choices"]
    except CheckSkipped as reason:
        return f"three seeds, twice; not n=3, {reason}"
    expect([c["index"] for c in choices] == [0, 1, 2], "n=3 did not give choices 0, 1, 2")
    expect(choices[0]["text"] == first[0], "choice 0 is not the one of n=1 with this seed")
    return "three seeds, twice; n=3"


async def stop_strings(client: Client) -> str:
    whole = text(await client.complete(PROMPT, max_tokens=32))
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    if not stop.strip() or "\ufffd" in stop:
        raise CheckSkipped("the model writes nothing that could be a stop string")
    choice = (await client.complete(PROMPT, max_tokens=32, stop=[stop]))["choices"][0]
    wanted = whole[: whole.index(stop)]
    expect(choice["text"] == wanted, f"{choice['text']!r} came before {stop!r}, not {wanted!r}")
    expect(choice["finish_reason"] == "stop", f"finish_reason is {choice['finish_reason']!r}")
    return f"ended before {stop!r}"


async def logprobs(client: Client) -> str:
    choice = (await client.complete(PROMPT, max_tokens=8, logprobs=3))["choices"][0]
    found = choice["logprobs"]
    expect(len(found["tokens"]) == 8, f"{len(found['tokens'])} tokens, not 8")
    values = found["token_logprobs"]
    expect(all(value <= 0 for value in values), f"log-probabilities above 0: {values}")
    for value, best in zip(values, found["top_logprobs"], strict=True):
        expect(abs(max(best.values()) - value) < 1e-3, "a greedy token is not the likeliest")
    return f"first {values[0]:.2f}"


async def tokenizer(client: Client) -> str:
    found = await client.good("/tokenize", prompt=PROMPT)
    ids = found["tokens"]
    expect(found["count"] == len(ids) > 0, f"count is {found['count']} of {len(ids)} tokens")
    by_ids = text(await client.complete(ids, max_tokens=8))
    by_text = text(await client.complete(PROMPT, max_tokens=8))
    expect(by_ids == by_text, f"{by_ids!r} for the ids of a text, {by_text!r} for the text")
    back = (await client.good("/detokenize", tokens=ids))["prompt"]
    expect(PROMPT in back, f"{back!r} came back")
    return f"{len(ids)} tokens, and back"


async def structure(client: Client) -> str:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = await client.complete(
        PROMPT, max_tokens=48, ignore_eos=False, structured_outputs={"json": schema}
    )
    try:
        value = json.loads(text(answer))
    except ValueError:
        raise CheckFailed(f"{text(answer)!r} is not JSON") from None
    expect(isinstance(value.get("ok"), bool), f"{value} does not fit the schema")
    return json.dumps(value)


async def prefix_cache(client: Client) -> str:
    """The same answer with and without it, and the second time found there."""
    first = await client.complete(LONG_PROMPT, max_tokens=8)
    second = await client.complete(LONG_PROMPT, max_tokens=8)
    expect(text(first) == text(second), "a cached prompt gave another text")
    cached = (second["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if not cached:
        raise CheckSkipped("nothing was found there: is it off?")
    return f"{cached} of {second['usage']['prompt_tokens']} tokens found"


async def errors(client: Client) -> str:
    """Wrong requests get the status and the shape of OpenAI's errors."""
    path = "/v1/completions"
    cases: list[tuple[str, Any, int]] = [
        ("temperature", {"prompt": "x", "temperature": -1}, 400),
        ("prompt", {"max_tokens": 4}, 400),
        ("max_tokens", {"prompt": "x", "max_tokens": "many"}, 400),
        ("model", {"prompt": "x", "model": "no-such-model"}, 404),
    ]
    for param, body, wanted in cases:
        status, answer = await client.post(path, **body)
        check_error(status, answer, wanted)
        expect(answer["error"]["param"] == param, f"param is {answer['error']['param']!r}")
    for method, where, data, wanted in [
        ("POST", path, b"{", 400),
        ("GET", "/v1/no-such-path", None, 404),
        ("GET", path, None, 405),
    ]:
        status, body = await client.request(method, where, data=data)
        check_error(status, json.loads(body), wanted)
    return f"{len(cases) + 3} kinds"


def check_error(status: int, answer: dict[str, Any], wanted: int) -> None:
    expect(status == wanted, f"status {status} instead of {wanted}: {answer}")
    error = answer.get("error")
    expect(isinstance(error, dict), f"no error object in {answer}")
    assert isinstance(error, dict)
    missing = {"message", "type", "param", "code"} - error.keys()
    expect(not missing and error["message"], f"the error object lacks {missing or 'a message'}")


async def disconnect(client: Client) -> str:
    """A client that goes away in the middle ends its request."""
    before = await load(client)
    if before["running"] or before["waiting"]:
        raise CheckSkipped(f"others use the server: {before['running']} requests run")
    stream = client.events(
        "/v1/completions", prompt=PROMPT, max_tokens=400, temperature=0, ignore_eos=True
    )
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator; closes the connection
    started = time.monotonic()
    while (await load(client))["running"]:
        passed = time.monotonic() - started
        expect(passed < FREED_WITHIN_S, f"still running {passed:.0f} s after its client has gone")
        await asyncio.sleep(0.05)
    return f"freed in {1e3 * (time.monotonic() - started):.0f} ms"


async def load(client: Client) -> dict[str, Any]:
    status, body = await client.get("/load")
    if status == 404:
        raise CheckSkipped("the server has no /load")
    expect(status == 200, f"/load answered {status}")
    found: dict[str, Any] = json.loads(body)
    return found


async def concurrency(client: Client) -> str:
    """As many at once; each gets its own answer. On a CPU that is the one it gets alone."""
    prompts = [f"{PROMPT} ({number})" for number in range(CONCURRENT)]
    alone = [text(await client.complete(prompt)) for prompt in prompts]
    together = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))
    for answer in together:
        check_usage(answer, 16)
    same = sum(text(a) == b for a, b in zip(together, alone, strict=True))
    return f"{CONCURRENT} at once, {same} with the very text that each gets alone"


async def metrics(client: Client) -> str:
    status, body = await client.get("/metrics")
    expect(status == 200, f"status {status}")
    names = {line.split("{")[0].split(" ")[0] for line in body.decode().splitlines()}
    wanted = {"vllm:num_requests_running", "vllm:generation_tokens_total"}
    expect(wanted <= names, f"without {', '.join(sorted(wanted - names))}")
    return f"{sum(not name.startswith('#') for name in names)} names"


def text(answer: dict[str, Any]) -> str:
    found: str = answer["choices"][0]["text"]
    return found


CHECKS: dict[str, Check] = {
    "models": models,
    "completion": completion,
    "chat": chat,
    "greedy repeats": greedy_repeats,
    "streaming": streaming,
    "seeds": seeds,
    "stop strings": stop_strings,
    "logprobs": logprobs,
    "tokenizer": tokenizer,
    "structure": structure,
    "prefix cache": prefix_cache,
    "errors": errors,
    "disconnect": disconnect,
    "concurrency": concurrency,
    "metrics": metrics,
}
