"""Offline throughput of the whole engine: all requests at once, random token ids, greedy.

    python scripts/bench_throughput.py --model 7b --work a b c d

Works: a: 1000 requests of 512 in, 128 out; b: 300 of 2048 / 128; c: 1000 of 32 / 256; d: 256 of mixed
lengths, in 16..2048, out 16..512, seeded. --scale 0.1 runs a tenth of the requests.
"""

import argparse
import sys

import numpy as np
from engine_driver import Driver, add_engine_options, model_length, tell_of_cpu
from tqdm import tqdm

from scripts.bench_command import CannotMeasure, parse, run_benchmark, save
from scripts.loadtest.options import positive

WORKS = ["a", "b", "c", "d"]
MOST_SCALE = 1000  # a million requests


def workload(name: str, scale: float) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request."""
    if name == "d":
        rng = np.random.default_rng(0)
        count = max(1, round(256 * scale))
        return [(int(rng.integers(16, 2049)), int(rng.integers(16, 513))) for _ in range(count)]
    count, prompt, output = {"a": (1000, 512, 128), "b": (300, 2048, 128), "c": (1000, 32, 256)}[
        name
    ]
    return [(prompt, output)] * max(1, round(count * scale))


def works_that_fit(asked: list[str] | None, scale: float, most: int, holder: str) -> list[str]:
    """Works whose requests all run, of those asked for, or of all. `holder` takes `most` tokens of each.

    Raises CannotMeasure if one that was asked for does not fit, or if none does.
    """
    sizes = {name: max(sum(size) for size in workload(name, scale)) for name in asked or WORKS}
    large = {name: size for name, size in sizes.items() if size > most}
    if large:
        why = ", ".join(f"{name} has requests of {size} tokens" for name, size in large.items())
        why = f"{why}, and {holder} takes {most}"
        if asked is not None or len(large) == len(sizes):
            raise CannotMeasure(
                f"--work {' '.join(large)}: {why}; leave it out, or use another --model"
            )
    return [name for name in asked or WORKS if name not in large]


def scale(text: str) -> float:
    value: float = positive(text)
    if value > MOST_SCALE:
        raise argparse.ArgumentTypeError(f"{text}: give at most {MOST_SCALE}")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_engine_options(parser)
    parser.add_argument(
        "--work",
        nargs="+",
        choices=WORKS,
        help="which works, in this order: a: 1000 requests of 512 tokens in, 128 out; b: 300 of "
        "2048 / 128; c: 1000 of 32 / 256; d: 256 of mixed lengths (default: all that the model takes)",
    )
    parser.add_argument(
        "--scale",
        type=scale,
        default=1.0,
        help="factor of the numbers of requests; 0.1 sends a tenth, which is over sooner, but keeps "
        "fewer running at once (default: %(default)s)",
    )
    args = parse(parser)
    works_that_fit(args.work, args.scale, model_length(args.model), "the model")
    tell_of_cpu(args.device)
    driver = Driver.of_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    longest = driver.engine.limits.max_model_len  # less than the model's if memory is short
    works = works_that_fit(args.work, args.scale, longest, "the KV cache")
    left_out = [name for name in args.work or WORKS if name not in works]
    if left_out:
        print(
            f"left out: {', '.join(left_out)}, as a request may have {longest} tokens", flush=True
        )
    figures: dict[str, float] = {}
    for name in works:
        rng = np.random.default_rng(ord(name))  # none shares a prefix with another's prompts
        sizes = workload(name, args.scale)
        for prompt, output in sizes:
            driver.add(driver.prompt(rng, prompt), output)
        total = sum(output for _, output in sizes)
        before = driver.loop.scheduler.generation_tokens
        with tqdm(total=total, desc=f"work {name}", unit="tok") as bar:
            seconds = 0.0
            while driver.loop.has_work():
                started = driver.loop.step_seconds
                driver.loop.step()
                seconds += driver.loop.step_seconds - started
                bar.update(driver.loop.scheduler.generation_tokens - before - bar.n)
        driver.check_finished()
        figures[name] = total / seconds
        print(
            f"{name}: {len(sizes)} requests, {total} output tokens in {seconds:.2f} s: "
            f"{total / seconds:,.0f} output tok/s, "
            f"{driver.loop.scheduler.preemptions} preemptions so far",
            flush=True,
        )
    return 0 if save(args.json, figures) else 1


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
