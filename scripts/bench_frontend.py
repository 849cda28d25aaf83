#!/usr/bin/env python3
"""What server and tokenizer_proc cost and bear, with the engine replaced by a source of tokens.

    python scripts/bench_frontend.py                       # the default model's tokenizer
    python scripts/bench_frontend.py --model DIR --tokens-per-s 8000 15000

    client ──HTTP, SSE──► server ◄──► tokenizer_proc ◄──► stand-in for the engine
    (raw sockets)         └──────── the pair ──────┘      (a token a step for each live request)

* Added latency: from the engine's send of a step to the client's read, as the text itself tells
  (scripts/frontend/word_clock.py).
* Sustained: at least 97% of what is offered arrives, and 99% of it within 100 ms. Without
  --tokens-per-s the load is raised until that is no longer so, then halved for the latency.
* Added TTFT: one request at a time; the stand-in answers at once, so all of it is the pair's.

Client and stand-in use the same cores, so CPU time per 1,000 tokens says more than the rate.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.api.process import die_with_parent  # noqa: E402
from scripts.frontend.client import Job, Result  # noqa: E402
from scripts.frontend.figures import Level, level_of, percentile  # noqa: E402
from scripts.frontend.processes import CpuWatch, find_processes  # noqa: E402
from scripts.frontend.word_clock import WordClock  # noqa: E402
from scripts.loadtest.options import advised, at_least_one, positive  # noqa: E402
from scripts.operate.server_process import free_port, interrupt_on_sigterm  # noqa: E402
from server.command import INTERRUPTED  # noqa: E402
from server.default_model import BarProgress, ensure_default_model  # noqa: E402

START_LIMIT_S = 60.0
LEAST_STEPS = 2  # of a level: its first and its last token
PROMPT = "What is the capital of France? " * 4
NAMES = ("server", "tokenizer_proc", "engine", "client")


@contextmanager
def running_server(model: str, log: Path) -> Iterator[tuple[int, int]]:
    """The server with the stand-in, ready; yields its port and process id."""
    port = free_port()
    command = [sys.executable, "-m", "scripts.frontend.serve", model, "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is for this program, which then ends the server
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    try:
        wait_ready(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:  # not bound yet, or still 503
            time.sleep(0.05)
    raise RuntimeError(f"the server is not ready (exit code {process.poll()})")


class Bench:
    """Levels of load against one running server."""

    def __init__(self, model: str, port: int, pid: int, streams: int, seconds: float) -> None:
        self.model, self.port = model, port
        self.pids = find_processes(pid)
        self.streams, self.seconds = streams, seconds

    def job(self, streams: int, tokens: int, step_us: int, rounds: int = 1) -> Job:
        return Job(
            host="127.0.0.1",
            port=self.port,
            tokenizer_dir=self.model,
            streams=streams,
            tokens=tokens,
            step_us=step_us,
            prompt=PROMPT,
            rounds=rounds,
            pause_s=0.01,
        )

    def level(self, tokens_per_s: float) -> Level:
        step_us, tokens = steps_of(self.streams, tokens_per_s, self.seconds)
        job = self.job(self.streams, tokens, step_us)
        watch = CpuWatch(self.pids)
        watch.start()
        try:
            result = run_client(job)
        finally:
            watch.end()
        return level_of(job, result, watch)

    def ttft(self, requests: int) -> Result:
        """One request at a time, of two tokens."""
        return run_client(self.job(1, 2, 10_000, requests))


def steps_of(streams: int, tokens_per_s: float, seconds: float) -> tuple[int, int]:
    """Microseconds of a step, and how many there are."""
    step_us = max(1, round(streams / tokens_per_s * 1e6))
    return step_us, int(seconds * 1e6 / step_us)


def run_client(job: Job) -> Result:
    """Raises RuntimeError when the client failed."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.frontend.client"],
        cwd=ROOT,
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        check=True,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    result = msgspec.json.decode(done.stdout, type=Result)
    if result.problem:
        raise RuntimeError(f"the client failed: {result.problem}")
    return result


def show_header() -> None:
    cpu = " ".join(f"{name:>14}" for name in NAMES)
    print(
        f"{'tokens/s':>9} {'offered':>8} {'p50 ms':>7} {'p99 ms':>7} {'tok/event':>9} {cpu} {'pair':>7}"
    )
    print(f"{'':>44} {'CPU ms per 1,000 tokens (and % of a core)':>59}")


