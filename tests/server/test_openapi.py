"""/openapi.json says what the server does: each field, range, default, path, error and response."""

import ast
import json
from copy import deepcopy
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from engine.api.messages import FinishReason
from engine.api.sampling import SamplingParams
from server.answer.call_format import FORMATS
from server.app import build_app
from server.errors import ApiError
from server.openapi import BODIES, CODES, OPERATIONS
from server.page import PAGE_PATHS
from server.schema.chat import parse_chat
from server.schema.chat_rules import ChatRules
from server.schema.completions import parse_completion
from server.schema.fields import Field, nullable
from server.schema.sampling import SamplingDefaults
from server.schema.tokenize import parse_detokenize, parse_tokenize
from tests.contracts.source import ROOT, sources
from tests.server.conftest import read_paced_events, running_site
from tests.server.fake_backend import Script, logprob

ADMIN = {"Authorization": "Bearer admin"}
USER = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
RULES = ChatRules(
    calls=FORMATS["hermes"], trusts_templates=True, template="{{ messages }} documents"
)


async def description(**settings: Any) -> dict[str, Any]:
    async with (
        running_site(**settings) as site,
        site.session.get(site.url + "/openapi.json", headers=ADMIN) as response,
    ):
        assert response.status == 200
        return await response.json()


# --- the document -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"admin_key": "admin", "api_key": ["user"]}])
async def test_is_valid_openapi(settings: dict[str, Any]) -> None:
    document = await description(**settings)
    assert list(OpenAPIV31SpecValidator(document).iter_errors()) == []
    ids = [o["operationId"] for methods in document["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))


async def test_every_route_is_described_and_nothing_else() -> None:
    async with running_site(admin_key="admin") as site:
        routed = {
            (route.method, route.resource.canonical)
            for route in build_app(site.service).router.routes()
            if route.method != "HEAD" and route.resource is not None
        }
    routed = {(m, p) for m, p in routed if p == "/" or not p.endswith("/")}
    routed = {(m, p) for m, p in routed if p not in PAGE_PATHS}
    assert routed == set(OPERATIONS)


async def test_paths_exist_where_they_are_served() -> None:
    assert "/server_info" not in (await description())["paths"]
    managed = await description(admin_key="admin", api_key=["user"])
    paths = managed["paths"]
    assert paths["/live"]["get"]["security"] == []
    assert {"bearer": []} in paths["/v1/models"]["get"]["security"]
    assert "403" in paths["/server_info"]["get"]["responses"]
    assert "403" not in paths["/v1/models"]["get"]["responses"]


def test_all_codes_are_listed() -> None:
    """Every ApiError and PromptError of the sources, by its literal status and code."""
    raised: set[tuple[int, str]] = set()
    for source in sources("server", "tokenizer_proc"):
        for node in ast.walk(source.tree):
            name = getattr(getattr(node, "func", None), "id", "")
            if name not in ("ApiError", "PromptError"):
                continue
            match [a.value if isinstance(a, ast.Constant) else None for a in node.args[:2]]:
                case [int(status), str(code)]:
                    raised.add((status, code))
    listed = {(status, code) for status, codes in CODES.items() for code in codes}
    assert raised - listed == set()
    # Those whose status or code is no literal: messages of other processes, and HTTP itself.
    assert {code for _, code in listed - raised} <= {
        *("context_length_exceeded", "exceeds_kv_capacity", "invalid_http", "invalid_schema"),
        *("engine_dead", "invalid_messages", "unsupported_content_type"),
    }


def test_all_codes_are_in_the_documentation() -> None:
    text = (ROOT / "docs/http.md").read_text()
    codes = {code for codes in CODES.values() for code in codes}
    assert {code for code in codes if f"`{code}`" not in text} == set()


async def test_limits_of_the_operator_and_defaults_of_the_model() -> None:
    document = await description(
        max_n=3, max_logprobs=5, max_stop=2, request_timeout=9.0, strict_fields=True,
        served_model_name=["a", "b"],
    )  # fmt: skip
    schema = document["components"]["schemas"]["CompletionRequest"]
    fields = schema["properties"]
    assert fields["n"]["maximum"] == 3 == fields["best_of"]["maximum"]
    assert fields["prompt_logprobs"]["maximum"] == 5
    assert [one.get("maximum") for one in fields["logprobs"]["anyOf"]] == [None, 5, None]
    assert [one.get("maxItems") for one in fields["stop"]["anyOf"]] == [None, 2, None]
    assert fields["timeout"]["maximum"] == 9
    assert fields["model"] == {"enum": ["a", "b"]}
    assert schema["required"] == ["prompt", "model"]
    assert schema["additionalProperties"] is False
    assert fields["max_tokens"]["default"] == 16
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert "default" not in chat["max_tokens"]
    assert chat["temperature"]["default"] == SamplingParams().temperature
    async with running_site() as site:
        site.service.defaults = SamplingDefaults({"temperature": 0.3}, max_new_tokens=7)
        _, document = await site.get("/openapi.json")
    chat = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert (chat["temperature"]["default"], chat["max_tokens"]["default"]) == (0.3, 7)


# --- fields: the schema and the parser agree ---------------------------------------------------------

# What a field needs beside it to mean anything.
COMPANIONS: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": TOOLS},
    "function_call": {"functions": [TOOLS[0]["function"]]},
    "guided_whitespace_pattern": {"guided_json": {}},
    "best_of": {"n": 1},
    "continue_final_message": {"messages": [*USER, {"role": "assistant", "content": "a"}]},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**31 - 1},
}
PARSERS = {
    "ChatRequest": lambda body: parse_chat(body, SamplingDefaults(), RULES).common,
    "CompletionRequest": lambda body: parse_completion(body, SamplingDefaults()).common,
    "TokenizeRequest": lambda body: parse_tokenize(body, RULES),
    "DetokenizeRequest": parse_detokenize,
}
BASES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": USER},
    "CompletionRequest": {"prompt": "x"},
    "TokenizeRequest": {"messages": USER},
    "DetokenizeRequest": {"tokens": [1]},
}
FIELDS = [(body, name) for body in PARSERS for name in BODIES[body]]

