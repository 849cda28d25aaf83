"""The server process as the parent of the others: start, watch, drain, end.

    bind the port -> answer /live -> prepare the model -> start tokenizer_proc and engine -> serve
                                                                  |
   SIGTERM, SIGINT, SIGHUP: drain, exit 0 (again: at once)   a child dies: one error to every live
   (SIGHUP with TLS: read the certificate again)             request, exit with its code (2, 75) or 70

Sockets, the children's settings and the model made of a .gguf file live in a private run directory (server/run_dir.py).
"""

import asyncio
import dataclasses
import gc
import logging
import os
import signal
import time
from pathlib import Path
from socket import socket

import uvloop

from engine.api.config import ConfigError, EngineConfig
from engine.api.messages import Sockets
from server.app import build_app
from server.client import EngineClient
from server.config import ServerConfig, shown_settings
from server.file_limit import raise_file_limit
from server.health import EngineStatus
from server.http_server import HttpServer, bind, close_all, is_loopback, url_of
from server.link import SocketLink
from server.metrics import Exporter, Metrics
from server.model_check import model_digest, sampling_defaults
from server.processes import Child, run_with_progress
from server.progress import ProgressReport
from server.run_dir import private_run_dir
from server.service import Service, engine_dead, shut_down
from server.status_line import log_status
from server.tls import tls_context

logger = logging.getLogger(__name__)

NO_KEY = (
    "others can reach %s and no key is set: whoever does may use it; give --api-key-file, or "
    "--host 127.0.0.1"
)
FLUSH_S = 2.0  # for handlers to write their last event
FAILURE_WAIT_S = 0.15  # for a dying engine's last message to arrive
DRAIN_POLL_S = 0.02

EXIT_ENGINE_FAILURE = 70
CONFIGURATION_CODES = (2, 75)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(server: ServerConfig, engine: EngineConfig) -> int:
    """Run until stopped; returns the exit code. Raises ConfigError if the port cannot be bound."""
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, END_SIGNALS
    )  # a supervisor's thread may hand that on
    raise_file_limit()
    listeners = bind(server.host, server.port)
    try:
        with private_run_dir() as run_dir:
            return uvloop.run(Launcher(server, engine, listeners, run_dir).run())
    finally:
        close_all(listeners)


