"""The HTTP application: table of paths, request ids, and one place where errors become answers."""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion11, web

from server.cors import is_preflight
from server.errors import ApiError, internal_error
from server.page import PAGE_PATHS
from server.request_log import log_request
from server.routes import (
    chat,
    completions,
    debug,
    health,
    models,
    openapi,
    operations,
    page,
    tokenize,
)
from server.service import NOTES, SERVICE, RequestNotes, Service, is_visible_id

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

GET: dict[str, Handler] = {
    "/live": health.live,
    "/health": health.health,
    "/ping": health.health,
    "/ready": health.ready,
    "/version": health.version,
    "/metrics": health.metrics,
    "/v1/models": models.list_models,
    "/load": operations.load,
    "/openapi.json": openapi.openapi,
    "/debug/kv": debug.kv,
    "/debug/requests": debug.requests,
    "/debug/requests/{id:.+}/timeline": debug.timeline,
    "/debug/steps": debug.steps,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
    "/tokenize": tokenize.tokenize,
    "/detokenize": tokenize.detokenize,
    "/v1/tokenize": tokenize.tokenize,
    "/v1/detokenize": tokenize.detokenize,
    "/v1/embeddings": health.not_built,
    "/v1/responses": health.not_built,
    "/v1/messages": health.not_built,
}
# Only with an admin key.
ADMIN_GET: dict[str, Handler] = {"/server_info": operations.server_info}
ADMIN_POST: dict[str, Handler] = {
    "/admin/drain": operations.drain,
    "/admin/abort": operations.abort,
    "/admin/reset_prefix_cache": operations.reset_prefix_cache,
    "/start_profile": operations.start_profile,
    "/stop_profile": operations.stop_profile,
}
CONTINUE = "100-continue"


def build_app(service: Service) -> web.Application:
    app = web.Application(
        middlewares=[envelope], client_max_size=service.config.max_body_size, logger=logger
    )
    app[SERVICE] = service
    is_managed = service.access.admin_key is not None
    for path, handler in (GET | ADMIN_GET if is_managed else GET).items():
        for spelling in (path, path + "/"):
            app.router.add_get(spelling, handler, expect_handler=expect)  # HEAD included
    for path, handler in (POST | ADMIN_POST if is_managed else POST).items():
        for spelling in (path, path + "/"):
            app.router.add_post(spelling, handler, expect_handler=expect)
    app.router.add_get("/v1/models/{id:.+}", models.get_model, expect_handler=expect)
    if service.config.page:
        for path in PAGE_PATHS:
            app.router.add_get(path, page.page_file)
    app.on_response_prepare.append(add_headers)
    return app


@web.middleware
async def envelope(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request an id, turn every error into the error body, count and log the outcome."""
    began = time.monotonic()
    wanted_id = request.headers.get("X-Request-Id", "")
    notes = RequestNotes(wanted_id if is_visible_id(wanted_id) else uuid.uuid4().hex)
    request[NOTES] = notes
    response: web.StreamResponse | None = None
    service = request.app[SERVICE]
    try:
        if service.cors is not None and is_preflight(request.method, request.headers):
            response = web.Response(
                status=204, headers=service.cors.preflight_headers(request.headers)
            )
            return response
        notes.key = service.access.check(request.path, request.headers)
        check_expectation(request)
        response = await handler(request)
    except ApiError as error:
        response = error_response(request, error)
    except web.HTTPException as error:
        response = error_response(request, translate(request, error))
    except asyncio.CancelledError:
        raise  # the client has gone
    except Exception:
        logger.exception("request %s failed", notes.request_id)
        response = error_response(request, internal_error())
    finally:
        outcome = "499" if response is None else str(response.status)
        finish(request, outcome, time.monotonic() - began)
    return response


def finish(request: web.Request, outcome: str, seconds: float) -> None:
    service = request.app[SERVICE]
    resource = request.match_info.route.resource
    path = "unknown" if resource is None else resource.canonical.rstrip("/") or "/"
    service.client.metrics.http_requests[path, outcome] += 1
    wanted = service.config.log_requests
    if wanted != "off":
        log_request(request, path, outcome, seconds, with_prompts=wanted == "prompts")


def error_response(request: web.Request, error: ApiError) -> web.Response:
    metrics = request.app[SERVICE].client.metrics
    metrics.rejected[error.code] += 1
    request[NOTES].error_code = error.code
    return web.Response(
        status=error.status,
        body=error.body(request[NOTES].request_id),
        content_type="application/json",
        headers=error.headers,
    )


def translate(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals, which come from its router."""
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(
            405,
            "method_not_allowed",
            f"{request.path} takes {allowed}, not {request.method}.",
            headers={"Allow": allowed},
        )
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "unknown_url", f"There is no {request.method} {request.path:.200}.")
    if error.status >= 500:
        return internal_error()
    return ApiError(error.status, "invalid_request", error.reason)


async def expect(request: web.Request) -> None:
    """Ask for the body where a client waits to be asked. Runs before `envelope`."""
    try:
        request.app[SERVICE].access.check(request.path, request.headers)
    except ApiError:
        return  # `envelope` refuses the request; its body is not wanted
    if request.headers.get("Expect", "").lower() == CONTINUE and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer itself has not begun


def check_expectation(request: web.Request) -> None:
    wanted = request.headers.get("Expect", "")
    if wanted and wanted.lower() != CONTINUE:
        raise ApiError(
            417, "expectation_failed", f"Expect must be {CONTINUE} or absent, got {wanted!r:.80}."
        )


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams and errors included."""
    notes = request.get(NOTES)  # absent where aiohttp answers before `envelope`
    response.headers["X-Request-Id"] = notes.request_id if notes else uuid.uuid4().hex
    service = request.app[SERVICE]
    if notes is not None:
        response.headers.update(service.allowances[notes.key].headers())
    if service.cors is not None:
        response.headers.update(service.cors.answer_headers(request.headers))
