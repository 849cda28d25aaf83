"""GET /openapi.json: the API of this very server, in OpenAPI 3.1.

Fields, ranges and defaults come from the tables by which bodies are decoded (server/schema), lowered by
the operator's limits; paths and methods from the router; who may call them from `Access`. Only what each
path is for is written here (`OPERATIONS`), and what responses look like (server/schema/responses.py).
"""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from engine.api.sampling import SamplingParams
from server.access import KEY_HEADERS
from server.config import VERSION
from server.routes.debug import MAX_REQUESTS, MAX_STEPS
from server.routes.operations import ABORT_FIELDS, DRAIN_FIELDS
from server.schema.chat import CHAT_FIELDS
from server.schema.completions import COMPLETION_FIELDS
from server.schema.fields import Schema, Table, schema_of
from server.schema.limits import LIMITED
from server.schema.responses import COMPONENTS, ref
from server.schema.sampling import NO_EFFECT_FIELDS, SAMPLING_FIELDS, SamplingDefaults
from server.schema.tokenize import DETOKENIZE_FIELDS, ONE_PROMPT, TOKENIZE_FIELDS
from server.service import Service

# By status, all codes that errors have.
CODES: dict[int, tuple[str, ...]] = {
    400: (
        "context_length_exceeded",
        "empty_body",
        "empty_prompt",
        "exceeds_kv_capacity",
        "invalid_http",
        "invalid_json",
        "invalid_messages",
        "invalid_schema",
        "invalid_token_id",
        "invalid_type",
        "invalid_unicode",
        "invalid_value",
        "missing_field",
        "unknown_field",
        "unsupported_content_type",
        "unsupported_value",
    ),
    401: ("invalid_api_key",),
    403: ("forbidden",),
    404: ("model_not_found", "unknown_request", "unknown_url"),
    405: ("method_not_allowed",),
    408: ("request_timeout",),
    413: ("request_too_large",),
    415: ("unsupported_media_type",),
    417: ("expectation_failed",),
    429: ("queue_full", "rate_limit_exceeded"),
    431: ("headers_too_large",),
    500: ("aborted", "engine_dead", "internal_error"),
    501: ("not_implemented",),
    503: ("draining", "engine_dead", "not_ready", "queue_timeout"),
    504: ("engine_busy",),
}
WITH_RETRY_AFTER = (429, 503, 504)
OF_BODIES = (400, 404, 408, 413, 415)
OF_GENERATION = (*OF_BODIES, 429, 500, 503)


@dataclass(frozen=True)
class Operation:
    """What one method of a path takes and gives."""

    summary: str
    answers: str = ""  # name in COMPONENTS; "": Prometheus text
    body: str = ""  # name in BODIES
    errors: tuple[int, ...] = ()  # beside those of every path
    query: dict[str, Schema] = field(default_factory=dict)
    chunk: str = ""  # name in COMPONENTS of the events of a stream
    is_body_optional: bool = False
    unhealthy: bool = False  # a 503 has a body of its own


BODIES: dict[str, Table] = {
    "ChatRequest": CHAT_FIELDS,
    "CompletionRequest": COMPLETION_FIELDS,
    "TokenizeRequest": TOKENIZE_FIELDS,
    "DetokenizeRequest": DETOKENIZE_FIELDS,
    "DrainRequest": DRAIN_FIELDS,
    "AbortRequest": ABORT_FIELDS,
}
CLOSED_BODIES = ("DrainRequest", "AbortRequest")  # refuse unknown fields always
TOKENIZE = Operation("Text or messages to token ids", "Tokenized", "TokenizeRequest", OF_GENERATION)
DETOKENIZE = Operation("Token ids to text", "Detokenized", "DetokenizeRequest", OF_GENERATION)
HEALTH = Operation(
    "Is the engine alive and moving?",
    "Status",
    query={"deep": {"enum": ["0", "1"]}},
    unhealthy=True,
)
NOT_BUILT = Operation("Known, and not built", errors=(501,))
WISH = Operation("Asks the engine between two steps", "Object", errors=(503,))


