"""GET /live, /health, /ping, /ready, /version, /metrics."""

from typing import Any

from aiohttp import web

from server.config import VERSION
from server.errors import ApiError
from server.routes.tokenize import json_response
from server.service import RETRY_LOADING_S, SERVICE


async def live(request: web.Request) -> web.StreamResponse:
    """Answers as long as the event loop does."""
    return json_response({"status": "ok"})


async def health(request: web.Request) -> web.StreamResponse:
    """Is the engine alive and moving? Does not say whether it takes new requests.

    `?deep=1` has it generate one token.
    """
    service = request.app[SERVICE]
    verdict = service.client.status.health()
    if verdict.is_ok and request.query.get("deep", "0") not in ("", "0", "false"):
        verdict = await service.deep_check.verdict()
    if verdict.is_ok:
        return json_response({"status": "ok"})
    body = {"status": verdict.status, "reason": verdict.reason, "since": verdict.since}
    return unavailable(body)


async def ready(request: web.Request) -> web.StreamResponse:
    """Should new requests be sent here? While loading, the body tells how far it is."""
    service = request.app[SERVICE]
    verdict = service.readiness()
    if verdict.is_ok:
        return json_response({"status": "ok"})
    status = service.client.status
    body = {
        "status": verdict.status,
        "reason": verdict.reason,
        "since": verdict.since,
        "phase": status.phase,
        "progress": round(status.progress, 4),
        "detail": status.detail,
    }
    return unavailable(body)


def unavailable(body: dict[str, Any]) -> web.Response:
    response = json_response(body, {"Retry-After": str(RETRY_LOADING_S)})
    response.set_status(503)
    return response


async def version(request: web.Request) -> web.StreamResponse:
    return json_response({"version": VERSION})


async def metrics(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    text = service.exporter.text(service.client.num_queued)
    return web.Response(
        body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )


async def not_built(request: web.Request) -> web.StreamResponse:
    """Known endpoints of later versions: 501, since 404 makes people search for a wrong URL."""
    raise ApiError(501, "not_implemented", f"{request.path} is not available in this server.")
