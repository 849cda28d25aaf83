"""What every route needs: the client, the names it serves, and the limits it enforces."""

import asyncio
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from aiohttp import web

from engine.api.config import EngineConfig
from engine.api.messages import Prompt
from server.access import Access, UserKey
from server.client import EngineClient
from server.config import VERSION, ServerConfig
from server.cors import CorsPolicy
from server.deep_check import DeepCheck
from server.errors import RETRY_QUEUE_S, ApiError, missing
from server.health import Verdict
from server.inspection import EngineReports
from server.metrics import Exporter
from server.rate_limits import Allowance, KeyLimits
from server.schema.chat_rules import ChatRules, chat_rules
from server.schema.fields import IgnoredFields
from server.schema.limits import refuse_unknown
from server.schema.sampling import SamplingDefaults
from server.stream import RequestStream

RETRY_LOADING_S = 5


@dataclass
class Service:
    config: ServerConfig
    client: EngineClient
    exporter: Exporter
    model_names: list[str]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = field(default_factory=lambda: int(time.time()))
    ignored_fields: IgnoredFields = field(default_factory=IgnoredFields)
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    model_digest: str = ""  # known once the model is found
    live: dict[RequestStream, str] = field(default_factory=dict)  # with the X-Request-Id of each
    # of compressed bodies at a time: a thousand clients' would fill any memory
    inflating: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    access: Access = field(init=False)
    allowances: dict[UserKey | None, Allowance] = field(init=False)  # None: whoever has no key
    cors: CorsPolicy | None = field(init=False)
    deep_check: DeepCheck = field(init=False)
    reports: EngineReports = field(init=False)

    def __post_init__(self) -> None:
        self.access = Access.from_config(self.config)
        self.allowances = {key: Allowance(key.limits) for key in self.access.user_keys}
        self.allowances[None] = Allowance(KeyLimits())
        self.cors = CorsPolicy.from_config(self.config)
        self.deep_check = DeepCheck(self.client)
        self.reports = EngineReports(self.client)

    @property
    def chat_rules(self) -> ChatRules:
        return chat_rules(self.config, self.client.status.chat_template)

    def report_unknown(self, names: list[str]) -> None:
        """Log unknown fields; with --strict-fields raise ApiError 400 instead."""
        if self.config.strict_fields:
            refuse_unknown(names)
        self.ignored_fields.report(names)

    def check_open(self) -> None:
        """Raises ApiError 503 unless requests can be served."""
        status = self.client.status
        if status.dead_reason:
            raise engine_dead(status.dead_reason)
        if not status.takes_requests:
            raise draining()
        if not status.is_loaded:
            raise ApiError(
                503,
                "not_ready",
                f"The server is starting: {status.describe_phase()}.",
                retry_after=RETRY_LOADING_S,
            )

    def check_queue(self, num_new: int) -> None:
        """Raises ApiError unless `num_new` completions may join the queue.

        429 if that may change; 400 if an empty server could not take them either.
        """
        limits = self.client.status.limits
        most = self.config.max_queued_requests + (limits.max_num_seqs if limits else 0)
        if num_new > most:
            raise ApiError(
                400,
                "invalid_value",
                f"This request asks for {num_new} completions (prompts times n), but the server "
                f"takes at most {most} at once (--max-queued-requests and --max-num-seqs).",
                "n",
            )
        if self.num_waiting + num_new > self.config.max_queued_requests:
            raise ApiError(
                429,
                "queue_full",
                f"{self.client.num_queued} requests wait already, and {num_new} more are too many "
                f"(--max-queued-requests {self.config.max_queued_requests}).",
                retry_after=RETRY_QUEUE_S,
            )

    @property
    def num_waiting(self) -> int:
        """Completions in the queue; negative by the number that an idle engine could start more."""
        return self.client.num_queued - self.client.num_startable

    @property
    def is_queue_full(self) -> bool:
        return self.num_waiting >= self.config.max_queued_requests

    def check_model(self, name: str | None) -> str:
        """The name to echo. Raises ApiError 404, listing the names that are served."""
        if name is None:
            if len(self.model_names) > 1:
                raise missing("model", f"model is required; served are {self._served}")
            return self.model_names[0]
        if name not in self.model_names:
            raise ApiError(
                404,
                "model_not_found",
                f"The model {name!r:.200} does not exist; served are {self._served}.",
                "model",
            )
        return name

    @property
    def _served(self) -> str:
        return ", ".join(repr(name) for name in self.model_names)

    def readiness(self) -> Verdict:
        verdict = self.client.status.readiness()
        if verdict.is_ok and self.is_queue_full:
            return Verdict("queue_full", f"{self.client.num_queued} requests wait", time.time())
        return verdict

    @property
    def system_fingerprint(self) -> str:
        """Changes when answers to the same seed may: other version, model, arithmetic or device."""
        limits = self.client.status.limits
        parts = [VERSION, self.model_names[0], self.model_digest, self.engine_config.kv_cache_dtype]
        if limits is not None:
            parts += [limits.dtype, limits.device]
        return "fp_" + blake2b("|".join(parts).encode(), digest_size=5).hexdigest()


@dataclass(slots=True)
class RequestNotes:
    """What is known about a request in flight, for its log line and response headers."""

    request_id: str
    usage: dict[str, Any] = field(default_factory=dict)
    stream_error: str = ""  # code of an error sent as an event
    error_code: str = ""  # of an error answered as such
    stream: RequestStream | None = None
    prompts: list[Prompt] = field(default_factory=list)
    key: UserKey | None = None  # that the request came with, if it needed one

    def prefer_id(self, from_body: str, request: web.Request) -> None:
        """Take the body's `request_id` for this request unless a header named one."""
        if from_body and "X-Request-Id" not in request.headers and is_visible_id(from_body):
            self.request_id = from_body


def is_visible_id(text: str) -> bool:
    """May `text`, which a client chose, stand in a header and in the log?"""
    return 0 < len(text) <= 128 and all("!" <= c <= "~" for c in text)


NOTES: web.RequestKey[RequestNotes] = web.RequestKey("notes", RequestNotes)
SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def engine_dead(reason: str, *, has_begun: bool = False) -> ApiError:
    """500 for a request that may have run, and be the cause: proxies repeat a 503 elsewhere."""
    return ApiError(500 if has_begun else 503, "engine_dead", f"The engine has stopped: {reason}.")


def draining() -> ApiError:
    return ApiError(
        503,
        "draining",
        "The server is draining: it takes no new requests.",
        retry_after=RETRY_LOADING_S,
    )


def shut_down() -> ApiError:
    """For requests that drain time was too short for; another server may take them."""
    return ApiError(
        503,
        "draining",
        "The server is shutting down and ended this request before it was done.",
        retry_after=RETRY_LOADING_S,
    )


def aborted() -> ApiError:
    """500, as proxies repeat a 503 elsewhere."""
    return ApiError(500, "aborted", "An operator of the server ended this request.")