def last(default: int, most: int) -> dict[str, Schema]:
    return {"last": {"type": "integer", "minimum": 1, "maximum": most, "default": default}}


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answers to messages",
        "ChatCompletion",
        "ChatRequest",
        OF_GENERATION,
        chunk="ChatCompletionChunk",
    ),
    ("POST", "/v1/completions"): Operation(
        "Continuations of text",
        "Completion",
        "CompletionRequest",
        OF_GENERATION,
        chunk="CompletionChunk",
    ),
    ("POST", "/tokenize"): TOKENIZE,
    ("POST", "/v1/tokenize"): TOKENIZE,
    ("POST", "/detokenize"): DETOKENIZE,
    ("POST", "/v1/detokenize"): DETOKENIZE,
    ("POST", "/v1/embeddings"): NOT_BUILT,
    ("POST", "/v1/responses"): NOT_BUILT,
    ("POST", "/v1/messages"): NOT_BUILT,
    ("GET", "/v1/models"): Operation("The names served", "ModelList"),
    ("GET", "/v1/models/{id}"): Operation(
        "One of them; it may have slashes", "Model", errors=(404,)
    ),
    ("GET", "/live"): Operation("Does the process answer?", "Status"),
    ("GET", "/health"): HEALTH,
    ("GET", "/ping"): HEALTH,
    ("GET", "/ready"): Operation("Should new requests be sent here?", "Status", unhealthy=True),
    ("GET", "/version"): Operation("The version", "Version"),
    ("GET", "/metrics"): Operation("Metrics for Prometheus"),
    ("GET", "/load"): Operation("How busy the server is", "Load"),
    ("GET", "/openapi.json"): Operation("This description", "Object"),
    ("GET", "/server_info"): Operation("Settings in effect", "Object"),
    ("GET", "/debug/kv"): Operation("The block map of the KV cache", "Object", errors=(503, 504)),
    ("GET", "/debug/requests"): Operation(
        "Who runs, who waits, and why", "Object", "", (400, 503, 504), last(200, MAX_REQUESTS)
    ),
    ("GET", "/debug/requests/{id}/timeline"): Operation(
        "What was decided about one request", "Object", errors=(404, 503, 504)
    ),
    ("GET", "/debug/steps"): Operation(
        "The latest steps", "Object", "", (400, 503, 504), last(100, MAX_STEPS)
    ),
    ("POST", "/admin/drain"): Operation(
        "Take no new requests, or take them again",
        "Object",
        "DrainRequest",
        OF_BODIES,
        is_body_optional=True,
    ),
    ("POST", "/admin/abort"): Operation(
        "End live requests", "Object", "AbortRequest", OF_BODIES, is_body_optional=True
    ),
    ("POST", "/admin/reset_prefix_cache"): WISH,
    ("POST", "/start_profile"): WISH,
    ("POST", "/stop_profile"): WISH,
}