# Values of every kind; the schema says which of them are right for a field.
KINDS: list[Any] = [
    True, False, 0, 1, 2, -1, 1.0, 0.5, -0.5, 1e300, 2**31, 2**40, "", "x", "1", "text", [], {}, [0],
    ["a"], ["a", 1], [[1]], [[]], [["a"]], [None], [1.0], [-1], [0.5], [2**31], {"type": "text"},
    {"type": "json_object"}, {"type": "json_schema"}, {"type": None}, {"json": {}}, {"regex": "a"},
    {"json": {}, "regex": "a"}, {"json_object": True}, {"json_object": False}, {"other": 1},
    {"json": None, "choice": ["a"]}, {"choice": []}, {"type": "json_schema", "json_schema": {"schema": {}}},
    {"type": "json_schema", "json_schema": {"schema": True}}, {"include_usage": True},
    {"include_usage": 1}, {"include_usage": None, "x": 1}, {"5": 1}, {"-5": 1}, {"a": 1}, {"5": True},
    {"5": 100}, {"5": 100.5}, {"5": None}, {"12345678901": 1}, {str(i): 0 for i in range(1025)},
    {"messages": 1}, {"enable_thinking": False}, "none", "auto", "required", TOOLS, TOOLS * 2,
    {"type": "function", "function": {"name": "f"}}, {"function": {"name": "f"}}, {"name": "f"},
    {"type": "x", "function": {"name": "f"}}, {"name": None}, [{"name": "f"}], [{"name": "f f"}],
    [{"name": "f", "parameters": {"type": "object"}}], [{"name": "f", "parameters": {"type": "array"}}],
    [{"name": "f", "strict": None, "description": None}], [{"name": "f", "strict": 1}],
    [{"type": "function", "function": {}}], ["text"], ["text", "audio"],
]  # fmt: skip
MESSAGES: list[Any] = [
    {"role": role, **more}
    for role in ("system", "developer", "user", "assistant", "tool", "function", "robot", None)
    for more in (
        {}, {"content": "a"}, {"content": None}, {"content": []}, {"content": 5},
        {"content": [{"type": "text", "text": "a"}]}, {"content": [{"type": "text"}]},
        {"content": [{"type": "refusal", "refusal": "a"}]}, {"content": [{"type": "image_url"}]},
        {"content": ["a"]}, {"content": "a", "tool_call_id": "1"}, {"content": "a", "name": None},
        {"content": "a", "tool_call_id": None},
        {"content": "a", "name": 5}, {"content": "a", "reasoning": "b"}, {"refusal": "no"},
        {"refusal": 5}, {"tool_calls": []}, {"tool_calls": None, "content": "a"},
        {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"id": None, "function": {"name": "f", "arguments": {}}}]},
        {"tool_calls": [{"id": 0, "function": {"name": "f"}}]},
        {"tool_calls": [{"type": None, "function": {"name": "f"}}]},
        {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}, {"tool_calls": [{}]},
        {"function_call": {"name": "f"}}, {"function_call": {}}, {"function_call": None},
    )
]  # fmt: skip


