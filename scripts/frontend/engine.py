"""The engine's stand-in: `python -m scripts.frontend.engine --config FILE`, as the launcher starts it.

It speaks on the engine's sockets and computes nothing. Every live request gets one token a step, up to
its max_tokens; the token tells when it was sent (word_clock.py). A request's `seed` is the time of a
step in microseconds. Where nothing else is live, a step is made at once: an engine without a prefill.
"""

import argparse
import json
import signal
import sys
import time
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import zmq

from engine.api.messages import (
    AbortRequests,
    AddRequest,
    EngineHello,
    EngineLimits,
    EngineState,
    EngineStats,
    FinishReason,
    Phase,
    Sockets,
    StepOutput,
    Submit,
    decoder,
    encoder,
)
from engine.api.process import LaunchConfig, die_with_parent
from scripts.frontend.word_clock import WordClock

HEARTBEAT_NS = 500_000_000
STATS_NS = 100_000_000


class Steps:
    """The live requests, and the next step for all of them."""

    def __init__(self, clock: WordClock, epoch: int) -> None:
        self.clock = clock
        self.epoch = epoch
        self.left: dict[int, int] = {}  # tokens, by request id
        self.period_ns = 10_000_000
        self.new: list[int] = []
        self.num_steps = 0
        self.num_tokens = 0

    def handle(self, message: object) -> None:
        if isinstance(message, AddRequest):
            self.left[message.req_id] = message.params.max_tokens or 1
            self.new.append(message.req_id)
            if message.params.seed:
                self.period_ns = message.params.seed * 1000
        elif isinstance(message, AbortRequests):
            for req_id in message.req_ids:
                self.left.pop(req_id, None)

    def make(self) -> StepOutput:
        """A token for each live request."""
        req_ids = list(self.left)
        finished: list[tuple[int, FinishReason, int | None]] = []
        for index, req_id in enumerate(req_ids):
            self.left[req_id] -= 1
            if not self.left[req_id]:
                del self.left[req_id]
                finished.append((index, FinishReason.LENGTH, None))
        started = [(req_id, 0, 0) for req_id in self.new]
        self.new = []
        self.num_steps += 1
        self.num_tokens += len(req_ids)
        return StepOutput(
            epoch=self.epoch,
            step_id=self.num_steps,
            req_ids=req_ids,
            counts=[1] * len(req_ids),
            token_ids=[self.clock.token_at(time.monotonic_ns())] * len(req_ids),
            finished=finished,
            started=started,
        )


class StandIn:
    """The sockets around `Steps`."""

    def __init__(self, launch: LaunchConfig) -> None:
        model = str(launch.engine["model"])
        self.epoch = launch.epoch
        self.steps = Steps(WordClock(str(launch.engine["tokenizer"] or model)), launch.epoch)
        self.limits = limits_of(model)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sockets = Sockets.in_directory(launch.run_dir, launch.epoch)
        self.submit = self.socket(zmq.PULL)
        self.submit.bind(sockets.submit)
        self.tokens = self.socket(zmq.PUSH)
        self.tokens.connect(sockets.tokens)
        self.state = self.socket(zmq.PUSH)
        self.state.connect(sockets.state)
        self.encode = encoder().encode
        self.decode = decoder(Submit).decode
        self.stopping = False

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self.context.socket(kind)
        socket.set_hwm(0)
        socket.linger = 0
        return socket

    def run(self) -> None:
        """Until SIGTERM. A late step is made at once, and later ones keep their times."""
        steps = self.steps
        self.tokens.send(self.encode(EngineHello(epoch=self.epoch, limits=self.limits)))
        due_ns = told_ns = beat_ns = 0
        while not self.stopping:
            now = time.monotonic_ns()
            if now - beat_ns >= HEARTBEAT_NS:
                beat_ns = now
                self.send_state()
            if now - told_ns >= STATS_NS:
                told_ns = now
                self.send_stats()
            if steps.left and now >= due_ns:
                self.tokens.send(self.encode(steps.make()))
                due_ns += steps.period_ns
                continue
            wait_ns = (due_ns if steps.left else beat_ns + HEARTBEAT_NS) - now
            was_idle = not steps.left
            if self.submit.poll(max(0, ceil(wait_ns / 1_000_000))):
                self.read()
                if was_idle:
                    due_ns = time.monotonic_ns()

    def read(self) -> None:
        while True:
            try:
                self.steps.handle(self.decode(self.submit.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return

    def send_state(self) -> None:
        state = EngineState(
            epoch=self.epoch,
            phase=Phase.SERVING,
            progress=1.0,
            detail="",
            loop_count=time.monotonic_ns(),
            step_in_flight_ms=0.0,
            rss_bytes=0,
        )
        self.state.send(self.encode(state))

    def send_stats(self) -> None:
        values: dict[str, Any] = dict.fromkeys(EngineStats.__struct_fields__, 0)
        values |= {"epoch": self.epoch, "num_running": len(self.steps.left)}
        values |= {"steps": self.steps.num_steps, "generation_tokens": self.steps.num_tokens}
        values |= {"num_blocks": 1, "num_free_blocks": 1}
        self.state.send(self.encode(EngineStats(**values)))


def limits_of(model: str) -> EngineLimits:
    config = json.loads((Path(model) / "config.json").read_text("utf-8"))
    return EngineLimits(
        block_size=16,
        num_blocks=1 << 20,
        max_model_len=1 << 17,
        max_num_seqs=4096,
        vocab_size=config["vocab_size"],
        enable_prefix_caching=True,
        eos_token_ids=[],
        dtype="float32",
        device="cpu",
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.frontend.engine")
    parser.add_argument("--config", required=True, help="JSON file written by the server")
    with open(parser.parse_args().config, "rb") as file:
        launch = msgspec.json.decode(file.read(), type=LaunchConfig)
    die_with_parent(launch.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stand_in = StandIn(launch)

    def stop(*_: object) -> None:
        stand_in.stopping = True

    signal.signal(signal.SIGTERM, stop)
    stand_in.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
