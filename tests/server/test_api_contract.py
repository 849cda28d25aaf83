"""What clients are promised and no other file tests: errors row by row, fields, headers, chunks.

Each table names the promise; the backend is scripted, so every test is about the front end.
"""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from engine.api.messages import FinishReason, RequestError
from server.schema.sampling import NO_EFFECT_FIELDS
from tests.server.conftest import Site, eventually, read_events, running_site
from tests.server.fake_backend import LIMITS, Script, logprob

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
JSON = {"Content-Type": "application/json"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def chunks_of(site: Site, path: str, body: dict[str, Any], **more: Any) -> list[Any]:
    body = {**body, "stream": True}
    async with site.session.post(site.url + path, json=body, **more) as response:
        assert response.status == 200, await response.text()
        events = await read_events(response)
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


# --- errors -------------------------------------------------------------------------------------------

INVALID = "invalid_request_error"
# what is sent (path, body or bytes, headers), then status, type, code
ERRORS: dict[str, tuple[str, Any, dict[str, str], int, str, str]] = {
    "empty body": (TEXT, b"", JSON, 400, INVALID, "empty_body"),
    "no JSON": (TEXT, b"{", JSON, 400, INVALID, "invalid_json"),
    "NaN": (TEXT, b'{"top_p": NaN}', JSON, 400, INVALID, "invalid_json"),
    "a number": (TEXT, b"5", JSON, 400, INVALID, "invalid_json"),
    "a huge number": (TEXT, b"9" * 4000, JSON, 400, INVALID, "invalid_json"),
    "a number of 5000 digits": (TEXT, b"9" * 5000, JSON, 400, INVALID, "invalid_json"),
    "a huge fraction": (TEXT, b'{"top_p": 1e999}', JSON, 400, INVALID, "invalid_json"),
    "129 levels": (TEXT, b'{"a":' + b"[" * 128 + b"]" * 128 + b"}", JSON, 400, INVALID, "invalid_json"),
    "a form": (TEXT, b"a=1", {"Content-Type": "text/plain"}, 415, INVALID, "unsupported_media_type"),
    "no prompt": (TEXT, {}, {}, 400, INVALID, "missing_field"),
    "wrong type": (TEXT, {"prompt": "x", "n": "1"}, {}, 400, INVALID, "invalid_type"),
    "out of range": (TEXT, {"prompt": "x", "n": 0}, {}, 400, INVALID, "invalid_value"),
    "not supported": (TEXT, {"prompt": [1], "suffix": "y"}, {}, 400, INVALID, "unsupported_value"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {}, 400, INVALID, "unsupported_content_type",
    ),
    "a surrogate": (TEXT, b'{"prompt": "\\ud800"}', JSON, 400, INVALID, "invalid_unicode"),
    "an id": (TEXT, {"prompt": [2**40]}, {}, 400, INVALID, "invalid_token_id"),
    "no prompts": (TEXT, {"prompt": []}, {}, 400, INVALID, "empty_prompt"),
    "another model": (TEXT, {"prompt": "x", "model": "y"}, {}, 404, "not_found_error", "model_not_found"),
    "another path": ("/v2", {}, {}, 404, "not_found_error", "unknown_url"),
    "another method": ("/version", {}, {}, 405, INVALID, "method_not_allowed"),
    "too large": (TEXT, {"prompt": "x" * 4000}, {}, 413, INVALID, "request_too_large"),
    "an expectation": (TEXT, {"prompt": "x"}, {"Expect": "tea"}, 417, INVALID, "expectation_failed"),
    "a long header": (TEXT, {"prompt": "x"}, {"X-A": "a" * 9000}, 431, INVALID, "headers_too_large"),
    "not built": ("/v1/embeddings", {}, {}, 501, "not_implemented_error", "not_implemented"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
async def test_each_error_has_its_status_type_and_code(case: str) -> None:
    path, body, headers, status, kind, code = ERRORS[case]
    if case == "too large" or not isinstance(body, bytes):
        body = json.dumps(body).encode()
        headers = {**JSON, **headers}
    async with running_site(max_body_size=20_000 if case != "too large" else 1000) as site:
        async with site.session.post(site.url + path, data=body, headers=headers) as response:
            assert response.content_type == "application/json"
            assert response.headers["X-Request-Id"]
            error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (status, kind, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert ("x-should-retry" in response.headers) == (status == 501)
        if status >= 500:
            assert error["message"].endswith(response.headers["X-Request-Id"])


OF_THE_ENGINE = [
    (400, "context_length_exceeded", INVALID),
    (400, "exceeds_kv_capacity", INVALID),
    (400, "invalid_messages", INVALID),
    (400, "invalid_schema", INVALID),
    (500, "internal_error", "server_error"),
]


@pytest.mark.parametrize(("status", "code", "kind"), OF_THE_ENGINE)
async def test_errors_of_other_processes_keep_their_code(
    site: Site, status: int, code: str, kind: str
) -> None:
    site.backend.script = lambda g: Script(
        error=RequestError(req_id=g.req_id, n=g.params.n, status=status, code=code, message="No.")
    )
    got, headers, answer = await site.post_full(CHAT, {"messages": USER})
    assert (got, answer["error"]["code"], answer["error"]["type"]) == (status, code, kind)
    assert ("Retry-After" in headers) is False
    site.backend.script = lambda g: Script()
    assert (await site.post(CHAT, {"messages": USER}))[0] == 200  # others go on


async def test_refusals_that_pass_say_when_to_come_back() -> None:
    async with running_site(ready=False) as site:
        status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert int(headers["Retry-After"]) >= 1
        assert answer["error"]["type"] == "server_error"
    async with running_site(max_queued_requests=1) as site:
        site.backend.script = lambda g: Script(hold="queued")
        body = {"prompt": "x", "n": LIMITS.max_num_seqs}
        tasks = [asyncio.create_task(site.post(TEXT, body)) for _ in range(2)]
        await eventually(lambda: len(site.backend.generates) >= 1)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        status, headers, answer = await site.post_full(TEXT, body)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert answer["error"]["type"] == "rate_limit_error"
        assert int(headers["Retry-After"]) >= 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_first_mistake_in_the_body_is_reported(site: Site) -> None:
    mistakes = [("n", 0), ("top_p", 7), ("stop", 5), ("seed", "x"), ("prompt", {})]
    for first in range(len(mistakes)):
        body = dict(mistakes[first:] + mistakes[:first])
        _, answer = await site.post(TEXT, body)
        assert answer["error"]["param"] == mistakes[first][0]


# --- fields -------------------------------------------------------------------------------------------


async def test_fields_without_effect_are_not_called_unknown(site: Site) -> None:
    body = {"prompt": "x", **{key: {"any": ["thing"]} for key in NO_EFFECT_FIELDS}}
    status, headers, _ = await site.post_full(TEXT, body)
    assert status == 200
    assert "X-Ignored-Fields" not in headers


# What is sent, and what the engine is then asked for (attributes of the parameters).
MEANINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "text has 16 tokens": (TEXT, {"prompt": "x"}, {"max_tokens": 16}),
    "chat has as many as fit": (CHAT, {"messages": USER}, {"max_tokens": None}),
    "the new name wins": (
        CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 5}, {"max_tokens": 5},
    ),
    "the new name wins in any order": (
        CHAT, {"max_completion_tokens": 5, "max_tokens": 3, "messages": USER}, {"max_tokens": 5},
    ),
    "null is absent": (TEXT, {"prompt": "x", "max_tokens": None, "n": None}, {"max_tokens": 16, "n": 1}),
    "a fraction of zero": (TEXT, {"prompt": "x", "max_tokens": 3.0, "top_k": 4.0}, {"max_tokens": 3, "top_k": 4}),
    "seed -1 is none": (TEXT, {"prompt": "x", "seed": -1}, {"seed": None}),
    "top_k 0 passes": (TEXT, {"prompt": "x", "top_k": 0}, {"top_k": 0}),
    "one stop": (TEXT, {"prompt": "x", "stop": "a"}, {"stop": ["a"]}),
    "several stops": (TEXT, {"prompt": "x", "stop": ["a", "b"]}, {"stop": ["a", "b"]}),
    "logprobs true is 1": (TEXT, {"prompt": "x", "logprobs": True}, {"logprobs": 1}),
    "logprobs false is none": (TEXT, {"prompt": "x", "logprobs": False}, {"logprobs": None}),
    "logprobs 0": (TEXT, {"prompt": "x", "logprobs": 0}, {"logprobs": 0}),
    "chat's logprobs alone": (CHAT, {"messages": USER, "logprobs": True}, {"logprobs": 0}),
    "chat's logprobs with the best": (
        CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 20}, {"logprobs": 20},
    ),
    "biases": (TEXT, {"prompt": "x", "logit_bias": {"7": -100}}, {"logit_bias": {7: -100.0}}),
    "best_of": (TEXT, {"prompt": "x", "best_of": 3, "temperature": 1}, {"n": 3, "logprobs": 0}),
    "best_of of what cannot differ": (TEXT, {"prompt": "x", "best_of": 3, "temperature": 0}, {"n": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", MEANINGS)
async def test_fields_mean_what_they_say(site: Site, case: str) -> None:
    path, body, expected = MEANINGS[case]
    entry = logprob("a", -1.0, [("a", -1.0)] * 20)
    site.backend.script = lambda g: Script(["a"], logprobs=[entry])
    status, answer = await site.post(path, body)
    assert status == 200, answer
    params = site.backend.generates[0].params
    found = {name: getattr(params, name) for name in expected}
    if expected.get("seed", 0) is None:
        assert params.seed != -1  # a random one
        return
    assert found == expected


async def test_salt_priority_and_special_tokens_reach_the_engine(site: Site) -> None:
    body = {"prompt": "x", "cache_salt": "tenant", "priority": -7, "add_special_tokens": False}
    assert (await site.post(TEXT, body))[0] == 200
    (generate,) = site.backend.generates
    assert (generate.cache_salt, generate.priority) == ("tenant", -7)
    assert generate.prompt.add_special_tokens is False


ROLES = [
    ({"role": "function", "name": "f", "content": "4"}, "tool", "4"),
    ({"role": "developer", "content": "a"}, "developer", "a"),
    ({"role": "user", "content": [{"type": "input_text", "text": "a"}]}, "user", [{"type": "text", "text": "a"}]),
    ({"role": "user", "content": []}, "user", ""),
    ({"role": "assistant", "refusal": "no"}, "assistant", "no"),
    ({"role": "assistant", "tool_calls": [], "content": "a"}, "assistant", "a"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "role", "content"), ROLES)
async def test_messages_come_in_one_shape(
    site: Site, message: dict[str, Any], role: str, content: Any
) -> None:
    status, answer = await site.post(CHAT, {"messages": [*USER, message]})
    assert status == 200, answer
    last = site.backend.generates[0].prompt.messages[-1]
    assert (last["role"], last["content"]) == (role, content)
    assert "tool_calls" not in last


# --- responses ------------------------------------------------------------------------------------------


async def test_stream_headers(site: Site) -> None:
    body = {"prompt": "x", "stream": True}
    headers = {"Accept-Encoding": "gzip, br"}
    async with site.session.post(site.url + TEXT, json=body, headers=headers) as response:
        found = response.headers
        assert found["Content-Type"] == "text/event-stream; charset=utf-8"
        assert found["Cache-Control"] == "no-cache, no-transform"
        assert found["X-Accel-Buffering"] == "no"
        assert found["Connection"] == "keep-alive"
        assert found["X-Request-Id"]
        assert "Content-Length" not in found
        assert "Content-Encoding" not in found


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_each_choice_ends_once_and_usage_comes_last(site: Site, path: str) -> None:
    site.backend.script = lambda g: Script(["a", "b", "c"], prompt_tokens=4, delay_s=0.002)
    body: dict[str, Any] = {"prompt": ["x", "y"]} if path == TEXT else {"messages": USER}
    num_prompts = 2 if path == TEXT else 1
    body |= {"n": 3, "stream_options": {"include_usage": True}}
    *chunks, last = await chunks_of(site, path, body)
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]]
    assert sorted(ends) == list(range(3 * num_prompts))
    assert {c["created"] for c in [*chunks, last]} == {last["created"]}
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["prompt_tokens"] == 4 * num_prompts, "once for each prompt, whatever n is"
    assert usage["completion_tokens"] == 9 * num_prompts
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    status, whole = await site.post(path, {k: v for k, v in body.items() if k != "stream_options"})
    assert status == 200
    assert whole["usage"] == usage
    assert [c["index"] for c in whole["choices"]] == list(range(3 * num_prompts))


async def test_usage_of_streams_is_as_asked(site: Site) -> None:
    for options in ({}, {"include_obfuscation": True}, {"include_usage": False}, None):
        chunks = await chunks_of(site, CHAT, {"messages": USER, "stream_options": options})
        assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(site, CHAT, {"messages": USER, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 3
    status, answer = await site.post(CHAT, {"messages": USER, "stream_options": {}})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


async def test_deltas_have_one_kind_of_thing_each() -> None:
    text = 'Hm <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    settings = {
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
        "reasoning_field": "both",
    }
    async with running_site(**settings) as site:
        pieces = ["<think>so", " on</think>", *(text[i : i + 7] for i in range(0, len(text), 7))]
        site.backend.script = lambda g: Script(pieces, delay_s=0.001)
        chunks = await chunks_of(site, CHAT, {"messages": USER, "tools": TOOLS})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[1:]]
        kinds = {frozenset(delta) for delta in deltas}
        assert kinds == {
            frozenset(["content"]), frozenset(["reasoning_content", "reasoning"]),
            frozenset(["tool_calls"]), frozenset(),
        }  # fmt: skip
        assert "" not in [delta.get("content") for delta in deltas]
        calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert set(calls[0]) == {"index", "id", "type", "function"}
        assert calls[0]["function"] == {"name": "f", "arguments": ""}
        assert all(set(c) == {"index", "function"} for c in calls[1:])
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        status, whole = await site.post(CHAT, {"messages": USER, "tools": TOOLS})
        message = whole["choices"][0]["message"]
        assert status == 200
        assert message["reasoning_content"] == message["reasoning"] == "so on"
        joined = "".join(delta.get("content", "") for delta in deltas)
        assert message["content"] == joined
        arguments = "".join(call["function"]["arguments"] for call in calls)
        assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("finish", "stop", "expected"),
    [
        (FinishReason.STOP, None, ("stop", None)),
        (FinishReason.STOP, "END", ("stop", "END")),
        (FinishReason.STOP, 17, ("stop", 17)),
        (FinishReason.LENGTH, None, ("length", None)),
    ],
)
async def test_why_a_text_ended(site: Site, finish: Any, stop: Any, expected: Any) -> None:
    site.backend.script = lambda g: Script(["a"], finish=finish, stop_reason=stop)
    for path, body in ((TEXT, {"prompt": "x"}), (CHAT, {"messages": USER})):
        _, whole = await site.post(path, body)
        last = (await chunks_of(site, path, body))[-1]
        for choice in (whole["choices"][0], last["choices"][0]):
            assert (choice["finish_reason"], choice["stop_reason"]) == expected


async def test_models(site: Site) -> None:
    _, listed = await site.get("/v1/models")
    _, one = await site.get("/v1/models/tiny")
    assert listed == {"object": "list", "data": [one]}
    assert one == {
        "id": "tiny", "object": "model", "created": site.service.created, "owned_by": "sluice",
        "root": "tiny", "parent": None, "max_model_len": LIMITS.max_model_len, "permission": [],
    }  # fmt: skip


async def test_two_clients_with_one_id_leave_each_other_alone(site: Site) -> None:
    """The id is echoed and nothing more: one client leaves, the other gets its whole answer."""
    site.backend.script = lambda g: Script(["a", "b", "c"], paced=True)
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "x", "request_id": "same"}
    tasks = [asyncio.create_task(site.post_full(TEXT, body, headers=headers)) for _ in range(2)]
    await eventually(lambda: len(site.backend.generates) == 2)
    tasks[0].cancel()
    await eventually(lambda: len(site.backend.aborted) == 1)
    for _ in "bc":
        site.backend.go_on()
    status, found, answer = await tasks[1]
    assert (status, found["X-Request-Id"]) == (200, "same")
    assert answer["choices"][0]["text"] == "abc"
    assert site.backend.aborted == {site.backend.generates[0].req_id}


