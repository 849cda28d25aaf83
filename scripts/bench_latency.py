"""Step times of the whole engine: decode at several batch sizes, prefill of one prompt.

    python scripts/bench_latency.py --model 7b --batch 1 8 64 256 --prefill 2048 8192

The model is a directory, or the shape of a known model with random weights (7b, 0.5b). Decode times are
medians over steps at a context of about --context tokens, prefill times the least of four runs.
"""

import argparse
import sys
import time

import numpy as np
from engine_driver import Driver, add_engine_options, model_length, tell_of_cpu

from engine.api.config import MOST_SEQS, ConfigError
from scripts.bench_command import CannotMeasure, parse, run_benchmark, save
from scripts.loadtest.options import at_least_one

BATCHES = [1, 8, 32, 64, 128, 256]
PREFILLS = [2048, 8192, 16384]
SPARE_STEPS = 16  # while not yet or no longer all requests of a batch run


class NeverTogether(Exception):
    """The requests of a batch did not all run at once, or for too few steps."""


def decode_step_ms(driver: Driver, batch: int, context: int, steps: int) -> dict[str, float]:
    """Median and 90th percentile of the time between steps with `batch` running requests."""
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        driver.add(driver.prompt(rng, context), steps + SPARE_STEPS)
    scheduler = driver.loop.scheduler
    times = []
    while driver.loop.has_work():
        before = scheduler.generation_tokens
        started = time.perf_counter()
        driver.loop.step()
        if scheduler.generation_tokens - before == batch:
            times.append((time.perf_counter() - started) * 1e3)
    driver.check_finished()
    times = times[4:-4]  # the pipeline fills and drains
    if not times:
        raise NeverTogether(
            "no figure, as its requests did not all run at once: the KV cache is too small, or the first "
            "ended before the last prompt was computed; raise --steps, or lower --batch or --context"
        )
    return {"p50": float(np.percentile(times, 50)), "p90": float(np.percentile(times, 90))}


def prefill_ms(driver: Driver, length: int) -> float:
    """Least time from adding one prompt of `length` tokens to its first token."""
    rng = np.random.default_rng(length)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        driver.add(driver.prompt(rng, length), 1)
        driver.run()
        best = min(best, (time.perf_counter() - started) * 1e3)
    return best


def check_lengths(options: argparse.Namespace, most: int, holder: str) -> None:
    """Raises CannotMeasure for requests that would never run. `holder` takes `most` tokens of each."""
    for length in options.prefill or []:
        if length >= most:
            raise CannotMeasure(
                f"--prefill {length}: {holder} takes {most} tokens, the generated one included; use at "
                f"most {most - 1}"
            )
    needed = options.context + options.steps + SPARE_STEPS
    if options.batch != [] and needed > most:
        raise CannotMeasure(
            f"--context {options.context}: with --steps {options.steps} a request has {needed} tokens, "
            f"and {holder} takes {most}; lower one of them by {needed - most}, or give --batch no number"
        )


def most_at_once(driver: Driver, context: int) -> int:
    """Requests of which each has `context` tokens, and one to come, in the KV cache."""
    limits = driver.engine.limits
    return limits.num_blocks // -(-(context + 1) // limits.block_size)


def batches_of(options: argparse.Namespace, most: int) -> list[int]:
    """To measure. Raises CannotMeasure for one that was asked for, and that the KV cache is too small for."""
    asked: list[int] | None = options.batch
    if asked is None:
        return fitting("decode, batches", BATCHES, most, "the KV cache")
    for batch in asked:
        if batch > most:
            raise CannotMeasure(
                f"--batch {batch}: the KV cache holds {most} requests of --context {options.context} at "
                "once; lower one of them, or see --kv-cache-dtype"
            )
    return asked


def prefills_of(options: argparse.Namespace, most: int) -> list[int]:
    asked: list[int] | None = options.prefill
    if asked is None:
        return fitting("prefill, tokens", PREFILLS, most - 1, "a request")
    return asked


def fitting(what: str, sizes: list[int], most: int, holder: str) -> list[int]:
    """Of default sizes those that can be measured here; tells of the others."""
    large = [str(size) for size in sizes if size > most]
    if large:
        print(f"{what}: {', '.join(large)} left out, {holder} has room for {most}", flush=True)
    return [size for size in sizes if size <= most]


def batch_size(text: str) -> int:
    size: int = at_least_one(text)
    if size > MOST_SEQS:
        raise argparse.ArgumentTypeError(f"{text}: give at most {MOST_SEQS}")
    return size


def start(options: argparse.Namespace) -> Driver:
    """Raises ConfigError that names our own flags."""
    try:
        return Driver.of_model(
            options.model,
            device=options.device,
            dtype=options.dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            enforce_eager=options.enforce_eager,
            enable_prefix_caching=False,
            max_num_seqs=max(BATCHES if options.batch is None else options.batch, default=1),
        )
    except ConfigError as error:
        message = str(error).replace("--max-num-seqs", "--batch")
        raise ConfigError(message, error.exit_code) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_engine_options(parser)
    parser.add_argument(
        "--batch",
        type=batch_size,
        nargs="*",
        help="running requests of the decode steps, one measurement each; needs KV cache for "
        "--context tokens of each; none given: no decode steps (default: those of 1 8 32 64 128 256 "
        "that there is room for)",
    )
    parser.add_argument(
        "--prefill",
        type=at_least_one,
        nargs="*",
        help="tokens of the prompts that are computed alone, four runs each; none given: no "
        "prefill (default: those of 2048 8192 16384 that the model takes)",
    )
    parser.add_argument(
        "--context",
        type=at_least_one,
        default=1000,
        help="prompt tokens of each request of the decode steps, computed before they are timed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=at_least_one,
        default=40,
        help="decode steps of each batch, of which the median is printed (default: %(default)s)",
    )
    parser.add_argument(
        "--enforce-eager", action="store_true", help="no CUDA graphs: a faster start, slower steps"
    )
    args = parse(parser)
    check_lengths(args, model_length(args.model), "the model")
    tell_of_cpu(args.device)
    driver = start(args)
    figures: dict[str, object] = {"model": args.model, "start_s": round(driver.start_seconds, 2)}
    print(f"start: {driver.start_seconds:.1f} s", flush=True)
    longest = driver.engine.limits.max_model_len
    check_lengths(args, longest, "the KV cache")
    batches = batches_of(args, most_at_once(driver, args.context))
    prefills = prefills_of(args, longest)
    exit_code = 0
    for batch in batches:
        try:
            step = decode_step_ms(driver, batch, args.context, args.steps)
        except NeverTogether as error:  # the other sizes still say something
            print(f"decode, batch {batch:4}: {error}", flush=True)
            exit_code = 1
            continue
        figures[f"decode_{batch}"] = step
        print(f"decode, batch {batch:4}: {step['p50']:8.2f} ms (p90 {step['p90']:.2f})", flush=True)
    for length in prefills:
        figures[f"prefill_{length}"] = best = prefill_ms(driver, length)
        print(f"prefill, {length:6} tokens: {best:8.1f} ms", flush=True)
    return exit_code if save(args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
