"""The listening socket, and the application on it."""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import uuid
from typing import Any

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_exceptions import BadHttpMessage, HttpProcessingError, LineTooLong
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_protocol import RequestHandler

from engine.api.config import ConfigError
from server.errors import ApiError, internal_error

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 30.0  # from the first byte of a request to the end of its headers
KEEP_ALIVE_S = 75.0  # above the usual 60 s of proxies, so that they close first
LINGER_S = 2.0  # how long to read on after refusing a body
BACKLOG = 2048


def bind(host: str, port: int) -> list[socket.socket]:
    """Bind every address of `host` (port 0: a free one). Raises ConfigError, naming the remedy."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"--host {host}: no such address ({error.strerror})") from None
    except UnicodeError:  # how Python says that a part between dots is empty or too long
        raise ConfigError(f"--host {host:.80}: is neither an address nor a host name") from None
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(bind_one(family, kind, protocol, (address[0], port, *address[2:])))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                close_all(sockets)
                raise ConfigError(
                    f"port {port} on {host} is in use: choose another with --port "
                    f"(e.g. --port {port + 1}), or --port 0 for any free one"
                ) from None
            problem = error  # e.g. no IPv6 on this machine: the other addresses will do
            continue
        port = port or sockets[0].getsockname()[1]
    if not sockets:
        assert problem is not None
        raise ConfigError(f"cannot listen on {host} port {port}: {problem.strerror}")
    return sockets


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """IPv6 addresses stand in brackets (RFC 3986, 3.2.2)."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Can only this machine reach the listener?"""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def bind_one(
    family: int, kind: int, protocol: int, address: tuple[str | int, ...]
) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # a second bind fails only once the first listens
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def close_all(sockets: list[socket.socket]) -> None:
    for listener in sockets:
        listener.close()


class Protocol(RequestHandler):
    """One connection. Differs from aiohttp's in the body of errors found while parsing HTTP, and in
    not waiting for ever for the end of a request's headers."""

    _head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        was_idle = self._is_idle
        super().data_received(data)
        if not was_idle:
            return
        if not self._is_idle:
            self._stop_head_timer()
        elif self._head_timer is None and data.strip():
            self._head_timer = self._loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    @property
    def _is_idle(self) -> bool:
        """Waits for a request whose headers are not complete."""
        return self._waiter is not None and not self._waiter.done()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        self._head_timer = None
        if not self._is_idle or self.transport is None:
            return
        error = ApiError(
            408,
            "request_timeout",
            f"The request's headers did not arrive within {HEAD_TIMEOUT_S:g} s.",
        )
        request_id = uuid.uuid4().hex
        body = error.body(request_id)
        headers = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            "X-Request-Id": request_id,
            **error.headers,
        }
        lines = ["HTTP/1.1 408 Request Timeout", *(f"{k}: {v}" for k, v in headers.items())]
        self.transport.write("\r\n".join([*lines, "", ""]).encode("ascii") + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("part of a response is sent already")
        if isinstance(exc, LineTooLong):
            error = ApiError(431, "headers_too_large", "The request line or a header is too long.")
        elif isinstance(exc, BadHttpMessage) and "too many headers" in str(exc).lower():
            error = ApiError(431, "headers_too_large", "The request has too many headers.")
        elif status < 500:
            error = ApiError(status, "invalid_http", "The request is not valid HTTP.")
        else:
            logger.error("an HTTP handler failed", exc_info=exc)
            error = internal_error()
        request_id = uuid.uuid4().hex
        response = web.Response(
            status=error.status,
            body=error.body(request_id),
            content_type="application/json",
            headers={"X-Request-Id": request_id},
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **more: Any) -> None:
        """A client's mistake in its own body is no error of the server: it has had its answer."""
        if isinstance(more.get("exc_info"), HttpProcessingError | web.RequestPayloadError):
            logger.debug(*args, **more)
        else:
            super().log_exception(*args, **more)


class HttpServer:
    """Runs the application on bound sockets."""

    def __init__(
        self,
        app: web.Application,
        sockets: list[socket.socket],
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._ssl_context = ssl_context
        # A closed connection cancels its handler: that is how disconnects reach the engine.
        self._runner = web.AppRunner(app, handler_cancellation=True)
        self._sockets = sockets
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None
        make_request = manager.request_factory

        def request_in_a_known_version(message: RawRequestMessage, *more: Any) -> web.BaseRequest:
            """aiohttp answers in the version that a client claims; clients read what we speak."""
            if message.version not in (HttpVersion10, HttpVersion11):
                message = message._replace(version=HttpVersion11)
            return make_request(message, *more)

        manager.request_factory = request_in_a_known_version
        loop = asyncio.get_running_loop()

        def connection() -> Protocol:
            return Protocol(
                manager,
                loop=loop,
                keepalive_timeout=KEEP_ALIVE_S,
                lingering_time=LINGER_S,
                auto_decompress=False,  # server/inflate.py does it, of bodies that are read
                access_log=None,  # type: ignore[arg-type]  # the application logs requests itself
            )

        for listener in self._sockets:
            self._servers.append(
                await loop.create_server(
                    connection, sock=listener, backlog=BACKLOG, ssl=self._ssl_context
                )
            )

    async def stop(self, timeout_s: float) -> None:
        """Stop listening, give handlers `timeout_s` to finish what they write, then close."""
        for server in self._servers:
            server.close()
        manager = self._runner.server
        if manager is not None:
            manager.pre_shutdown()
            await manager.shutdown(timeout_s)
        await self._runner.cleanup()
