"""Tool calls and reasoning over HTTP, with a scripted backend and OpenAI's own client."""

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from engine.api.messages import ChatPrompt, FinishReason
from tests.server.conftest import Site, read_events, running_site
from tests.server.fake_backend import Script, logprob

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Weather in Oslo and Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now", "parameters": {}}}
TOOLS = [WEATHER, NOW]
ARGUMENTS = r'{"city": "Troms\u00f8 \"😀\"\n", "days": [1, {"x": null}]}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def hermes() -> AsyncIterator[Site]:
    """With a chat template that knows nothing of tools."""
    async with running_site(tool_call_parser="hermes") as site:
        site.service.client.status.chat_template = "{{ messages }}"
        yield site


def forced(text: str, **more: Any) -> Any:
    """A script whose model writes `text`, a few characters a token."""
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    return lambda generate: Script(pieces, **more)


async def streamed(site: Site, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with site.session.post(site.url + CHAT, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        events = await read_events(response)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> tuple[dict[str, Any], str]:
    """The message that a client puts together, and the finish reason."""
    message: dict[str, Any] = {"content": ""}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "nothing comes after the end"
            reason = choice["finish_reason"]
            delta = choice["delta"]
            assert len(delta) <= 1 or "role" in delta
            assert delta.get("content") != "" or "role" in delta
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    calls.append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"}
                    calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert reason is not None
    return message, reason


async def both(site: Site, **body: Any) -> tuple[dict[str, Any], str]:
    """The message and its end, after checking that streamed and whole answers agree."""
    body = {"messages": USER, "tools": TOOLS, **body}
    message, reason = joined(await streamed(site, body))
    status, answer = await site.post(CHAT, body)
    assert status == 200, answer
    whole = answer["choices"][0]
    assert whole["finish_reason"] == reason
    assert (whole["message"]["content"] or "") == message["content"]
    assert whole["message"].get("reasoning_content") == message.get("reasoning_content")
    calls = [call["function"] for call in whole["message"].get("tool_calls", [])]
    assert calls == message.get("tool_calls", [])
    return whole["message"], reason


# --- calls ----------------------------------------------------------------------------------------------


async def test_text_answers_have_no_key_tool_calls(hermes: Site) -> None:
    for text in ("It is sunny.", "<tool_call> is a mark", "", " \n", '{"name": "now"}'):
        hermes.backend.script = lambda g, text=text: Script([text])
        message, reason = await both(hermes)
        assert message == {"role": "assistant", "content": text, "refusal": None}
        assert reason == "stop"
        for chunk in await streamed(hermes, {"messages": USER, "tools": TOOLS}):
            assert "tool_calls" not in json.dumps(chunk)


async def test_a_call(hermes: Site) -> None:
    hermes.backend.script = forced(ONE)
    message, reason = await both(hermes)
    assert reason == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS}


async def test_a_call_without_parameters_has_an_empty_object(hermes: Site) -> None:
    for text in (
        NO_ARGUMENTS,
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": null}</tool_call>',
    ):
        hermes.backend.script = forced(text)
        message, reason = await both(hermes)
        assert [c["function"] for c in message["tool_calls"]] == [
            {"name": "now", "arguments": "{}"}
        ]
        assert reason == "tool_calls"


async def test_several_calls_after_text(hermes: Site) -> None:
    hermes.backend.script = forced(f"I'll look.\n\n{ONE}\n{NO_ARGUMENTS}\n")
    message, _ = await both(hermes)
    assert message["content"] == "I'll look."
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather", "now"]
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    message, _ = await both(hermes, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather"]


async def test_each_choice_has_a_parser_of_its_own(hermes: Site) -> None:
    hermes.backend.script = forced(ONE + NO_ARGUMENTS)
    chunks = await streamed(hermes, {"messages": USER, "tools": TOOLS, "n": 3})
    answers = [joined(chunks, index) for index in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][1] == "tool_calls"
    _, whole = await hermes.post(CHAT, {"messages": USER, "tools": TOOLS, "n": 3})
    ids = [c["id"] for choice in whole["choices"] for c in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 6


@pytest.mark.parametrize("cut", range(4, len(ONE), 9))
async def test_a_call_cut_by_max_tokens_ends_with_length(hermes: Site, cut: int) -> None:
    hermes.backend.script = forced(ONE[:cut], finish=FinishReason.LENGTH)
    message, reason = await both(hermes)
    assert reason == "length"
    if "tool_calls" in message:
        assert ARGUMENTS.startswith(message["tool_calls"][0]["function"]["arguments"])
    else:
        assert message["content"] == ONE[:cut]


async def test_tool_choice_none_reads_no_calls_and_shows_no_tools(hermes: Site) -> None:
    hermes.backend.script = forced(ONE)
    message, reason = await both(hermes, tool_choice="none")
    assert message == {"role": "assistant", "content": ONE, "refusal": None}
    assert reason == "stop"
    prompt = hermes.backend.generates[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == []
    assert prompt.messages == USER


async def test_forced_calls_are_constrained(hermes: Site) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        hermes.backend.script = forced(ONE)
        message, reason = await both(hermes, tool_choice=choice)
        assert reason == "tool_calls"
        assert message["tool_calls"][0]["function"]["name"] == "weather"
        generate = hermes.backend.generates[-1]
        assert generate.params.structured.kind == "grammar"
        assert "<tool_call>" in generate.params.structured.value
        assert ("now" in generate.params.structured.value) is (choice == "required")


async def test_auto_without_a_parser_names_the_flag(site: Site) -> None:
    body = {"messages": USER, "tools": TOOLS}
    status, answer = await site.post(CHAT, body)
    assert (status, answer["error"]["code"]) == (400, "unsupported_value")
    assert "--tool-call-parser" in answer["error"]["message"]
    assert (await site.post(CHAT, {**body, "tool_choice": "none"}))[0] == 200
    site.backend.script = forced('[{"name": "now", "arguments": {}}]')
    status, answer = await site.post(CHAT, {**body, "tool_choice": "required"})
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


async def test_the_parser_is_known_from_the_template() -> None:
    template = (
        r"{% if tools %}<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}"
        "{% endif %}{% if messages[0].tool_calls %}{% endif %}"
    )
    async with running_site(ready=False) as site:
        site.backend.chat_template = template
        site.backend.ready()
        while not site.service.client.status.is_loaded:
            await site.get("/live")
        site.backend.script = forced(ONE)
        _, reason = await both(site)
        assert reason == "tool_calls"
        prompt = site.backend.generates[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert prompt.tools == TOOLS
        assert prompt.messages == USER, "a template that knows tools needs no words of ours"


async def test_templates_without_tools_get_them_in_words(hermes: Site) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
    ]
    await hermes.post(CHAT, {"messages": messages, "tools": TOOLS})
    prompt = hermes.backend.generates[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    system, _, call, result = prompt.messages
    assert system["content"].startswith("Be brief.\n\n")
    assert json.dumps(WEATHER) in system["content"]
    assert call == {"role": "assistant", "content": NO_ARGUMENTS}
    assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}
    await hermes.post("/tokenize", {"messages": messages, "tools": TOOLS})
    assert hermes.backend.tokenizes[-1].prompt == prompt


async def test_special_marks_of_the_format_are_asked_for() -> None:
    async with running_site(tool_call_parser="mistral") as site:
        site.backend.script = forced('[TOOL_CALLS][{"name": "now", "arguments": {}}]')
        message, _ = await both(site)
        assert len(message["tool_calls"][0]["id"]) == 9
        assert "[TOOL_CALLS]" in site.backend.generates[-1].shown_special
        await site.post(CHAT, {"messages": USER})
        assert site.backend.generates[-1].shown_special == []


async def test_functions_are_the_old_name_of_tools(hermes: Site) -> None:
    hermes.backend.script = forced(NO_ARGUMENTS)
    old = {"messages": USER, "functions": [NOW["function"]]}
    status, answer = await hermes.post(CHAT, old)
    assert status == 200
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    await hermes.post(CHAT, {**old, "function_call": {"name": "now"}})
    assert hermes.backend.generates[-1].params.structured is not None
    await hermes.post(CHAT, {**old, "function_call": "none"})
    prompt = hermes.backend.generates[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.tools == []


async def test_calls_of_the_history_in_both_spellings(hermes: Site) -> None:
    function = {"name": "now", "arguments": '{"a": 1}'}
    for old in (False, True):
        call = {"id": "x", "type": "function", "function": function}
        said = {"function_call": function} if old else {"tool_calls": [call]}
        result = (
            {"role": "function", "name": "now"} if old else {"role": "tool", "tool_call_id": "x"}
        )
        messages = [*USER, {"role": "assistant", **said}, {**result, "content": "noon"}]
        status, _ = await hermes.post(CHAT, {"messages": messages})
        assert status == 200
        prompt = hermes.backend.generates[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert '{"name": "now", "arguments": {"a": 1}}' in prompt.messages[1]["content"]
        assert "noon" in prompt.messages[2]["content"]
    bad = [{"role": "assistant", "function_call": {"arguments": "{}"}}]
    _, answer = await hermes.post(CHAT, {"messages": bad})
    assert answer["error"]["param"] == "messages[0].function_call.name"


# --- reasoning --------------------------------------------------------------------------------------------


async def test_reasoning_is_split_off_and_counted() -> None:
    async with running_site(reasoning_parser="qwen3", tool_call_parser="hermes") as site:
        pieces = ["<think>", "\n", "Hm", ".", "\n</think>", "\n\n", "Hi", NO_ARGUMENTS]
        site.backend.script = lambda g: Script(pieces)
        message, reason = await both(site)
        assert message["reasoning_content"] == "Hm."
        assert message["content"] == "Hi"
        assert reason == "tool_calls"
        body = {"messages": USER, "stream_options": {"include_usage": True}}
        usage = (await streamed(site, body))[-1]["usage"]
        assert usage["completion_tokens"] == 8
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}
        _, whole = await site.post(CHAT, {"messages": USER})
        assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


async def test_templates_that_open_the_reasoning(hermes: Site) -> None:
    async with running_site(reasoning_parser="qwen3", reasoning_field="both") as site:
        for end, reasoning, content in (
            ("assistant\n<think>\n", "Hm.", "Hi"),
            ("<think>\n\n</think>\n\n", None, "Hm.</think>Hi"),
        ):
            site.backend.script = forced("Hm.</think>Hi", prompt_end=end)
            _, answer = await site.post(CHAT, {"messages": USER})
            message = answer["choices"][0]["message"]
            assert message["content"] == content
            assert message.get("reasoning_content") == message.get("reasoning") == reasoning
        site.backend.script = forced(
            "never closed", prompt_end="<think>", finish=FinishReason.LENGTH
        )
        _, answer = await site.post(CHAT, {"messages": USER})
        assert answer["choices"][0]["message"]["reasoning_content"] == "never closed"
        assert answer["choices"][0]["message"]["content"] == ""
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == answer["usage"]["completion_tokens"]


async def test_forced_calls_may_be_reasoned_about_first() -> None:
    async with running_site(reasoning_parser="qwen3", tool_call_parser="hermes") as site:
        site.backend.script = forced(f"<think>Hm.</think>{ONE}")
        message, _ = await both(site, tool_choice="required")
        assert message["reasoning_content"] == "Hm."
        generate = site.backend.generates[-1]
        assert generate.reasoning_mark == "<think>"
        assert '("<think>" reasoning' in generate.params.structured.value
        assert generate.structured_after_mark is not None
        assert "start: reasoning" in generate.structured_after_mark.value


async def test_logprobs_come_with_the_first_chunk_after_their_token(hermes: Site) -> None:
    pieces = ["Hi", " <tool_call>", '{"name": "now"', "}</tool_call>"]
    entries = [logprob(piece, -0.5, []) for piece in pieces]
    hermes.backend.script = lambda g: Script(pieces, logprobs=entries)
    body = {"messages": USER, "tools": TOOLS, "logprobs": True}
    chunks = await streamed(hermes, body)
    told = [
        entry["token"]
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert told == pieces
    _, answer = await hermes.post(CHAT, body)
    assert [e["token"] for e in answer["choices"][0]["logprobs"]["content"]] == pieces


# --- other fields -------------------------------------------------------------------------------------------


async def test_echo_puts_the_final_assistant_message_before_the_answer(site: Site) -> None:
    site.backend.script = forced("is Oslo.")
    messages = [*USER, {"role": "assistant", "content": "The capital "}]
    body = {"messages": messages, "echo": True, "continue_final_message": True}
    _, answer = await site.post(CHAT, body)
    assert answer["choices"][0]["message"]["content"] == "The capital is Oslo."
    message, _ = joined(await streamed(site, body))
    assert message["content"] == "The capital is Oslo."
    _, answer = await site.post(CHAT, {"messages": USER, "echo": True})
    assert answer["choices"][0]["message"]["content"] == "is Oslo."


async def test_request_templates_need_trust_and_documents_a_place() -> None:
    body = {"messages": USER, "chat_template": "{{ documents }}", "documents": [{"text": "x"}]}
    async with running_site(trust_request_chat_template=True) as site:
        assert (await site.post(CHAT, body))[0] == 200
        prompt = site.backend.generates[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        assert (prompt.chat_template, prompt.documents) == ("{{ documents }}", [{"text": "x"}])
        status, answer = await site.post(CHAT, {**body, "chat_template": "{{ messages }}"})
        assert (status, answer["error"]["param"]) == (400, "documents")


def bad(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **changes}}


BAD = [
    ({"tools": []}, "tools", "invalid_value"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [1]}, "tools[0]", "invalid_type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", "missing_field"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_field"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_field"),
    ({"tools": [bad(name="a b")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [bad(name="é")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [bad(name="x" * 65)]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [bad(), bad()]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [bad(description=1)]}, "tools[0].function.description", "invalid_type"),
    ({"tools": [bad(parameters=[])]}, "tools[0].function.parameters", "invalid_type"),
    (
        {"tools": [bad(parameters={"type": "array"})]},
        "tools[0].function.parameters.type",
        "invalid_value",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "invalid_value"),
    ({"tools": TOOLS, "tool_choice": 1}, "tool_choice", "invalid_type"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function"}},
        "tool_choice.function",
        "missing_field",
    ),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions", "invalid_value"),
    ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name", "missing_field"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_value"),
    ({"documents": [{"text": "x"}]}, "documents", "unsupported_value"),
    ({"documents": ["x"]}, "documents[0]", "invalid_type"),
    (
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "structured_outputs": {"json": {"type": "object"}},
        },
        "tool_choice",
        "invalid_value",
    ),
]


async def test_mistakes_name_their_field(hermes: Site) -> None:
    for body, param, code in BAD:
        status, answer = await hermes.post(CHAT, {"messages": USER, **body})
        error = answer.get("error", answer)
        assert (status, error.get("param"), error.get("code")) == (400, param, code), body
    assert hermes.backend.generates == []


# --- OpenAI's client ------------------------------------------------------------------------------------------


async def test_official_async_client(hermes: Site) -> None:
    hermes.backend.script = forced(f"{ONE}\n{NO_ARGUMENTS}")
    async with openai.AsyncOpenAI(
        base_url=hermes.url + "/v1", api_key="x", max_retries=0
    ) as client:
        whole = await client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
        calls = whole.choices[0].message.tool_calls
        assert calls is not None
        assert [c.function.name for c in calls] == ["weather", "now"]
        assert json.loads(calls[0].function.arguments)["city"] == 'Tromsø "😀"\n'
        stream = client.chat.completions.stream(model="tiny", messages=USER, tools=TOOLS)
        async with stream as events:
            final = await events.get_final_completion()
        again = final.choices[0].message.tool_calls
        assert again is not None
        assert [c.function.arguments for c in again] == [ARGUMENTS, "{}"]
        assert final.choices[0].finish_reason == "tool_calls"


async def test_official_sync_client(hermes: Site) -> None:
    hermes.backend.script = forced(NO_ARGUMENTS)
    result: dict[str, Any] = {}

    def use() -> None:
        with openai.OpenAI(base_url=hermes.url + "/v1", api_key="x", max_retries=0) as client:
            first = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS)
            message = first.choices[0].message
            assert message.tool_calls
            follow_up: Any = [
                *USER,
                message,
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noon"},
            ]
            with client.chat.completions.stream(
                model="tiny", messages=follow_up, tools=TOOLS
            ) as stream:
                result["final"] = stream.get_final_completion()

    thread = threading.Thread(target=use)
    thread.start()
    while thread.is_alive():
        await hermes.get("/live")
    calls = result["final"].choices[0].message.tool_calls
    assert [c.function.arguments for c in calls] == ["{}"]
