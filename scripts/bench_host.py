"""Time of the host in a decode step: scheduling, preparing, launching, committing, sending.

    python scripts/bench_host.py                          # CPU engine, model replaced by nothing
    python scripts/bench_host.py --model 7b --batch 1 256 # on a GPU: the real model, waiting excluded

On a CPU the engine computes inside `launch`, so the model's forward pass is replaced by constants. What
remains of torch (the sampler's operations, gathers and masks) is recorded in one step, replayed by
itself and shown apart. On a GPU nothing is replaced, and the time in which the host waits for the
device's results is left out.
"""

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from engine_driver import SHAPES, Driver
from torch.utils._python_dispatch import TorchDispatchMode

from engine.api.messages import StepOutput, encoder
from engine.attention.base import AttentionBackend, StepInputs
from engine.models.config import ModelConfig
from engine.runner.runner import ModelRunner, StepHandle

WARM_UP_STEPS = 20
TOKEN_BUDGET = 4096  # of which 1024 running requests leave enough for prompts to join them soon


def leave_out_model(runner: ModelRunner, config: ModelConfig, max_batch: int) -> None:
    """Constants instead of hidden states and logits (CPU)."""
    hidden = torch.zeros(TOKEN_BUDGET, config.hidden_size)
    logits = torch.randn(max(max_batch, 4), config.vocab_size)

    def forward(
        inputs: StepInputs, attention: AttentionBackend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        return hidden[: len(inputs.positions if wanted is None else wanted)]

    runner.model.forward = forward
    runner.model.logits = lambda states: logits[: len(states)].clone()


class Recorder(TorchDispatchMode):
    """Keeps every torch operation that runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @torch.inference_mode()
    def replay_us(self, repeats: int = 200) -> float:
        """Microseconds of all recorded operations, one after the other."""
        started = time.perf_counter()
        for _ in range(repeats):
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)
        return (time.perf_counter() - started) / repeats * 1e6


class PartClock:
    """Time of the parts of each step: methods of the loop's objects, wrapped."""

    def __init__(self, driver: Driver) -> None:
        loop = driver.loop
        self.names: list[str] = []
        self.seconds: list[float] = []  # of the current step, by part
        self.wrap("schedule", loop.scheduler, "schedule")
        self.wrap("launch", loop.runner, "launch")
        graphs, sampler = loop.runner.decode_graphs, loop.runner.sampler
        if graphs is not None:
            self.wrap("(stage)", graphs, "stage")
            self.wrap("(replay)", graphs, "replay")
        self.wrap("(sample)", sampler, "sample")
        self.wrap("wait", StepHandle, "wait")
        self.wrap("commit", loop.scheduler, "commit")
        self.wrap("output", loop.scheduler, "take_output")
        self.wrap("encode", loop, "send")

    def wrap(self, name: str, owner: object, method: str) -> None:
        """Count `method` as part `name`; one in brackets is within the part before it."""
        inner, index, seconds = getattr(owner, method), len(self.names), self.seconds
        self.names.append(name)
        seconds.append(0.0)

        def timed(*args: object) -> object:
            started = time.perf_counter()
            result = inner(*args)
            seconds[index] += time.perf_counter() - started
            return result

        setattr(owner, method, timed)

    def take(self) -> list[float]:
        """Seconds by part since the last call."""
        seconds = self.seconds.copy()
        self.seconds[:] = [0.0] * len(seconds)
        return seconds


@dataclass(slots=True)
class HostTime:
    """Median microseconds of a decode step."""

    total: float  # but for waiting
    torch: float  # of these, inside torch's operations; 0 on a GPU, where they only launch
    parts: list[float]


def host_time(driver: Driver, batch: int, steps: int, clock: PartClock, draws: bool) -> HostTime:
    """Measure `steps` decode steps with `batch` running requests."""
    rng = np.random.default_rng(batch)
    for i in range(batch):  # not all fill their blocks in the same step
        temperature = 1.0 if draws else 0.0
        driver.add(
            driver.prompt(rng, 64 + i % 64), steps + WARM_UP_STEPS + 256, temperature=temperature
        )
    scheduler = driver.loop.scheduler
    while scheduler.num_running < batch or scheduler.generation_tokens < batch:
        driver.loop.step()
    for _ in range(WARM_UP_STEPS):
        driver.loop.step()
    gc.collect()
    gc.freeze()
    clock.take()
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        driver.loop.step()
        times.append([time.perf_counter() - started, *clock.take()])
    assert scheduler.num_running == batch, "a request ended while it was measured"
    recorder = Recorder()
    if driver.loop.runner.table.last_token.device.type == "cpu":
        with recorder:
            driver.loop.step()
    for req_id in list(driver.requests):
        driver.abort(req_id)
    driver.run()
    table = np.array(times) * 1e6
    total = np.median(table[:, 0] - table[:, 1 + clock.names.index("wait")])
    parts = np.median(table[:, 1:], axis=0).tolist()
    return HostTime(float(total), recorder.replay_us() if recorder.calls else 0.0, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help=f"directory, or one of {', '.join(SHAPES)}")
    parser.add_argument(
        "--batch",
        type=int,
        nargs="*",
        default=[1, 64, 256, 1024],
        help="running requests, one measurement each; the largest sizes the engine's tables "
        "(default: 1 64 256 1024)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=200,
        help="decode steps of a round, of which the median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="rounds of each batch; the middle one is printed (default: %(default)s)",
    )
    parser.add_argument("--draw", action="store_true", help="requests with temperature 1")
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cuda or cpu; auto: a GPU if torch sees one; on a CPU the model is left out "
        "(default: %(default)s)",
    )
    args = parser.parse_args()
    driver = Driver.of_model(
        args.model,
        device=args.device,
        max_num_seqs=max(args.batch),
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=1024,
    )
    encode = encoder().encode

    def send(output: StepOutput) -> None:  # what the engine process does, less the socket
        encode(output)

    driver.loop.send = send
    runner = driver.loop.runner
    if runner.table.last_token.device.type == "cpu":
        leave_out_model(runner, driver.engine.model_config, max(args.batch))
    clock = PartClock(driver)
    for batch in args.batch:
        rounds = [
            host_time(driver, batch, args.steps, clock, args.draw) for _ in range(args.rounds)
        ]
        middle = sorted(rounds, key=lambda time: time.total - time.torch)[len(rounds) // 2]
        print(
            f"batch {batch:4}: {middle.total:5.0f} us a step, {middle.torch:4.0f} of them in torch's "
            f"operations, {middle.total - middle.torch:5.0f} outside",
            flush=True,
        )
        parts = zip(clock.names, middle.parts, strict=True)
        print("  " + ", ".join(f"{name} {time:.0f}" for name, time in parts), flush=True)


if __name__ == "__main__":
    main()
