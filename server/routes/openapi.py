"""GET /openapi.json."""

from aiohttp import web

from server.openapi import describe
from server.routes.tokenize import json_response
from server.service import SERVICE


async def openapi(request: web.Request) -> web.StreamResponse:
    """What the router knows, in its order; slashes at the end and HEAD go without saying."""
    routes = [
        (route.method, route.resource.canonical)
        for route in request.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    ]
    return json_response(describe(request.app[SERVICE], routes))
