"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from aiohttp import web

from server.routes.tokenize import json_response
from server.service import SERVICE, Service


async def list_models(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    cards = [model_card(name, service) for name in service.model_names]
    return json_response({"object": "list", "data": cards})


async def get_model(request: web.Request) -> web.StreamResponse:
    """Names may contain slashes."""
    service = request.app[SERVICE]
    wanted = request.match_info["id"]
    if wanted not in service.model_names:
        wanted = wanted.removesuffix("/")
    return json_response(model_card(service.check_model(wanted), service))


def model_card(name: str, service: Service) -> dict[str, Any]:
    limits, path = service.client.status.limits, service.engine_config.model
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "sluice",
        "root": path if service.config.expose_model_path and path else name,
        "parent": None,
        "max_model_len": limits.max_model_len if limits else None,  # unknown while loading
        "permission": [],
    }
