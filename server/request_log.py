"""One log line for each request that has ended, if --log-requests asks for it.

Prompts are in it only with `--log-requests prompts`, cut and as JSON, so that one request stays one
line whatever it holds. Keys never are.
"""

import logging
import re
from typing import Any

import msgspec
import orjson
from aiohttp import web

from engine.api.messages import ChatPrompt, Prompt, TextPrompt
from server.request_metrics import request_metrics
from server.service import NOTES, RequestNotes

logger = logging.getLogger(__name__)

# Asked all the time: not logged.
PROBES = frozenset({"/live", "/health", "/ping", "/ready", "/metrics", "/load"})
MAX_PROMPT_CHARS = 2000
# https://www.w3.org/TR/trace-context/#traceparent-header: version, trace id, parent id, flags
TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def log_request(
    request: web.Request, path: str, outcome: str, seconds: float, with_prompts: bool
) -> None:
    """`path`: the route's; `outcome`: the status, 499 where the client has gone."""
    if path in PROBES or path.startswith("/debug/"):
        return
    notes = request[NOTES]
    parts = [f"id={notes.request_id} {request.method} {path} status={outcome}"]
    if notes.key is not None and notes.key.name:
        parts.append(f"key={notes.key.name}")
    parts += [f"{name}={value}" for name, value in details(notes).items() if value is not None]
    parts.append(f"seconds={seconds:.3f}")
    if trace := trace_of(request.headers.get("traceparent", "")):
        parts.append("trace_id={} parent_id={}".format(*trace))
    if with_prompts and notes.prompts:
        parts.append(f"prompts={shown_prompts(notes.prompts)}")
    logger.info("request %s", " ".join(parts))


def details(notes: RequestNotes) -> dict[str, Any]:
    """Sizes, times and how it ended; nothing for a request that generated nothing."""
    stream, usage = notes.stream, notes.usage
    if stream is None:
        return {"error": notes.error_code or None}
    reasons = sorted({choice.finish_reason or "none" for choice in stream.choices})
    times = request_metrics(stream)
    return {
        "prompt_tokens": usage.get("prompt_tokens", 0),
        "completion_tokens": usage.get("completion_tokens", 0),
        "cached_tokens": sum(stream.num_cached_tokens),
        "choices": len(stream.choices),
        "finish_reason": ",".join(reasons),
        "queue_ms": times["queue_time_ms"],
        "ttft_ms": times["time_to_first_token_ms"],
        "itl_ms": times["mean_itl_ms"],
        "error": notes.error_code or None,
        "stream_error": notes.stream_error or None,
    }


def trace_of(header: str) -> tuple[str, str] | None:
    """Trace id and parent id of a W3C traceparent header; None if it is not valid."""
    match = TRACEPARENT.fullmatch(header.strip())
    if match is None or (header.startswith("00") and match[3]):
        return None
    trace_id, parent_id = match[1], match[2]
    if not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return trace_id, parent_id


def shown_prompts(prompts: list[Prompt]) -> str:
    """JSON without line breaks, cut to MAX_PROMPT_CHARS."""
    text = orjson.dumps([prompt_content(prompt) for prompt in prompts]).decode()
    if len(text) > MAX_PROMPT_CHARS:
        return f"{text[:MAX_PROMPT_CHARS]}... ({len(text)} characters)"
    return text


def prompt_content(prompt: Prompt) -> Any:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if isinstance(prompt, ChatPrompt):
        return msgspec.to_builtins(prompt.messages)
    return f"{len(prompt.token_ids) // 4} token ids"
