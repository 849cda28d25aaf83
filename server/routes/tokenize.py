"""POST /tokenize and /detokenize: the same code as for generation, so counts agree with usage."""

from array import array
from typing import Any

import orjson
from aiohttp import web

from server.receive import receive_object
from server.schema.fields import ignored_header
from server.schema.tokenize import parse_detokenize, parse_tokenize
from server.service import SERVICE


async def tokenize(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    service.check_open()
    wanted = parse_tokenize(await receive_object(request), service.chat_rules)
    service.check_model(wanted.model)
    service.report_unknown(wanted.ignored)
    result = await service.client.tokenize(wanted.prompt, wanted.return_token_strs)
    tokens = array("i", result.token_ids).tolist()
    body: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": result.max_model_len,
        "tokens": tokens,
    }
    if wanted.return_token_strs:
        body["token_strs"] = result.token_strs
    return json_response(body, ignored_header(wanted.ignored))


async def detokenize(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    service.check_open()
    wanted = parse_detokenize(await receive_object(request))
    service.check_model(wanted.model)
    service.report_unknown(wanted.ignored)
    result = await service.client.detokenize(wanted.tokens)
    return json_response({"prompt": result.text}, ignored_header(wanted.ignored))


def json_response(body: Any, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json", headers=headers)