def edges(schema: Any) -> list[Any]:
    """Values below, at and above every bound of a schema."""
    found: list[Any] = []
    for key, bound in schema.items():
        is_integer = "integer" in str(schema.get("type"))
        step = 1 if is_integer else 1e-9
        match key:
            case "minimum" | "maximum" | "exclusiveMinimum":
                found += [bound - step, bound, bound + step]
            case "minLength" | "maxLength":
                found += ["x" * max(0, bound + d) for d in (-1, 0, 1)]
            case "minItems" | "maxItems":
                item = right_value(schema["items"])
                found += [[item] * max(0, bound + d) for d in (-1, 0, 1)]
            case "maxProperties":
                found += [{str(i): 1 for i in range(bound + d)} for d in (-1, 0, 1)]
            case "enum":
                found += bound
            case "const":
                found.append(bound)
            case "items":
                found += [[value] for value in edges(bound)]
            case "anyOf":
                found += [value for one in bound for value in edges(one)]
    return found


def right_value(schema: Any) -> Any:
    validator = jsonschema.Draft202012Validator(schema)
    return next(v for v in [5, "x", [5], *MESSAGES, *TOOLS, {"name": "f"}] if validator.is_valid(v))


def is_taken(body: str, name: str, value: Any) -> bool:
    base = {k: v for k, v in BASES[body].items() if k != name}
    if body == "TokenizeRequest" and name == "prompt":
        base = {}
    companions = COMPANIONS.get(name, {}) if body != "DetokenizeRequest" else {}
    request = deepcopy({**base, **companions, name: value})
    try:
        PARSERS[body](request)
    except ApiError as error:
        return error.status != 400
    return True


def is_wrong_beside_others(body: str, name: str, value: Any) -> bool:
    """What the schema of one field cannot say."""
    if name in ("tools", "functions"):
        functions = [tool.get("function", tool)["name"] for tool in value or []]
        return len(set(functions)) < len(functions)
    return body == "TokenizeRequest" and name in ("prompt", "messages") and value is None


@pytest.mark.parametrize(("body", "name"), FIELDS, ids=lambda v: v)
def test_each_bound_is_the_real_bound(body: str, name: str) -> None:
    """Whatever the schema takes the parser takes, and nothing else."""
    field: Field = BODIES[body][name]
    schema = field.schema if field.is_required else nullable(field.schema)
    validator = jsonschema.Draft202012Validator(schema)
    values = [*KINDS, None, *edges(field.schema)]
    if name == "messages":
        values += [[message] for message in MESSAGES]
    wrong = []
    for value in values:
        is_right = validator.is_valid(value)
        if is_right and is_wrong_beside_others(body, name, value):
            continue
        if is_taken(body, name, value) != is_right:
            wrong.append((str(value)[:100], "schema takes it" if is_right else "parser takes it"))
    assert wrong == []


def test_accepted_fields_are_those_described() -> None:
    for body, table in BODIES.items():
        if body not in PARSERS:
            continue
        for name in table:
            request = deepcopy(BASES[body])
            request.setdefault(name, None)
            assert PARSERS[body](request).ignored == []
        assert PARSERS[body]({**BASES[body], "no_such_field": 1}).ignored == ["no_such_field"]


