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
from engine_driver import SHAPES, Driver, model_directory
from torch.utils._python_dispatch import TorchDispatchMode

from engine.api.config import EngineConfig
from engine.api.messages import StepOutput, encoder
from engine.attention.base import AttentionBackend, StepInputs
from engine.models.config import ModelConfig
from engine.runner.runner import ModelRunner, StepHandle

WARM_UP_STEPS = 20


def leave_out_model(runner: ModelRunner, config: ModelConfig, max_batch: int) -> None:
    """Constants instead of hidden states and logits (CPU)."""
    hidden = torch.zeros(4096, config.hidden_size)
    logits = torch.randn(max(max_batch, 4), config.vocab_size)

    def forward(inputs: StepInputs, attention: AttentionBackend) -> torch.Tensor:
        return hidden[: len(inputs.positions)]

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


class WaitClock:
    """Seconds spent in `StepHandle.wait`, while the device works."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = StepHandle.wait

        def timed(handle: StepHandle) -> object:
            started = time.perf_counter()
            result = wait(handle)
            self.seconds += time.perf_counter() - started
            return result

        StepHandle.wait = timed  # type: ignore[method-assign,assignment]


@dataclass(slots=True)
class HostTime:
    """Mean microseconds of a decode step."""

    total: float
    torch: float  # of these, inside torch's operations; 0 on a GPU, where they only launch


def host_time(driver: Driver, batch: int, steps: int, clock: WaitClock) -> HostTime:
    """Measure `steps` decode steps with `batch` running requests."""
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        driver.add(driver.prompt(rng, 64), steps + WARM_UP_STEPS + 64)
    scheduler = driver.loop.scheduler
    while scheduler.num_running < batch or scheduler.generation_tokens < batch:
        driver.loop.step()
    for _ in range(WARM_UP_STEPS):
        driver.loop.step()
    gc.collect()
    gc.freeze()
    waited, started = clock.seconds, time.perf_counter()
    for _ in range(steps):
        driver.loop.step()
    seconds = time.perf_counter() - started - (clock.seconds - waited)
    assert scheduler.num_running == batch, "a request ended while it was measured"
    recorder = Recorder()
    if driver.loop.runner.table.last_token.device.type == "cpu":
        with recorder:
            driver.loop.step()
    for req_id in list(driver.requests):
        driver.abort(req_id)
    driver.run()
    return HostTime(seconds / steps * 1e6, recorder.replay_us() if recorder.calls else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="tiny", help=f"directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3, help="the middle one is printed")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    driver = Driver(
        EngineConfig(
            model=model_directory(args.model),
            load_format="dummy" if args.model in SHAPES else "auto",
            device=args.device,
            max_num_seqs=max(args.batch),
            max_model_len=1024,
        )
    )
    encode = encoder().encode

    def send(output: StepOutput) -> None:  # what the engine process does, less the socket
        encode(output)

    driver.loop.send = send
    runner = driver.loop.runner
    if runner.table.last_token.device.type == "cpu":
        leave_out_model(runner, driver.engine.model_config, max(args.batch))
    clock = WaitClock()
    for batch in args.batch:
        rounds = [host_time(driver, batch, args.steps, clock) for _ in range(args.rounds)]
        middle = sorted(rounds, key=lambda time: time.total - time.torch)[len(rounds) // 2]
        print(
            f"batch {batch:4}: {middle.total:5.0f} us a step, {middle.torch:4.0f} of them in torch's "
            f"operations, {middle.total - middle.torch:5.0f} outside",
            flush=True,
        )


if __name__ == "__main__":
    main()
