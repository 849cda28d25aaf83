"""Every refusal: status, code, and the exact path of what is wrong."""

import asyncio
import json
from typing import Any

import pytest

from engine.api.messages import ChatPrompt, Deltas, RequestError
from server.http_server import url_of
from tests.server.conftest import Site, eventually, running_site
from tests.server.fake_backend import LIMITS, Script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*USER, fields]}


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "missing_field"),
    ({"messages": []}, "messages", "missing_field"),
    ({"messages": "Hi"}, "messages", "invalid_type"),
    ({"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    (message(content="x"), "messages[1].role", "missing_field"),
    (message(role="robot", content="x"), "messages[1].role", "invalid_value"),
    (message(role="user"), "messages[1].content", "missing_field"),
    (message(role="user", content=None), "messages[1].content", "invalid_type"),
    (message(role="user", content=3), "messages[1].content", "invalid_type"),
    (message(role="user", content=[{"text": "x"}]), "messages[1].content[0].type", "missing_field"),
    (
        message(role="user", content=[{"type": "text"}]),
        "messages[1].content[0].text",
        "missing_field",
    ),
    (
        message(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        "messages[1].content[0].type",
        "unsupported_content_type",
    ),
    (
        message(role="user", content=[{"type": "hologram"}]),
        "messages[1].content[0].type",
        "invalid_value",
    ),
    (message(role="tool", content="4"), "messages[1].tool_call_id", "missing_field"),
    (
        message(role="assistant", tool_calls=[{"function": {}}]),
        "messages[1].tool_calls[0].function.name",
        "missing_field",
    ),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs", "invalid_value"),
    (
        {"messages": USER, "logprobs": True, "top_logprobs": 21},
        "top_logprobs",
        "invalid_value",
    ),
    ({"messages": USER, "logprobs": True, "top_logprobs": "3"}, "top_logprobs", "invalid_type"),
    ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "invalid_value"),
    ({"messages": USER, "logprobs": False, "top_logprobs": 3}, "top_logprobs", "invalid_value"),
    ({"messages": USER, "logprobs": 1}, "logprobs", "invalid_type"),
    ({"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"messages": USER, "best_of": 2}, "best_of", "unsupported_value"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"messages": USER, "tools": []}, "tools", "invalid_value"),
    ({"messages": USER, "tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"messages": USER, "modalities": ["audio"]}, "modalities", "unsupported_value"),
    ({"messages": USER, "chat_template": "x"}, "chat_template", "unsupported_value"),
    (
        {"messages": USER, "response_format": {"type": "structural_tag"}},
        "response_format.type",
        "unsupported_value",
    ),
    (
        {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "invalid_value",
    ),
    ({"messages": USER, "continue_final_message": True}, "continue_final_message", "invalid_value"),
]


async def test_bad_chats(site: Site) -> None:
    for body, param, code in BAD_CHATS:
        status, answer = await site.post(CHAT, body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), body
        assert error["type"] == "invalid_request_error"
        assert error["message"]
    assert site.backend.generates == []


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "missing_field"),
    ({"prompt": None}, "prompt", "missing_field"),
    ({"prompt": 3}, "prompt", "invalid_type"),
    ({"prompt": []}, "prompt", "empty_prompt"),
    ({"prompt": [[]]}, "prompt[0]", "empty_prompt"),
    ({"prompt": ["a", [1]]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    ({"prompt": [[1], [2, -3]]}, "prompt[1][1]", "invalid_token_id"),
    ({"prompt": ["x"] * 1025}, "prompt", "invalid_value"),
    ({"prompt": "x", "temperature": 2.1}, "temperature", "invalid_value"),
    ({"prompt": "x", "temperature": "1"}, "temperature", "invalid_type"),
    ({"prompt": "x", "temperature": True}, "temperature", "invalid_type"),
    ({"prompt": "x", "top_p": -0.1}, "top_p", "invalid_value"),
    ({"prompt": "x", "top_k": 1.5}, "top_k", "invalid_type"),
    ({"prompt": "x", "min_p": 1.01}, "min_p", "invalid_value"),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"prompt": "x", "seed": 2**63}, "seed", "invalid_value"),
    ({"prompt": "x", "n": 0}, "n", "invalid_value"),
    ({"prompt": "x", "n": True}, "n", "invalid_type"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "min_tokens": -1, "temperature": 5}, "min_tokens", "invalid_value"),
    ({"prompt": "x", "min_tokens": 17}, "min_tokens", "invalid_value"),
    ({"prompt": "x", "stop": ""}, "stop", "invalid_value"),
    ({"prompt": "x", "stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"prompt": "x", "stop": ["a", 1]}, "stop[1]", "invalid_type"),
    ({"prompt": "x", "stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "invalid_type"),
    ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1.5": 1}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"prompt": "x", "logit_bias": {"1": "NaN"}}, "logit_bias", "invalid_type"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value"),
    ({"prompt": "x", "max_tokens": 0, "echo": False}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens", "invalid_value"),
    ({"prompt": "x", "stream": 1}, "stream", "invalid_type"),
    ({"prompt": "x", "stream_options": {}}, "stream_options", "invalid_value"),
    (
        {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "invalid_type",
    ),
    ({"prompt": [1], "suffix": "y"}, "suffix", "unsupported_value"),
    ({"prompt": [[1], [2]], "suffix": "y"}, "suffix", "unsupported_value"),
    ({"prompt": "x", "suffix": "y", "echo": True}, "suffix", "unsupported_value"),
    ({"prompt": "x", "suffix": "y", "truncate_prompt_tokens": 4}, "suffix", "unsupported_value"),
    ({"prompt": "x", "suffix": 1}, "suffix", "invalid_type"),
    ({"prompt": "x", "best_of": 0}, "best_of", "invalid_value"),
    ({"prompt": "x", "best_of": 129}, "best_of", "invalid_value"),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "invalid_value"),
    ({"prompt": "x", "n": 2, "best_of": 1}, "best_of", "invalid_value"),
    ({"prompt": "x", "use_beam_search": True}, "use_beam_search", "unsupported_value"),
    ({"prompt": "x", "guided_regex": 3}, "guided_regex", "invalid_type"),
    ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_value"),
    ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "invalid_value"),
    ({"prompt": "x", "prompt_logprobs": True}, "prompt_logprobs", "invalid_type"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": [1, -1]}, "allowed_token_ids[1]", "invalid_value"),
    ({"prompt": "x", "allowed_token_ids": ["a"]}, "allowed_token_ids[0]", "invalid_type"),
    ({"prompt": "x", "allowed_token_ids": [1.5]}, "allowed_token_ids[0]", "invalid_type"),
    ({"prompt": "x", "bad_words": ["a", ""]}, "bad_words", "invalid_value"),
    ({"prompt": "x", "bad_words": ["a", 1]}, "bad_words[1]", "invalid_type"),
    ({"prompt": "x", "bad_words": ["a"] * 129}, "bad_words", "invalid_value"),
    ({"prompt": "x", "logits_processors": ["os"]}, "logits_processors", "unsupported_value"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "invalid_value"),
    ({"prompt": "x", "return_token_ids": 1}, "return_token_ids", "invalid_type"),
    ({"prompt": "x", "priority": 2**31}, "priority", "invalid_value"),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt", "invalid_value"),
    # The first error in the text is reported.
    ({"top_p": 7, "temperature": 7, "prompt": 7}, "top_p", "invalid_value"),
]


async def test_bad_completions(site: Site) -> None:
    for body, param, code in BAD_COMPLETIONS:
        status, answer = await site.post(TEXT, body)
        error = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), (body, error)
    assert site.backend.generates == []


GOOD: list[dict[str, Any]] = [
    {"temperature": None, "stop": None, "tools": None, "logit_bias": None, "n": None},
    {"max_tokens": 5.0, "top_k": 0, "seed": -1, "n": 1.0},
    {"top_p": 0, "temperature": 0},
    {"logit_bias": {"999": -100}, "stop_token_ids": [0]},
    {"suffix": "", "best_of": 1, "use_beam_search": False, "logits_processors": []},
    {"user": "me", "metadata": {"a": 1}, "store": True, "service_tier": "auto"},
    {"stop": "x", "include_stop_str_in_output": True, "response_format": {"type": "text"}},
    {"logprobs": True},
    {"logprobs": False},
    {"spaces_between_special_tokens": True, "length_penalty": 1.0, "bad_words": []},
    {"spaces_between_special_tokens": False, "return_tokens_as_token_ids": False},
    {"best_of": 3, "n": 3, "stream": False},
    {"priority": -5, "cache_salt": "tenant", "seed": 2**63 - 1},
]


@pytest.mark.parametrize("depth", [127, 128, 129, 600, 1000, 5000])
async def test_arguments_of_tool_calls_nested_too_deep_stay_text(site: Site, depth: int) -> None:
    arguments = '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}], "n": 128}
    assert (await site.post(CHAT, body))[0] == 200
    prompt = site.backend.generates[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    sent = prompt.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert sent == (json.loads(arguments) if depth <= 128 else arguments)
    assert site.service.client.num_live == 0


async def test_neutral_values_pass(site: Site) -> None:
    for fields in GOOD:
        status, answer = await site.post(TEXT, {"prompt": "x", **fields})
        assert status == 200, (fields, answer)
    assert site.backend.generates[1].params.seed is None
    assert site.backend.generates[1].params.max_tokens == 5
    assert site.backend.generates[-1].cache_salt == "tenant"


async def test_unknown_fields_are_listed(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "frobnicate": 1, "zap": None}
    for _ in range(2):
        status, headers, _ = await site.post_full(TEXT, body)
        assert status == 200
        assert headers["X-Ignored-Fields"] == "frobnicate,zap"
    warnings = [r for r in caplog.records if "frobnicate" in r.getMessage()]
    assert len(warnings) == 1
    status, headers, _ = await site.post_full(TEXT, {"prompt": "x", "bad\r\nname": 1})
    assert status == 200
    assert "X-Ignored-Fields" not in headers


BAD_BODIES: list[tuple[bytes, str, str | None]] = [
    (b"", "empty_body", None),
    (b"  \n", "empty_body", None),
    (b"{", "invalid_json", None),
    (b'{"prompt": "x", "temperature": NaN}', "invalid_json", None),
    (b'{"prompt": "x", "temperature": Infinity}', "invalid_json", None),
    (b"[1]", "invalid_json", None),
    (b'"text"', "invalid_json", None),
    (b"\xff\xfe", "invalid_json", None),
    (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "invalid_json", None),
    (b'{"a":' + b"[" * 100000 + b"]" * 100000 + b"}", "invalid_json", None),
    (b'{"prompt": ["x", "\\ud800"]}', "invalid_unicode", "prompt[1]"),
    (b'{"prompt": "x", "stop": ["\\udfff"]}', "invalid_unicode", "stop[0]"),
]


async def test_bad_bodies(site: Site) -> None:
    headers = {"Content-Type": "application/json"}
    for data, code, param in BAD_BODIES:
        status, answer = await site.post(TEXT, data=data, headers=headers)
        error = answer["error"]
        assert (status, error["code"], error["param"]) == (400, code, param), data[:60]
    many_brackets = json.dumps({"prompt": "{[" * 200}).encode()
    status, _ = await site.post(TEXT, data=many_brackets, headers=headers)
    assert status == 200, "brackets inside strings are text"
    repeated = b'{"prompt": 3, "prompt": "x"}'
    status, _ = await site.post(TEXT, data=repeated, headers=headers)
    assert status == 200, "the last of repeated keys wins"


async def test_media_type_and_size() -> None:
    async with running_site(max_body_size=100) as site:
        status, answer = await site.post(TEXT, data=b"{}", headers={"Content-Type": "text/plain"})
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
        status, answer = await site.post(TEXT, {"prompt": "x" * 100})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")

        async def chunks() -> Any:  # no Content-Length
            for _ in range(4):
                yield b" " * 50

        headers = {"Content-Type": "application/json"}
        status, answer = await site.post(TEXT, data=chunks(), headers=headers)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        status, _ = await site.post(TEXT, {"prompt": "x"})
        assert status == 200


async def test_paths_and_methods(site: Site) -> None:
    status, answer = await site.get("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert answer["error"]["type"] == "not_found_error"
    async with site.session.get(site.url + TEXT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["code"] == "method_not_allowed"
    status, headers, answer = await site.post_full("/v1/embeddings", {"input": "x"})
    assert (status, answer["error"]["code"]) == (501, "not_implemented")
    assert headers["x-should-retry"] == "false"
    status, _ = await site.post(TEXT + "/", {"prompt": "x"})
    assert status == 200
    async with site.session.head(site.url + "/health") as response:
        assert response.status == 200
    status, answer = await site.get("/v1/models/none")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_names_with_slashes() -> None:
    async with running_site(served_model_name=["org/Model-1", "alias"]) as site:
        status, answer = await site.get("/v1/models/org/Model-1")
        assert (status, answer["root"]) == (200, "org/Model-1")
        status, answer = await site.post(TEXT, {"prompt": "x", "model": "alias"})
        assert (status, answer["model"]) == (200, "alias")
        status, answer = await site.post(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["param"]) == (400, "model")
        status, answer = await site.post(TEXT, {"prompt": "x", "model": "ALIAS"})
        assert status == 404


async def test_request_ids(site: Site) -> None:
    for wanted, echoed in (("my-id.7", True), ("x" * 129, False), ("a b", False)):
        _, headers, _ = await site.post_full(
            TEXT, {"prompt": "x"}, headers={"X-Request-Id": wanted}
        )
        assert (headers["X-Request-Id"] == wanted) is echoed
        assert headers["X-Request-Id"]
    _, headers, _ = await site.post_full(TEXT, {"prompt": "x", "request_id": "from-body"})
    assert headers["X-Request-Id"] == "from-body"
    answers = await asyncio.gather(
        *(site.post(TEXT, {"prompt": "x", "request_id": "same"}) for _ in range(3))
    )
    assert [status for status, _ in answers] == [200] * 3
    assert len({g.req_id for g in site.backend.generates}) == len(site.backend.generates)


def rejection(status: int, code: str, param: str | None, message: str = "No.") -> Any:
    return lambda g: Script(
        error=RequestError(
            req_id=g.req_id, n=g.params.n, status=status, code=code, message=message, param=param
        )
    )


async def test_errors_from_the_tokenizer(site: Site) -> None:
    """Whether streamed or not: nothing has been sent yet, so the status is real."""
    site.backend.script = rejection(400, "context_length_exceeded", "prompt")
    for stream in (False, True):
        for prompt, param in (("x", "prompt"), (["x", "y"], "prompt[0]")):
            status, answer = await site.post(TEXT, {"prompt": prompt, "stream": stream})
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
            assert answer["error"]["param"] == param
    site.backend.script = rejection(400, "invalid_token_id", "prompt[1]", "prompt[1] is bad")
    for ids, param in (
        ([1, 5], "prompt[1]"),
        ([[1, 5]], "prompt[0][1]"),
        ([[1], [2]], "prompt[0][1]"),
    ):
        status, answer = await site.post(TEXT, {"prompt": ids})
        assert (status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["message"] == f"{param} is bad"
    site.backend.script = rejection(503, "queue_timeout", None)
    status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
    assert status == 503
    assert headers["Retry-After"] == "1"
    assert answer["error"]["message"].endswith(headers["X-Request-Id"])
    assert site.service.client.num_live == 0


async def test_queue_limit() -> None:
    """Requests wait although the engine runs fewer than it may, e.g. for KV blocks."""
    async with running_site(max_queued_requests=2) as site:
        site.backend.stats(num_waiting=1)
        await eventually(lambda: site.service.client.status.stats is not None)
        site.backend.script = lambda g: Script(hold="queued")
        waiting = [asyncio.create_task(site.post(TEXT, {"prompt": "x"})) for _ in range(2)]
        while site.service.client.num_queued < 2:
            await asyncio.sleep(0.005)
        status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert answer["error"]["type"] == "rate_limit_error"
        assert int(headers["Retry-After"]) >= 1
        assert (await site.get("/ready"))[0] == 503
        assert (await site.get("/health"))[0] == 200
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_burst_fills_the_engine_and_the_queue() -> None:
    """What an idle engine is about to start is not counted as waiting."""
    async with running_site(max_queued_requests=3) as site:
        site.backend.script = lambda g: Script(hold="queued")
        client = site.service.client
        tasks = [asyncio.create_task(site.post(TEXT, {"prompt": "x"})) for _ in range(20)]
        expected = LIMITS.max_num_seqs + 3
        await eventually(lambda: sum(task.done() for task in tasks) == 20 - expected)
        assert client.num_queued == expected
        await eventually(lambda: len(site.backend.generates) == expected)
        answers = [await task for task in tasks if task.done()]
        assert {(status, a["error"]["code"]) for status, a in answers} == {(429, "queue_full")}
        # Now all places are taken, and only then does the queue itself count.
        ids = [generate.req_id for generate in site.backend.generates][: LIMITS.max_num_seqs]
        started = [(req_id, 0, 0) for req_id in ids]
        site.backend.send(
            "replies", Deltas(req_ids=[], texts=[], counts=[], finished=[], started=started)
        )
        await eventually(lambda: client.num_queued == 3)
        assert (client.num_startable, site.service.is_queue_full) == (0, True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_request_cannot_pass_the_queue_limit() -> None:
    async with running_site(max_queued_requests=10) as site:
        site.backend.script = lambda g: Script(hold="queued")
        most = LIMITS.max_num_seqs + 10
        status, answer = await site.post(TEXT, {"prompt": ["x"] * (most + 1)})
        assert (status, answer["error"]["code"]) == (400, "invalid_value"), "it can never be served"
        assert f"at most {most}" in answer["error"]["message"]
        first = asyncio.create_task(site.post(TEXT, {"prompt": ["x", "y"], "n": 4}))
        await eventually(lambda: site.service.client.num_live == 8)
        status, answer = await site.post(TEXT, {"prompt": ["x"] * 11})
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        second = asyncio.create_task(site.post(TEXT, {"prompt": ["x"] * 5, "n": 2}))
        await eventually(lambda: site.service.client.num_live == most)
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_a_bug_is_a_500_and_the_server_lives(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("secret /path")

    with monkeypatch.context() as patch:
        patch.setattr(site.service.client, "generate", broken)
        status, headers, answer = await site.post_full(TEXT, {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert answer["error"]["message"].endswith(headers["X-Request-Id"])
    assert "secret" not in json.dumps(answer)
    assert "secret /path" in caplog.text
    assert (await site.post(TEXT, {"prompt": "x"}))[0] == 200


async def test_expectations(site: Site) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x"}'
    for expect, expected in ((b"100-Continue", b"100"), (b"a-miracle", b"417")):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: %b\r\n"
            b"Content-Length: %d\r\n\r\n" % (expect, len(body))
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.split(b" ", 2)[1] == expected
        if expected == b"417":
            assert b"X-Request-Id" in head
            assert json.loads(await reader.read())["error"]["type"] == "invalid_request_error"
        else:
            writer.write(body)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_malformed_http(site: Site) -> None:
    host, port = site.url.removeprefix("http://").split(":")
    for request, expected in (
        (b"GET /" + b"x" * 20000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nBroken\r\n\r\n", b"400"),
        (b"GET /live HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 500 + b"\r\n", b"431"),
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = await reader.read()
        writer.close()
        assert answer.split(b" ", 2)[1] == expected
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"application/json" in head
        assert b"X-Request-Id: " in head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_body_that_is_not_as_encoded_is_not_the_servers_error(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    status, answer = await site.post(TEXT, data=b'{"prompt": "x"}', headers=headers)
    assert (status, answer["error"]["code"]) == (400, "invalid_json")
    await asyncio.sleep(0.05)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_urls_of_ipv6_addresses_have_brackets() -> None:
    assert url_of("::1", 80) == "http://[::1]:80"
    assert url_of("127.0.0.1", 80) == "http://127.0.0.1:80"
