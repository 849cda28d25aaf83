"""What responses look like, as JSON schemas for /openapi.json. Tests hold real responses against them."""

from typing import Any

from server.errors import TYPE_OF_STATUS
from server.request_metrics import METRICS
from server.schema.fields import Schema, any_of

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
REAL: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
TOKEN_IDS: Schema = {"type": "array", "items": COUNT}
FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
STOP_REASON: Schema = {
    "type": ["string", "integer", "null"],
    "description": "the stop string or the id of stop_token_ids that ended the text",
}


def answer(optional: dict[str, Schema] | None = None, /, **members: Schema) -> Schema:
    """An object that always has `members`, and some of `optional`."""
    return {
        "type": "object",
        "properties": members | (optional or {}),
        "required": list(members),
    }


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def maybe(schema: Schema) -> Schema:
    return any_of(schema, NULL)


def fixed(value: str) -> Schema:
    return {"const": value}


COUNTS = {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT}
USAGE = answer(
    {
        "prompt_tokens_details": answer(cached_tokens=COUNT),
        "completion_tokens_details": answer(reasoning_tokens=COUNT),
    },
    **COUNTS,
)
TIMES = answer(**{name: {"type": ["number", "null"]} for name in METRICS})
ENVELOPE = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT}

TOKEN = {"token": TEXT, "logprob": REAL, "bytes": array({"type": "integer", "maximum": 255})}
CHAT_LOGPROBS = answer(
    content=array(answer(**TOKEN, top_logprobs=array(answer(**TOKEN)))), refusal=NULL
)
TEXT_LOGPROBS = answer(
    tokens=array(TEXT),
    token_logprobs=array({"type": ["number", "null"]}),
    top_logprobs=array(maybe({"type": "object", "additionalProperties": REAL})),
    text_offset=array(COUNT),
)
PROMPT_LOGPROBS = array(
    maybe(
        {
            "type": "object",
            "description": "by token id",
            "additionalProperties": answer(logprob=REAL, rank=COUNT, decoded_token=TEXT),
        }
    )
)

FUNCTION_CALL = answer(name=TEXT, arguments=TEXT)
REASONING = {"reasoning_content": TEXT, "reasoning": TEXT}
MESSAGE = answer(
    {
        **REASONING,
        "tool_calls": array(
            answer(id=TEXT, type=fixed("function"), function=FUNCTION_CALL), minItems=1
        ),
    },
    role=fixed("assistant"),
    content={"type": ["string", "null"]},
    refusal=NULL,
)
DELTA = answer(
    {
        "role": fixed("assistant"),
        "content": TEXT,
        **REASONING,
        "tool_calls": array(
            answer(
                {"id": TEXT, "type": fixed("function")},
                index=COUNT,
                function=answer({"name": TEXT}, arguments=TEXT),
            )
        ),
    }
)

CHAT_COMPLETION = answer(
    {"metrics": TIMES, "prompt_logprobs": PROMPT_LOGPROBS, "prompt_token_ids": TOKEN_IDS},
    **ENVELOPE,
    object=fixed("chat.completion"),
    choices=array(
        answer(
            {"token_ids": TOKEN_IDS},
            index=COUNT,
            message=ref("AssistantMessage"),
            logprobs=maybe(ref("ChatLogprobs")),
            finish_reason=FINISH,
            stop_reason=STOP_REASON,
        )
    ),
    usage=ref("Usage"),
)
CHAT_CHUNK = answer(
    {"usage": maybe(ref("Usage")), "metrics": TIMES, "prompt_token_ids": TOKEN_IDS},
    **ENVELOPE,
    object=fixed("chat.completion.chunk"),
    choices=array(
        answer(
            {"token_ids": TOKEN_IDS, "stop_reason": STOP_REASON},
            index=COUNT,
            delta=ref("Delta"),
            logprobs=maybe(ref("ChatLogprobs")),
            finish_reason=maybe(FINISH),
        ),
        maxItems=1,
    ),
)
COMPLETION = answer(
    {"metrics": TIMES},
    **ENVELOPE,
    object=fixed("text_completion"),
    choices=array(
        answer(
            {
                "prompt_logprobs": PROMPT_LOGPROBS,
                "token_ids": TOKEN_IDS,
                "prompt_token_ids": TOKEN_IDS,
            },
            index=COUNT,
            text=TEXT,
            logprobs=maybe(ref("TextLogprobs")),
            finish_reason=FINISH,
            stop_reason=STOP_REASON,
        )
    ),
    usage=ref("Usage"),
)
COMPLETION_CHUNK = answer(
    {"usage": maybe(ref("Usage")), "metrics": TIMES},
    **ENVELOPE,
    object=fixed("text_completion"),
    choices=array(
        answer(
            {"token_ids": TOKEN_IDS, "prompt_token_ids": TOKEN_IDS, "stop_reason": STOP_REASON},
            index=COUNT,
            text=TEXT,
            logprobs=maybe(ref("TextLogprobs")),
            finish_reason=maybe(FINISH),
        ),
        maxItems=1,
    ),
)

MODEL = answer(
    id=TEXT,
    object=fixed("model"),
    created=COUNT,
    owned_by=TEXT,
    root=TEXT,
    parent=NULL,
    max_model_len={"type": ["integer", "null"], "description": "null while the model loads"},
    permission=array({}),
)
STATUS = answer(status=TEXT)
NOT_HEALTHY = answer(
    {"phase": TEXT, "progress": {"type": "number", "minimum": 0, "maximum": 1}, "detail": TEXT},
    status={"enum": ["loading", "stalled", "dead", "draining", "queue_full"]},
    reason=TEXT,
    since=REAL,
)
ERROR = answer(
    error=answer(
        message=TEXT,
        type={"enum": sorted({"invalid_request_error", *TYPE_OF_STATUS.values()})},
        param={"type": ["string", "null"], "description": "path of the field that is wrong"},
        code=TEXT,
    )
)

# The named ones.
COMPONENTS: dict[str, Schema] = {
    "AssistantMessage": MESSAGE,
    "ChatCompletion": CHAT_COMPLETION,
    "ChatCompletionChunk": CHAT_CHUNK,
    "ChatLogprobs": CHAT_LOGPROBS,
    "Completion": COMPLETION,
    "CompletionChunk": COMPLETION_CHUNK,
    "Delta": DELTA,
    "Detokenized": answer(prompt=TEXT),
    "Error": ERROR,
    "Load": answer(
        status=TEXT,
        running=COUNT,
        waiting=COUNT,
        kv_cache_usage=REAL,
        free_blocks=COUNT,
        num_blocks=COUNT,
        max_num_seqs={"type": ["integer", "null"]},
        max_model_len={"type": ["integer", "null"]},
        max_queued_requests=COUNT,
    ),
    "Model": MODEL,
    "ModelList": answer(object=fixed("list"), data=array(ref("Model"))),
    "NotHealthy": NOT_HEALTHY,
    "Object": {"type": "object"},
    "Status": STATUS,
    "TextLogprobs": TEXT_LOGPROBS,
    "Tokenized": answer(
        {"token_strs": array(TEXT)}, count=COUNT, max_model_len=COUNT, tokens=TOKEN_IDS
    ),
    "Usage": USAGE,
    "Version": answer(version=TEXT),
}
