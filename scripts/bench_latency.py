"""Step times of the whole engine: decode at several batch sizes, prefill of one prompt.

    python scripts/bench_latency.py --model 7b --batch 1 8 64 256 --prefill 2048 8192

The model is a directory, or the shape of a known model with random weights (7b, 0.5b). Decode times are
medians over steps at a context of about --context tokens, prefill times the least of four runs.
"""

import argparse
import json
import time

import numpy as np
from engine_driver import Driver, add_engine_options, tell_of_cpu


def decode_step_ms(driver: Driver, batch: int, context: int, steps: int) -> dict[str, float]:
    """Median and 90th percentile of the time between steps with `batch` running requests."""
    rng = np.random.default_rng(batch)
    for _ in range(batch):
        driver.add(driver.prompt(rng, context), steps + 16)
    scheduler = driver.loop.scheduler
    times = []
    while driver.loop.has_work():
        before = scheduler.generation_tokens
        started = time.perf_counter()
        driver.loop.step()
        if scheduler.generation_tokens - before == batch:
            times.append((time.perf_counter() - started) * 1e3)
    times = times[4:-4]  # the pipeline fills and drains
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_engine_options(parser)
    parser.add_argument(
        "--batch",
        type=int,
        nargs="*",
        default=[1, 8, 32, 64, 128, 256],
        help="running requests of the decode steps, one measurement each; needs KV cache for "
        "--context tokens of each; none given: no decode steps (default: 1 8 32 64 128 256)",
    )
    parser.add_argument(
        "--prefill",
        type=int,
        nargs="*",
        default=[2048, 8192, 16384],
        help="tokens of the prompts that are computed alone, four runs each; none given: no "
        "prefill (default: 2048 8192 16384)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=1000,
        help="prompt tokens of each request of the decode steps, computed before they are timed "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=40,
        help="decode steps of each batch, of which the median is printed (default: %(default)s)",
    )
    parser.add_argument(
        "--enforce-eager", action="store_true", help="no CUDA graphs: a faster start, slower steps"
    )
    args = parser.parse_args()
    tell_of_cpu(args.device)
    driver = Driver.of_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        enforce_eager=args.enforce_eager,
        enable_prefix_caching=False,
        max_num_seqs=max(args.batch, default=1),
    )
    figures: dict[str, object] = {"model": args.model, "start_s": round(driver.start_seconds, 2)}
    print(f"start: {driver.start_seconds:.1f} s", flush=True)
    for batch in args.batch:
        step = decode_step_ms(driver, batch, args.context, args.steps)
        figures[f"decode_{batch}"] = step
        print(f"decode, batch {batch:4}: {step['p50']:8.2f} ms (p90 {step['p90']:.2f})", flush=True)
    for length in args.prefill:
        figures[f"prefill_{length}"] = best = prefill_ms(driver, length)
        print(f"prefill, {length:6} tokens: {best:8.1f} ms", flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