@pytest.mark.parametrize("version", [b"HTTP/2.0", b"HTTP/0.9", b"HTTP/1.1"])
async def test_answers_are_in_a_version_that_clients_read(site: Site, version: bytes) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /live " + version + b"\r\nHost: a\r\nConnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
    writer.close()


async def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    site.backend.script = lambda g: Script([g.prompt.text], delay_s=0.05 / len(g.prompt.text))
    host, port = site.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for text in ("1", "22", "333"):
        body = json.dumps({"prompt": text}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
    texts = []
    for _ in range(3):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        texts.append(json.loads(await reader.readexactly(size))["choices"][0]["text"])
    assert texts == ["1", "22", "333"]
    writer.close()


async def test_ids_are_of_their_kind_and_never_twice(site: Site) -> None:
    seen = set()
    for path, body, prefix in (
        (TEXT, {"prompt": "x"}, "cmpl-"),
        (CHAT, {"messages": USER}, "chatcmpl-"),
    ):
        for _ in range(3):
            _, answer = await site.post(path, body)
            assert answer["id"].startswith(prefix)
            seen.add(answer["id"])
    assert len(seen) == 6


async def test_one_write_for_each_event_reaches_the_client_at_once(site: Site) -> None:
    """A client sees the first text while the backend still holds the rest."""
    site.backend.script = lambda g: Script(["first", "second"], hold="decode")
    body = {"prompt": "x", "stream": True}
    timeout = aiohttp.ClientTimeout(total=5)
    async with site.session.post(site.url + TEXT, json=body, timeout=timeout) as response:
        line = await response.content.readline()
        assert b"first" in line
