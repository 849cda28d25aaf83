"""Offline throughput of the whole engine: all requests at once, random token ids, greedy.

    python scripts/bench_throughput.py --model 7b --work a b c d

Works: a: 1000 requests of 512 in, 128 out; b: 300 of 2048 / 128; c: 1000 of 32 / 256; d: 256 of mixed
lengths, in 16..2048, out 16..512, seeded. --scale 0.1 runs a tenth of the requests.
"""

import argparse
import json

import numpy as np
from engine_driver import Driver, add_engine_options, tell_of_cpu
from tqdm import tqdm


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_engine_options(parser)
    parser.add_argument(
        "--work",
        nargs="*",
        default=["a", "b", "c", "d"],
        choices=["a", "b", "c", "d"],
        help="which works, in this order: a: 1000 requests of 512 tokens in, 128 out; b: 300 of "
        "2048 / 128; c: 1000 of 32 / 256; d: 256 of mixed lengths (default: all)",
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="factor of the numbers of requests; 0.1 sends a tenth, which is over sooner, but keeps "
        "fewer running at once (default: %(default)s)",
    )
    args = parser.parse_args()
    tell_of_cpu(args.device)
    driver = Driver.of_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    figures: dict[str, float] = {}
    for name in args.work:
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
        figures[name] = total / seconds
        print(
            f"{name}: {len(sizes)} requests, {total} output tokens in {seconds:.2f} s: "
            f"{total / seconds:,.0f} output tok/s, "
            f"{driver.loop.scheduler.preemptions} preemptions so far",
            flush=True,
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