def describe(service: Service, routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The document, for `routes`: (method, path) pairs of the router. Unlisted ones are left out."""
    paths: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        operation = OPERATIONS.get((method, path))
        if operation is not None:
            described = describe_operation(operation, method, path, service)
            paths.setdefault(path, {})[method.lower()] = described
    bodies = {name: body_schema(name, table, service) for name, table in BODIES.items()}
    keys = {name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADERS}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Sluice",
            "version": VERSION,
            "description": "In requests null is the same as leaving a field out. Unknown fields are "
            + ("refused." if service.config.strict_fields else "ignored, and named in a header."),
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": COMPONENTS | bodies,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, **keys},
        },
    }


def describe_operation(
    operation: Operation, method: str, path: str, service: Service
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()
    ]
    if "{id}" in path:
        parameters.append(
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        )
    result: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": operation_id(method, path),
        "parameters": parameters,
        "responses": responses(operation, path, service),
        "security": security(path, service),
    }
    if operation.body:
        content = {"application/json": {"schema": ref(operation.body)}}
        result["requestBody"] = {"required": not operation.is_body_optional, "content": content}
    return result


def operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").replace(".", "/").split("/")
    return "_".join([method.lower(), *(word for word in words if word)])


def responses(operation: Operation, path: str, service: Service) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    if 501 not in operation.errors:
        if operation.answers:
            content = {"application/json": {"schema": ref(operation.answers)}}
        else:
            content = {"text/plain": {"schema": {"type": "string"}}}
        if operation.chunk:
            content["text/event-stream"] = {
                "schema": {
                    "type": "string",
                    "description": f"with stream: true. Events `data: ` with a {operation.chunk}, "
                    "comment lines, `data: [DONE]` at the end; or an Error, and no [DONE]",
                    "contentSchema": ref(operation.chunk),
                }
            }
        answers["200"] = response("OK", content, ["X-Request-Id"])
    statuses = {*operation.errors, 417, 431}
    if security(path, service):
        statuses |= {401, 403} if is_for_admin(path, service) else {401}
    for status in sorted(statuses):
        content = {"application/json": {"schema": ref("Error")}}
        retry = ["Retry-After"] if status in WITH_RETRY_AFTER else []
        answers[str(status)] = response(", ".join(CODES[status]), content, ["X-Request-Id", *retry])
    if operation.unhealthy:
        content = {"application/json": {"schema": ref("NotHealthy")}}
        answers["503"] = response("not now", content, ["X-Request-Id", "Retry-After"])
    return answers


def response(description: str, content: dict[str, Any], headers: list[str]) -> dict[str, Any]:
    described = {name: {"schema": {"type": "string"}} for name in headers}
    return {"description": description, "content": content, "headers": described}


def security(path: str, service: Service) -> list[dict[str, list[str]]]:
    """Any of these keys opens the path; none is needed if there are none."""
    access = service.access
    if access.is_open(path) or not (access.user_keys or access.admin_key):
        return []
    if not access.user_keys and not is_for_admin(path, service) and path != "/metrics":
        return []
    return [{name: []} for name in ("bearer", *KEY_HEADERS)]


def is_for_admin(path: str, service: Service) -> bool:
    return service.access.admin_key is not None and service.access.is_admin_path(path)


def body_schema(body: str, table: Table, service: Service) -> Schema:
    """A table's schema, with this server's defaults and limits."""
    is_closed = body in CLOSED_BODIES or service.config.strict_fields
    schema = deepcopy(schema_of(table, **({"additionalProperties": False} if is_closed else {})))
    properties = schema["properties"]
    for name, entry in properties.items():
        if name in NO_EFFECT_FIELDS:
            entry["description"] = "accepted, without effect"
        elif entry == {"type": "null"}:
            entry["description"] = "not supported"
        if name in LIMITED:
            properties[name] = lowered(entry, getattr(service.config, LIMITED[name][1]))
        if name in SAMPLING_FIELDS and "default" not in properties[name]:
            default = sampling_default(name, service.defaults)
            if default is not None:
                properties[name] = properties[name] | {"default": default}
    if "timeout" in properties and service.config.request_timeout:
        properties["timeout"]["maximum"] = service.config.request_timeout
    if table is TOKENIZE_FIELDS:
        schema["oneOf"] = ONE_PROMPT
    require_model(schema, service)
    return schema


def require_model(schema: Schema, service: Service) -> None:
    """`model` is one of the names served, and may be left out if there is one only."""
    if "model" not in schema["properties"]:
        return
    names: list[str | None] = [*service.model_names]
    if len(names) > 1:
        schema["required"] = [*schema.get("required", []), "model"]
    else:
        names.append(None)
    schema["properties"]["model"] = {"enum": names}


def lowered(schema: Schema, most: int) -> Schema:
    """With every greatest number or length at most `most`."""
    result = {
        key: min(v, most) if key in ("maximum", "maxItems") else v for key, v in schema.items()
    }
    if "anyOf" in result:
        result["anyOf"] = [lowered(one, most) for one in result["anyOf"]]
    return result


def sampling_default(name: str, defaults: SamplingDefaults) -> Any:
    """The model's own, or that of SamplingParams; None: there is none."""
    if name == "max_tokens":
        return defaults.max_new_tokens
    if name in defaults.values:
        return defaults.values[name]
    return getattr(SamplingParams(), name)