def show(level: Level) -> None:
    cpu = " ".join(
        f"{level.cpu_ms_per_1k[name]:7.2f} ({level.cpu_percent[name]:3.0f}%)" for name in NAMES
    )
    mark = "" if level.is_sustained() else "  not sustained"
    print(
        f"{level.tokens_per_s:9.0f} {level.offered:8.0f} {level.p50_ms:7.2f} {level.p99_ms:7.2f} "
        f"{level.tokens_per_event:9.2f} {cpu} {level.pair_ms_per_1k:7.2f}{mark}",
        flush=True,
    )


def climb(bench: Bench, start: float, factor: float) -> float:
    """Raise the load until it is too much twice; the best rate that was sustained."""
    best, rate, failures = 0.0, start, 0
    while failures < 2:
        level = bench.level(rate)
        show(level)
        if level.is_sustained():
            best, failures = max(best, level.tokens_per_s), 0
            rate *= factor
        else:
            failures += 1  # once may be the machine's other work
    return best


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", metavar="DIR", help="whose tokenizer to use; its weights are not"
    )
    parser.add_argument(
        "--streams",
        type=at_least_one,
        default=256,
        help="requests at a time, which share the tokens/s (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=finite,
        default=4.0,
        help="length of each level; more gives steadier figures (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens-per-s",
        type=finite,
        nargs="*",
        help="measure these levels instead of searching for the highest that is sustained",
    )
    parser.add_argument(
        "--start",
        type=finite,
        default=8000,
        help="tokens/s of the first level of the search (default: %(default)s)",
    )
    parser.add_argument(
        "--factor",
        type=above_one,
        default=1.15,
        help="from one level of the search to the next; nearer to 1 is finer, and takes longer "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--requests",
        type=at_least_one,
        default=300,
        help="requests, one at a time, for the added TTFT (default: %(default)s)",
    )
    return parser


@advised
def finite(text: str) -> float:
    value: float = positive(text)
    if value == math.inf:
        raise ValueError(f"{text!r}: give a number that is not infinite")
    return value


@advised
def above_one(text: str) -> float:
    """Any other factor would measure the same level for ever."""
    value: float = finite(text)
    if value <= 1:
        raise ValueError(f"{text!r}: give a number above 1, as each level is higher than the last")
    return value


def check_levels(args: argparse.Namespace) -> None:
    """Raises ValueError for a level that would end before it can be measured."""
    flag, levels = (
        ("--tokens-per-s", args.tokens_per_s) if args.tokens_per_s else ("--start", [args.start])
    )
    for rate in levels:
        if steps_of(args.streams, rate, args.seconds)[1] < LEAST_STEPS:
            raise ValueError(
                f"{flag} {rate:g}: {args.streams} streams get less than {LEAST_STEPS} tokens each of it "
                f"in {args.seconds:g} s: raise it or --seconds, or lower --streams"
            )


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    try:
        check_levels(args)
    except ValueError as error:
        parser.error(str(error))
    interrupt_on_sigterm()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("interrupted: the levels above were measured", file=sys.stderr)
        return INTERRUPTED


def run(args: argparse.Namespace) -> int:
    model = args.model or str(ensure_default_model(BarProgress()))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.streams} streams")
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        log = Path(folder) / "server.log"
        try:
            with running_server(model, log) as (port, pid):
                measure(Bench(model, port, pid, args.streams, args.seconds), args)
        except (RuntimeError, ValueError) as error:
            print(f"error: {error}\n{log.read_text()}", file=sys.stderr)
            return 1
    return 0


def measure(bench: Bench, args: argparse.Namespace) -> None:
    show_ttft(bench.ttft(args.requests), WordClock(bench.model))
    show_header()
    if args.tokens_per_s:
        for rate in args.tokens_per_s:
            show(bench.level(rate))
        return
    best = climb(bench, args.start, args.factor)
    print(f"sustained: {best:.0f} tokens/s; at half of it:")
    show(bench.level(best / 2))


def show_ttft(result: Result, clock: WordClock) -> None:
    down = result.first_ages_ns
    for name, values in (("whole", result.ttft_ns), ("engine's send to client", down)):
        middle, high = percentile(values, 0.5) * 1e-6, percentile(values, 0.99) * 1e-6
        print(f"added TTFT, {name}: p50 {middle:.2f} ms, p99 {high:.2f} ms")


if __name__ == "__main__":
    sys.exit(main())
