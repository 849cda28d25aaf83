"""The engine process: sockets and threads around the step loop.

`python -m engine --config FILE`; FILE holds {"engine": ..., "run_dir": ..., "epoch": ...,
"parent_pid": ...} as JSON. Exit codes: 0 asked to stop, 2 and 75 settings that cannot work (the reason
also goes to the server), 70 anything else.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from engine.api.config import ConfigError, EngineConfig
from engine.api.messages import (
    EngineFailed,
    EngineHello,
    EngineState,
    EngineStats,
    Inspect,
    Phase,
    Sockets,
    StepOutput,
    Submit,
    decoder,
    encoder,
)
from engine.api.process import LaunchConfig, die_with_parent, resident_bytes

if TYPE_CHECKING:
    from engine.loop import StepLoop

logger = logging.getLogger("engine")

HEARTBEAT_SECONDS = 0.5
STATS_SECONDS = 0.1
IDLE_POLL_MS = 500


class Heartbeat(threading.Thread):
    """Reports phase and progress twice a second from its own thread and socket, whatever the loop does.

    Only this thread touches the socket; others change the fields and call `wake`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, epoch: int) -> None:
        super().__init__(daemon=True, name="heartbeat")
        self.context, self.address, self.epoch = context, address, epoch
        self.phase, self.progress, self.detail = Phase.LOADING, 0.0, "starting"
        self.loop_state = lambda: (0, 0.0)  # (loop_count, start of the running step or 0)
        self.rss = resident_bytes
        self.gpu_memory: Callable[[], int] = lambda: 0  # bytes
        self.changed = threading.Event()

    def report(self, phase: Phase, progress: float, detail: str) -> None:
        self.phase, self.progress, self.detail = phase, progress, detail
        self.changed.set()

    def run(self) -> None:
        socket = push_socket(self.context, self.address)
        encode = encoder().encode
        while True:
            loop_count, step_started = self.loop_state()
            in_flight = (time.monotonic() - step_started) * 1000 if step_started else 0.0
            state = EngineState(
                epoch=self.epoch,
                phase=self.phase,
                progress=self.progress,
                detail=self.detail,
                loop_count=loop_count,
                step_in_flight_ms=in_flight,
                rss_bytes=self.rss(),
                gpu_memory_bytes=self.gpu_memory(),
            )
            socket.send(encode(state))
            if self.changed.wait(HEARTBEAT_SECONDS):
                time.sleep(
                    0.02
                )  # progress changes often while loading: at most 50 reports a second
            self.changed.clear()


class SocketInbox:
    """Inbox of the step loop over the submit socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.decode = decoder(Submit).decode

    def drain(self, block: bool) -> list[Submit]:
        messages: list[Submit] = []
        if block and not self.socket.poll(IDLE_POLL_MS):
            return messages
        while True:
            try:
                messages.append(self.decode(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages


def push_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A connected PUSH socket that never blocks its writer: its depth is bounded by live requests."""
    socket = context.socket(zmq.PUSH)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(address)
    return socket


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine")
    parser.add_argument("--config", required=True, help="JSON file written by the server")
    with open(parser.parse_args().config, "rb") as file:
        launch = msgspec.json.decode(file.read(), type=LaunchConfig)
    die_with_parent(launch.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the server's to handle
    config = EngineConfig(**launch.engine)  # type: ignore[arg-type]
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s engine: %(message)s",
        stream=sys.stderr,
    )
    sockets = Sockets.in_directory(launch.run_dir, launch.epoch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heartbeat = Heartbeat(context, sockets.state, launch.epoch)
    heartbeat.start()
    state = push_socket(context, sockets.state)
    try:
        serve(config, launch, sockets, context, heartbeat, state)
        code = 0
    except ConfigError as error:
        logger.error("%s", error)
        code = error.exit_code
        failed = EngineFailed(epoch=launch.epoch, message=str(error), exit_code=code)
        state.send(encoder().encode(failed))
    except Exception as error:
        logger.exception("the engine failed")
        code = 70
        failed = EngineFailed(epoch=launch.epoch, message=repr(error), exit_code=code)
        state.send(encoder().encode(failed))
    state.close()
    sys.stderr.flush()
    time.sleep(0.05)
    os._exit(code)  # the heartbeat's socket is in use by its thread: no orderly teardown


def serve(
    config: EngineConfig,
    launch: LaunchConfig,
    sockets: Sockets,
    context: zmq.Context[zmq.Socket[bytes]],
    heartbeat: Heartbeat,
    state: zmq.Socket[bytes],
) -> None:
    """Build the engine, say hello, run the loop until SIGTERM."""
    submit = context.socket(zmq.PULL)
    submit.set_hwm(0)
    submit.bind(sockets.submit)  # before loading: early messages wait here
    tokens = push_socket(context, sockets.tokens)
    encode = encoder().encode

    def send(output: StepOutput) -> None:
        tokens.send(encode(output))

    # These import torch: after the heartbeat has begun.
    from engine.build import build_engine
    from engine.control import ControlDesk, gpu_memory_bytes
    from engine.inspection import Inspector

    engine = build_engine(config, send, launch.epoch, heartbeat.report)
    loop = engine.loop
    heartbeat.loop_state = lambda: (loop.loop_count, loop.step_started)
    heartbeat.gpu_memory = gpu_memory_bytes(engine.limits.device)
    desk = ControlDesk(
        loop.scheduler.kv, config.profile_dir, lambda result: state.send(encode(result))
    )
    inspector = Inspector(
        loop.scheduler, loop.gate, lambda inspection: state.send(encode(inspection))
    )
    loop.on_control = lambda message: (
        inspector.answer(message) if isinstance(message, Inspect) else desk.handle(message)
    )
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    tokens.send(encode(EngineHello(epoch=launch.epoch, limits=engine.limits)))
    heartbeat.report(Phase.SERVING, 1.0, "serving")

    last_sent = 0.0
    last_stats: EngineStats | None = None

    def send_stats() -> None:
        nonlocal last_sent, last_stats
        now = time.monotonic()
        if now - last_sent < STATS_SECONDS and loop.has_work():
            return
        last_sent = now
        stats = stats_of(engine.loop, launch.epoch)
        if stats != last_stats:
            state.send(encode(stats))
            last_stats = stats

    send_stats()  # the first gauges, before anybody asks
    loop.run(SocketInbox(submit), stopped.is_set, send_stats)


def stats_of(loop: StepLoop, epoch: int) -> EngineStats:
    scheduler = loop.scheduler
    pool, tier = scheduler.kv.pool, scheduler.kv.tier
    return EngineStats(
        epoch=epoch,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_blocks=pool.num_blocks - 1,
        num_free_blocks=pool.num_free,
        steps=loop.steps,
        step_seconds=loop.step_seconds,
        prompt_tokens=scheduler.prompt_tokens,
        generation_tokens=scheduler.generation_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        preemptions=scheduler.preemptions,
        aborts=scheduler.aborts,
        nan_events=loop.nan_events,
        failed_steps=loop.failed_steps,
        num_host_blocks=tier.num_slots if tier else 0,
        num_used_host_blocks=tier.num_used if tier else 0,
        num_swapped=tier.num_swapped if tier else 0,
    )
