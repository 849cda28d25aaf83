"""GET / and /page/...: the page, static files with strict rules for the browser."""

from aiohttp import ETag, web

from server.page import FILES

# Scripts and styles come from this server only, and text never becomes markup (Trusted Types). The page
# may call other servers, as its address field says.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cache-Control": "no-cache",  # ask every time, and mostly get 304
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


async def page_file(request: web.Request) -> web.StreamResponse:
    file = FILES[request.path]
    known = request.if_none_match or ()
    if any(tag.value in (file.etag, "*") for tag in known):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=file.body, headers={**HEADERS, "Content-Type": file.content_type}
        )
    response.etag = ETag(file.etag)
    return response