class Launcher:
    """Owns the run directory's processes and the HTTP server, from start to exit code."""

    engine_module = "engine"  # run as `python -m`; a benchmark of the server has one of its own

    def __init__(
        self, server: ServerConfig, engine: EngineConfig, listeners: list[socket], run_dir: str
    ) -> None:
        self.config = server
        self.engine = engine
        self.run_dir = run_dir
        self.port = listeners[0].getsockname()[1]
        self.status = EngineStatus(stall_timeout_s=server.stall_timeout)
        self.metrics = Metrics()
        self.client = EngineClient(
            SocketLink(Sockets.in_directory(run_dir)), self.status, self.metrics
        )
        names = server.served_model_name or [engine.model or default_model_name()]
        exporter = Exporter(self.metrics, self.status, names[0], server.max_queued_requests)
        self.service = Service(server, self.client, exporter, names, engine_config=engine)
        self.tls = tls_context(server)
        self.http = HttpServer(
            build_app(self.service), listeners, self.tls.context if self.tls else None
        )
        self.url = url_of(server.host, self.port, "https" if self.tls else "http")
        self.is_exposed = not all(is_loopback(listener) for listener in listeners)
        self.children: list[Child] = []
        self.stop_asked = asyncio.Event()
        self.stop_now = asyncio.Event()
        self.is_ending = False  # draining is over: what is left has short limits of its own

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in END_SIGNALS:
            ignored = signal.getsignal(number) == signal.SIG_IGN
            if number == signal.SIGHUP and self.tls is None and ignored:
                continue  # as nohup has it: the server outlives its terminal
            loop.add_signal_handler(number, self.on_signal, number)
        self.client.start()
        await self.http.start()
        logger.info("listening on %s, loading", self.url)
        if self.is_exposed and not self.service.access.user_keys:
            logger.warning(NO_KEY, self.url)
        log_settings(self.config, self.engine)
        work = asyncio.create_task(self.start_and_watch())
        stop = asyncio.create_task(self.stop_asked.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await self.drain()
            # A child may have died while draining: that is no clean end.
            code = work.result() if work.done() else 0
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)
            at_once = self.stop_now.is_set()
            self.is_ending = True
            await self.http.stop(0.0 if at_once else FLUSH_S)
            await asyncio.gather(*(child.end(at_once) for child in self.children))
            self.client.close()
        logger.info("stopped")
        return code

    def on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGHUP and self.tls is not None:
            try:
                self.tls.reload()
                logger.info("SIGHUP: read the certificate again")
            except ConfigError as error:
                logger.error("SIGHUP: keeping the old certificate: %s", error)
            return
        if self.stop_asked.is_set() and not self.is_ending:
            logger.warning("%s again: ending at once", name)
            self.stop_now.set()
        else:
            logger.info("%s: %s", name, self.describe_stop())
            self.stop_asked.set()

    def describe_stop(self) -> str:
        """What a signal leads to. Only while requests are waited for can another one shorten it."""
        if self.is_ending:
            return "already stopping"
        running = self.client.num_live
        if not running or self.status.dead_reason:
            return "stopping"
        requests = f"{running} request{'s' * (running > 1)}"
        if not self.config.drain_timeout:
            return f"stopping, which ends {requests} (--drain-timeout 0)"
        return (
            f"draining {requests}, which takes up to {self.config.drain_timeout:g} s; "
            "Ctrl-C or a signal again ends at once"
        )

    async def drain(self) -> None:
        """Let running requests finish; end those that take too long with an error event."""
        self.status.set_draining()
        deadline = time.monotonic() + self.config.drain_timeout
        while self.client.num_live and time.monotonic() < deadline:
            if self.stop_now.is_set() or self.status.dead_reason:
                break
            await asyncio.sleep(DRAIN_POLL_S)
        if self.client.num_live:
            logger.warning("ending %d requests that still run", self.client.num_live)
        self.client.fail_all(shut_down())

    # --- start --------------------------------------------------------------------------------------

    async def start_and_watch(self) -> int:
        """Start everything and wait for a child to end, which it never should; its exit code."""
        reports = [asyncio.create_task(self.report_start())]
        if not self.config.disable_log_stats:
            reports.append(asyncio.create_task(log_status(self.status)))
        try:
            model, tokenizer = await self.prepare_model()
            self.service.model_digest = model_digest(model)
            if self.config.generation_config == "auto":
                self.service.defaults = sampling_defaults(model)
                logger.info("defaults of requests: %s", self.service.defaults.describe())
            await self.start_children(model, tokenizer)
            return await self.watch_children()
        except ConfigError as error:
            logger.error("%s", error)
            return self.on_death(str(error), error.exit_code)
        except Exception:
            logger.exception("the start failed")
            return self.on_death("the server met an unexpected error", EXIT_ENGINE_FAILURE)
        finally:
            for report in reports:
                report.cancel()

    async def report_start(self) -> None:
        began = time.monotonic()
        await ProgressReport(self.status, self.metrics).run()
        # Modules and routes stay: a collection need not walk them, which takes 100 ms and stops all.
        gc.collect()
        gc.freeze()
        names = ", ".join(self.service.model_names)
        logger.info(
            "ready in %.1f s: serving %s on %s",
            time.monotonic() - began,
            names,
            self.url,
        )

    async def prepare_model(self) -> tuple[str, str]:
        """Directory (or .gguf file) of the model, and directory of its tokenizer."""
        model, tokenizer = self.engine.model, self.engine.tokenizer
        if not model:
            logger.info("no --model given: serving the default model, %s", default_model_name())
            result = await run_with_progress(
                "default model",
                "server.default_model",
                ["--json-progress"],
                lambda share, detail: self.status.starting("preparing the model", share, detail),
            )
            model = str(result["path"])
        elif Path(model).is_file() and not tokenizer:
            # Beside weights, a GGUF file holds a tokenizer, in a format only the converter reads.
            converted = str(Path(self.run_dir) / "model")
            await run_with_progress(
                "converter",
                "engine.weights.gguf",
                [os.path.abspath(model), converted, "--json-progress"],
                lambda share, detail: self.status.starting("converting the model", share, detail),
            )
            model = converted
        model = os.path.abspath(model)
        return model, os.path.abspath(tokenizer) if tokenizer else model

    async def start_children(self, model: str, tokenizer: str) -> None:
        self.status.starting("starting the engine")
        common = {"run_dir": self.run_dir, "epoch": 0, "parent_pid": os.getpid()}
        template = self.config.chat_template
        tokenizer_config = {
            **common,
            "tokenizer_dir": tokenizer,
            "chat_template": os.path.abspath(template) if template else "",
            "log_level": self.engine.log_level,
            "seed": self.engine.seed,
        }
        engine = dataclasses.replace(self.engine, model=model, tokenizer=tokenizer)
        engine_config = {**common, "engine": dataclasses.asdict(engine)}
        run_dir = Path(self.run_dir)
        for name, module, config in (
            ("tokenizer", "tokenizer_proc", tokenizer_config),
            ("engine", self.engine_module, engine_config),
        ):
            file = run_dir / f"{name}.json"
            self.children.append(await Child.start_with_config(name, module, config, file))

    # --- a child's death ----------------------------------------------------------------------------

    async def watch_children(self) -> int:
        waits = {asyncio.create_task(child.process.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        child = waits[done.pop()]
        await asyncio.sleep(FAILURE_WAIT_S)
        reason = child.describe_end()
        failure = self.status.failure
        if failure is not None:
            reason = f"{reason}: {failure.message}"
        logger.error("%s", reason)
        code = child.process.returncode
        return self.on_death(
            child.describe_end(), code if code in CONFIGURATION_CODES else EXIT_ENGINE_FAILURE
        )

    def on_death(self, reason: str, code: int) -> int:
        """One error to every live request, then this process ends, too."""
        self.status.set_dead(reason)
        self.client.fail_all(engine_dead(reason, has_begun=True))
        return code


def default_model_name() -> str:
    from server.default_model import SMOLLM2  # only where no model is given

    return SMOLLM2.name


def log_settings(server: ServerConfig, engine: EngineConfig) -> None:
    """What is not as by default, so that nobody has to guess whether a flag took effect."""
    for title, config in (("server", server), ("engine", engine)):
        values, defaults = shown_settings(config), shown_settings(type(config)())
        chosen = {name: value for name, value in values.items() if value != defaults[name]}
        logger.info(
            "%s settings: %s; %d as by default",
            title,
            " ".join(f"{name}={value!r}" for name, value in chosen.items()) or "none given",
            len(values) - len(chosen),
        )
        logger.debug("all: %s", " ".join(f"{name}={value!r}" for name, value in values.items()))
