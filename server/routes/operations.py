"""For operators: GET /load and /server_info, POST /admin/... and /start_profile, /stop_profile."""

from typing import Any

from aiohttp import web

from engine.api.messages import ControlAction
from server.config import VERSION, shown_settings
from server.errors import ApiError, missing
from server.receive import receive_object
from server.routes.tokenize import json_response
from server.schema.fields import Table, boolean, decode, string
from server.service import SERVICE, Service, aborted

DRAIN_FIELDS: Table = {"drain": boolean.or_else(True)}
ABORT_FIELDS: Table = {"request_id": string, "all": boolean.or_else(False)}


async def load(request: web.Request) -> web.StreamResponse:
    """How busy the server is, for load balancers."""
    service = request.app[SERVICE]
    status, client = service.client.status, service.client
    stats, limits = status.stats, status.limits
    num_blocks = stats.num_blocks if stats else 0
    num_free = stats.num_free_blocks if stats else 0
    return json_response(
        {
            "status": service.readiness().status,
            "running": client.num_live - client.num_queued,
            "waiting": client.num_queued,
            "kv_cache_usage": round(1 - num_free / num_blocks, 4) if num_blocks else 0.0,
            "free_blocks": num_free,
            "num_blocks": num_blocks,
            "max_num_seqs": limits.max_num_seqs if limits else None,
            "max_model_len": limits.max_model_len if limits else None,
            "max_queued_requests": service.config.max_queued_requests,
        }
    )


async def server_info(request: web.Request) -> web.StreamResponse:
    """Every setting as it is in effect, keys left out."""
    service = request.app[SERVICE]
    limits = service.client.status.limits
    names = limits.__struct_fields__ if limits else ()
    return json_response(
        {
            "version": VERSION,
            "models": service.model_names,
            "system_fingerprint": service.system_fingerprint,
            "server": shown_settings(service.config),
            "engine": shown_settings(service.engine_config),
            "limits": {name: getattr(limits, name) for name in names} or None,
            "request_defaults": service.defaults.values,
        }
    )


async def drain(request: web.Request) -> web.StreamResponse:
    """Take no new requests, until {"drain": false}. The process stays, running requests go on."""
    service = request.app[SERVICE]
    values = await optional_body(request, DRAIN_FIELDS)
    service.client.status.set_paused(values["drain"])
    return json_response(
        {"status": service.client.status.readiness().status, "running": service.client.num_live}
    )


async def abort(request: web.Request) -> web.StreamResponse:
    """End live requests: all of one `request_id` (an X-Request-Id need not be unique), or `all`."""
    service = request.app[SERVICE]
    values = await optional_body(request, ABORT_FIELDS)
    wanted = values.get("request_id")
    if wanted is None and not values["all"]:
        raise missing("request_id", 'request_id (or "all": true) is required')
    streams = [stream for stream, name in service.live.items() if values["all"] or name == wanted]
    for stream in streams:
        stream.fail(aborted())
    return json_response({"aborted": len(streams)})


async def reset_prefix_cache(request: web.Request) -> web.StreamResponse:
    """Forget what KV blocks hold, e.g. to measure; running requests keep theirs."""
    return await in_engine(request, ControlAction.RESET_PREFIX_CACHE)


async def start_profile(request: web.Request) -> web.StreamResponse:
    """Record what the engine does, until /stop_profile."""
    return await in_engine(request, ControlAction.START_PROFILE)


async def stop_profile(request: web.Request) -> web.StreamResponse:
    """Write the trace to --profile-dir."""
    return await in_engine(request, ControlAction.STOP_PROFILE)


async def in_engine(request: web.Request, action: ControlAction) -> web.StreamResponse:
    service = request.app[SERVICE]
    check_serving(service)
    return json_response({"status": "ok", "detail": await service.client.control(action)})


def check_serving(service: Service) -> None:
    """As `Service.check_open`, but a draining engine still obeys. Raises ApiError 503."""
    status = service.client.status
    if status.is_loaded and not status.is_draining and not status.dead_reason:
        return
    service.check_open()
    raise ApiError(503, "not_ready", "The engine is not running.")


async def optional_body(request: web.Request, table: Table) -> dict[str, Any]:
    """An object with known fields only, or no body at all. Raises ApiError."""
    body = await receive_object(request) if request.can_read_body else {}
    values, unknown = decode(body, table)
    if unknown:
        known = f"{' and '.join(table)} {'are' if len(table) > 1 else 'is'}"
        raise ApiError(
            400, "unknown_field", f"{unknown[0]:.80} is no field of this request; {known}"
        )
    return values
