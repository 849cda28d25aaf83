"""GET /debug/kv, /debug/requests, /debug/steps and /debug/requests/{id}/timeline.

Sizes, states and reasons; never prompts or texts. With an admin key these are for operators only
(server/access.py).
"""

import time
from array import array
from typing import Any

import msgspec
from aiohttp import web

from engine.api.inspection import (
    BLOCK_STATES,
    KvReport,
    RequestReport,
    RequestsReport,
    StepReport,
    StepsReport,
    TimelineReport,
)
from engine.api.messages import Subject
from server.errors import ApiError, invalid_value
from server.routes.tokenize import json_response
from server.service import SERVICE, Service, engine_dead
from server.stream import Choice

MAX_STEPS = 1000
MAX_REQUESTS = 1000
MAX_TIMELINES = 16  # of the choices of one HTTP request


async def kv(request: web.Request) -> web.StreamResponse:
    """The block map, run-length encoded, and its totals."""
    service = loaded_service(request)
    report = await service.reports.ask(Subject.KV)
    assert isinstance(report, KvReport)
    lengths = array("i", report.lengths)
    runs = [(BLOCK_STATES[i], n) for i, n in zip(report.states, lengths, strict=True)]
    totals = dict.fromkeys(BLOCK_STATES, 0)
    for state, length in runs:
        totals[state] += length
    del totals["reserved"]
    num_blocks = sum(totals.values())
    return json_response(
        {
            "block_size": report.block_size,
            "num_blocks": num_blocks,
            "prefix_caching": report.enable_prefix_caching,
            "totals": totals,
            "usage": round((totals["used"] + totals["shared"]) / max(1, num_blocks), 4),
            "runs": runs,
            "host": report.host and msgspec.structs.asdict(report.host),
        }
    )


async def requests(request: web.Request) -> web.StreamResponse:
    """Who runs, who waits, and why."""
    service = loaded_service(request)
    limit = number_of(request, "last", 200, MAX_REQUESTS)
    report = await service.reports.ask(Subject.REQUESTS, limit)
    assert isinstance(report, RequestsReport)
    choices = {c.req_id: (c, name) for stream, name in service.live.items() for c in stream.choices}
    rows = []
    for row in report.requests:
        choice, name = choices.get(row.req_id, (None, None))
        rows.append(shown_request(row, report.now_ns, choice, name))
    encoding = [
        shown_encoding(choice, name)
        for choice, name in choices.values()
        if not choice.stream.num_prompt_tokens[choice.prompt_index] and choice.finish_reason is None
    ]
    return json_response(
        {
            "running": report.num_running,
            "waiting": report.num_waiting,
            "encoding": len(encoding),
            "requests": [*rows, *encoding[: limit - len(rows)]],
        }
    )


def shown_request(
    row: RequestReport, now_ns: int, choice: Choice | None, name: str | None
) -> dict[str, Any]:
    """`request_id` and `choice` are null for a request that its client has just left."""
    values = msgspec.structs.asdict(row)
    del values["arrival_ns"]
    values["id"] = values.pop("req_id")
    values["age_s"] = round((now_ns - row.arrival_ns) * 1e-9, 3)
    return {**values, "request_id": name, "choice": choice.index if choice else None}


def shown_encoding(choice: Choice, name: str) -> dict[str, Any]:
    """A request that has not come to the engine yet."""
    return {
        "id": choice.req_id,
        "state": "waiting",
        "phase": "encoding",
        "reason": "its prompt is being turned into tokens",
        "age_s": round((time.monotonic_ns() - choice.stream.arrival_ns) * 1e-9, 3),
        "request_id": name,
        "choice": choice.index,
    }


async def steps(request: web.Request) -> web.StreamResponse:
    """The latest steps, oldest first. Steps that computed nothing had a reason to wait."""
    service = loaded_service(request)
    report = await service.reports.ask(Subject.STEPS, number_of(request, "last", 100, MAX_STEPS))
    assert isinstance(report, StepsReport)
    return json_response({"steps": [shown_step(step) for step in report.steps]})


def shown_step(step: StepReport) -> dict[str, Any]:
    values = msgspec.structs.asdict(step)
    values["time"] = unix_time(values.pop("time_ns"))
    values["decisions"] = [{"id": req_id, "text": text} for req_id, text in step.decisions]
    return values


async def timeline(request: web.Request) -> web.StreamResponse:
    """What the scheduler decided about one request, of the last few thousand steps."""
    service = loaded_service(request)
    name = request.match_info["id"]
    req_ids = service.reports.ids_of(name)
    report = await service.reports.ask(Subject.TIMELINE, req_ids=req_ids[:MAX_TIMELINES])
    assert isinstance(report, TimelineReport)
    shown = [
        {
            "id": req_id,
            "request_id": service.reports.name_of(req_id),
            "events": [{"time": unix_time(at), "text": text} for at, text in lines],
        }
        for req_id, lines in report.timelines
        if lines
    ]
    if not shown:
        raise ApiError(
            404,
            "unknown_request",
            f"Nothing is known of the request {name:.200}: it never reached the engine, or it is too "
            "long ago. The engine remembers its last few thousand steps.",
        )
    return json_response({"timelines": shown})


def loaded_service(request: web.Request) -> Service:
    """Raises ApiError 503 unless the engine can answer; a draining one does."""
    service = request.app[SERVICE]
    status = service.client.status
    if status.dead_reason:
        raise engine_dead(status.dead_reason)
    if not status.is_loaded:
        service.check_open()
    return service


def number_of(request: web.Request, name: str, default: int, most: int) -> int:
    """A query parameter from 1 to `most`. Raises ApiError 400."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= most and len(text) < 9):
        raise invalid_value(
            name, f"{name} must be a whole number from 1 to {most}, got {text!r:.80}"
        )
    return int(text)


def unix_time(monotonic_ns: int) -> float:
    """Seconds, of a time on the clock that all processes of this machine share."""
    return round(time.time() - (time.monotonic_ns() - monotonic_ns) * 1e-9, 4)
