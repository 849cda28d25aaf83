"""Answers the lines of a batch with an engine in this process."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import orjson
from tqdm import tqdm

from engine.api.config import EngineConfig
from scripts.operate.batch_file import Output
from scripts.operate.batch_input import Input, Line
from scripts.operate.batch_signals import Interrupt
from scripts.operate.local_link import LocalLink
from server.client import EngineClient
from server.config import ServerConfig
from server.deadline import Deadline
from server.errors import ApiError, internal_error, unsupported
from server.health import EngineStatus
from server.launcher import default_model_name
from server.metrics import Exporter, Metrics
from server.model_check import model_digest, sampling_defaults
from server.routes.chat import chat_work
from server.routes.completions import completion_work
from server.routes.generate import Format, Generation, submit
from server.schema.chat import parse_chat
from server.schema.completions import parse_completion
from server.service import Service
from server.stream import RequestStream

logger = logging.getLogger(__name__)

QUEUE_FACTOR = 2  # completions in the engine, waiting ones too, for each that can run
PATHS = ("/v1/chat/completions", "/v1/completions")


class Job:
    """A line whose completions are under way."""

    def __init__(self, line: Line, stream: RequestStream, fmt: Format) -> None:
        self.line = line
        self.stream = stream
        self.fmt = fmt
        self.cleanup = ExitStack()  # ends its requests and timers


class BatchRun:
    """Use once, as `asyncio.run(BatchRun(...).run())`: streams belong to an event loop."""

    def __init__(
        self,
        service: Service,
        link: LocalLink,
        lines: Iterator[tuple[Line, dict[str, Any]]],
        output: Output,
        bar: "tqdm[Any]",
        interrupt: Interrupt,
    ) -> None:
        self.service = service
        self.client = service.client
        self.link = link
        self.lines = lines
        self.output = output
        self.bar = bar
        self.interrupt = interrupt
        self.jobs: list[Job] = []
        self.num_tokens = 0
        limits = self.client.status.limits
        assert limits is not None
        self.most_live = QUEUE_FACTOR * limits.max_num_seqs

    async def run(self) -> None:
        """Until all lines are answered. Ctrl-C and SIGTERM, which the caller holds, end between two steps."""
        started = time.monotonic()
        try:
            while self.fill() or self.jobs:
                self.interrupt.check()
                self.link.step()
                self.write_ended()
                rate = self.num_tokens / (time.monotonic() - started)
                self.bar.set_postfix_str(f"{rate:.1f} generated tok/s", refresh=False)
                await asyncio.sleep(0)  # timers
        finally:
            for job in self.jobs:
                job.cleanup.close()

    def fill(self) -> bool:
        """Start lines until the engine has enough to do; was there one?"""
        started = False
        while self.client.num_live < self.most_live:
            found = next(self.lines, None)
            if found is None:
                return started
            started = True
            self.start(*found)
        return started

    def start(self, line: Line, request: dict[str, Any]) -> None:
        """Hand a line to the engine, or answer it at once with what is wrong with it."""
        try:
            check_request(request)
            generation, fmt = self.read(request["url"], request["body"])
            stream = submit(generation, self.service, time.monotonic_ns())
        except InvalidLine as error:
            self.output.error(line.custom_id, "invalid_request", str(error))
            self.bar.update()
            return
        except ApiError as error:
            self.write_error(line, error)
            return
        except Exception:  # one line must not end all others
            logger.exception("%s failed", line.custom_id)
            self.write_error(line, internal_error())
            return
        job = Job(line, stream, fmt)
        job.cleanup.callback(self.client.abort, stream)
        job.cleanup.enter_context(
            Deadline(stream, 0.0, generation.total_s, generation.has_own_limit)
        )
        self.jobs.append(job)

    def read(self, url: str, body: dict[str, Any]) -> tuple[Generation, Format]:
        """Raises ApiError."""
        if body.get("stream"):
            raise unsupported("stream", "stream: a batch has whole answers only; leave it out")
        service = self.service
        if url == PATHS[0]:
            return chat_work(parse_chat(body, service.defaults, service.chat_rules), body, service)
        return completion_work(parse_completion(body, service.defaults), body, service)

    def write_ended(self) -> None:
        ended = [job for job in self.jobs if job.stream.is_finished or job.stream.error]
        for job in ended:
            self.jobs.remove(job)
            try:
                if job.stream.error is not None:
                    self.write_error(job.line, job.stream.error)
                else:
                    self.write_answer(job)
            finally:
                job.cleanup.close()

    def write_answer(self, job: Job) -> None:
        try:
            answer = job.fmt.whole(job.stream)
        except Exception:
            logger.exception("%s cannot be answered", job.line.custom_id)
            self.write_error(job.line, internal_error())
            return
        self.num_tokens += answer["usage"]["completion_tokens"]
        self.output.answer(job.line.custom_id, 200, answer, uuid.uuid4().hex)
        self.bar.update()

    def write_error(self, line: Line, error: ApiError) -> None:
        request_id = uuid.uuid4().hex
        body = orjson.loads(error.body(request_id))
        self.output.answer(line.custom_id, error.status, body, request_id)
        self.bar.update()


def answer(
    server: ServerConfig,
    engine: EngineConfig,
    wanted: Input,
    lines: list[Line],
    output: Output,
    interrupt: Interrupt,
) -> None:
    """Load the model and answer `lines`. Raises ConfigError, KeyboardInterrupt."""
    link = LocalLink(engine, server.chat_template)
    done = len(wanted.lines) - len(lines)
    try:
        with tqdm(total=len(wanted.lines), initial=done, desc="requests", disable=None) as bar:
            service = make_service(server, engine, link)
            batch = BatchRun(service, link, wanted.read(lines), output, bar, interrupt)
            with interrupt.held():
                asyncio.run(batch.run())
    finally:
        link.close()


def make_service(server: ServerConfig, engine: EngineConfig, link: LocalLink) -> Service:
    """What the server's routes know: names, defaults of requests, limits, rules for chats."""
    client = EngineClient(link, EngineStatus(stall_timeout_s=0.0), Metrics())
    client.start()
    model = link.engine.config.model
    names = server.served_model_name or [engine.model or default_model_name()]
    exporter = Exporter(client.metrics, client.status, names[0], server.max_queued_requests)
    service = Service(server, client, exporter, names, engine_config=link.engine.config)
    service.model_digest = model_digest(model)
    if server.generation_config == "auto":
        service.defaults = sampling_defaults(model)
    return service


class InvalidLine(ValueError):
    """A line with a custom_id, but no request."""


def check_request(request: dict[str, Any]) -> None:
    """Raises InvalidLine with advice."""
    if request.get("method", "POST") != "POST":
        raise InvalidLine(f'method is {request["method"]!r:.80}; give "POST"')
    if request.get("url") not in PATHS:
        raise InvalidLine(f"url is {request.get('url')!r:.80}; answered are {' and '.join(PATHS)}")
    if not isinstance(request.get("body"), dict):
        raise InvalidLine("body must be an object, the body of the request")