@pytest.mark.parametrize("body", ["ChatRequest", "CompletionRequest"])
async def test_defaults_are_what_an_absent_field_means(body: str) -> None:
    """Sending the default changes nothing."""
    document = await description()
    schema = document["components"]["schemas"][body]["properties"]
    plain = PARSERS[body](deepcopy(BASES[body]))
    tried = 0
    for name, field in schema.items():
        if "default" not in field or field["default"] in ([], {}):
            continue
        request = {**deepcopy(BASES[body]), name: field["default"]}
        if name == "parallel_tool_calls":
            continue  # nothing without tools
        parsed = PARSERS[body](request)
        if name == "max_tokens":  # a default may be lowered, what is asked for may not
            assert parsed.params == plain.params
        else:
            assert parsed == plain, name
        tried += 1
    assert tried > 15


# --- responses ------------------------------------------------------------------------------------------


def closed(schema: Any) -> Any:
    """Without room for members that the description does not name."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


class Responses:
    def __init__(self, document: dict[str, Any]) -> None:
        self._components = {"components": closed(document["components"])}
        self._paths = document["paths"]

    def check(self, value: Any, name: str) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", **self._components}
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)

    def check_answer(self, method: str, path: str, status: int, value: Any) -> None:
        described = self._paths[path][method]["responses"][str(status)]
        schema = described["content"]["application/json"]["schema"]
        jsonschema.validate(value, {**schema, **self._components}, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER}),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 1, "n": 2}),
        ("/v1/chat/completions", {"messages": USER, "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": USER, "return_token_ids": True}),
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1}),
        ("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "return_token_ids": True}),
        ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
        ("/v1/detokenize", {"tokens": [1, 2]}),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
async def test_answers_and_chunks_are_as_described(
    path: str, body: dict[str, Any], streams: bool
) -> None:
    if streams and ("prompt_logprobs" in body or "tokenize" in path):
        pytest.skip("not streamed")
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with running_site(**settings, enable_request_metrics=True) as site:
        responses = Responses((await site.get("/openapi.json"))[1])
        call = '<think>so</think>Hm<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        entry = logprob("a", -1.0, [("a", -1.0)])
        site.backend.script = lambda g: Script(
            pieces=[call[:7], call[7:40], call[40:]] if "tools" in body else ["a", "b", "c"],
            logprobs=[entry] * 3 if g.params.logprobs is not None else None,
            finish=FinishReason.STOP,
            stop_reason=5,
            paced=streams,
        )
        if not streams:
            status, answer = await site.post(path, body)
            assert status == 200
            responses.check_answer("post", path, 200, answer)
            return
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with site.session.post(site.url + path, json=body) as response:
            events = await read_paced_events(site, response)
        assert events.pop() == "[DONE]"
        assert len(events) >= 3
        name = OPERATIONS["POST", path].chunk
        for event in events:
            responses.check(json.loads(event), name)


async def test_other_answers_are_as_described() -> None:
    async with running_site(admin_key="admin", api_key=["user"]) as site:
        site.backend.stats(num_free_blocks=3)
        async with site.session.get(site.url + "/openapi.json", headers=ADMIN) as response:
            document = await response.json()
        responses = Responses(document)
        for path, methods in document["paths"].items():
            if "get" not in methods or path in ("/metrics", "/openapi.json") or "debug" in path:
                continue
            url = site.url + path.replace("{id}", "tiny")
            async with site.session.get(url, headers=ADMIN) as response:
                assert response.status == 200, path
                responses.check_answer("get", path, 200, await response.json())
            if "401" in methods["get"]["responses"]:
                async with site.session.get(url) as response:
                    assert response.status == 401
                    responses.check_answer("get", path, 401, await response.json())
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/embeddings"):
            status, answer = await site.post(path, {}, headers=ADMIN)
            assert status in (400, 501)
            responses.check_answer("post", path, status, answer)
        status, answer = await site.post("/admin/drain", {}, headers=ADMIN)
        responses.check_answer("post", "/admin/drain", 200, answer)
        status, answer = await site.get("/ready")
        responses.check_answer("get", "/ready", 503, answer)
