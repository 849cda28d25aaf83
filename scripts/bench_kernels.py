#!/usr/bin/env python3
"""Measure the CUDA kernels against what the card can do.

    python scripts/bench_kernels.py [--only NAME] [--json FILE]

Each kernel runs in a CUDA graph, on buffers that together exceed the L2 cache (but for sizes so small
that they would be there in a real step as well). Copy bandwidth and the rate of a large bfloat16 matrix
product are measured in the same run; the limit of a case is the time that its bytes take at the one and
its arithmetic at the other, whichever is longer. The cases are in scripts/bench_cases/.
"""

import argparse
import importlib
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from scripts import bench_cases  # noqa: E402
from scripts.bench_cases import Case, measure  # noqa: E402
from scripts.bench_command import parse, run_benchmark, save  # noqa: E402

SMALL_BYTES = 4 << 20  # below, data would be in L2 in a real step too
LARGE_BYTES = 128 << 20  # above, a launch takes so long that a graph may have a single one
MAX_COPIES = 64
MIN_LAUNCHES = 24  # of a small kernel in a graph, so that the graph's own start does not count
MAX_WORKING_SET = 24 << 30


@dataclass
class Result:
    name: str
    microseconds: float
    gb_per_s: float
    tflop_per_s: float
    of_limit: float  # 1: as fast as a copy or a large matrix product


def all_cases(only: str) -> list[Case]:
    """Those whose name contains `only`, of all modules in bench_cases that have any."""
    cases: list[Case] = []
    for info in pkgutil.iter_modules(bench_cases.__path__):
        module = importlib.import_module(f"scripts.bench_cases.{info.name}")
        if hasattr(module, "bench_cases"):
            cases += module.bench_cases()
    return [case for case in cases if only in case.name]


def number_of_copies(case: Case, l2_bytes: int) -> int:
    """So many that a launch's data has left L2 when its turn comes again."""
    if case.num_bytes < SMALL_BYTES:
        return 8
    wanted = 2 + int(3 * l2_bytes / case.num_bytes)
    return max(1, min(wanted, MAX_COPIES, int(MAX_WORKING_SET / case.num_bytes)))


def run(case: Case, bandwidth: float, rate: float, l2_bytes: int) -> Result:
    launches = case.setup(number_of_copies(case, l2_bytes))
    rounds = -(-MIN_LAUNCHES // len(launches)) if case.num_bytes < LARGE_BYTES else 1
    seconds = measure.time_launches(launches, rounds)
    limit = max(case.num_bytes / bandwidth, case.flops / rate)
    return Result(
        case.name,
        seconds * 1e6,
        case.num_bytes / seconds / 1e9,
        case.flops / seconds / 1e12,
        limit / seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    options = parse(parser)
    if not torch.cuda.is_available():
        print("bench_kernels.py measures CUDA kernels and finds no CUDA device", file=sys.stderr)
        return 1
    cases = all_cases(options.only)
    if not cases:
        print(f"no case has {options.only!r} in its name", file=sys.stderr)
        return 1
    bandwidth, rate = measure.copy_bandwidth(), measure.matmul_rate()
    torch.cuda.empty_cache()
    card = torch.cuda.get_device_name(0)
    print(f"{card}: copy {bandwidth / 1e9:.0f} GB/s, matmul {rate / 1e12:.0f} TFLOP/s (bfloat16)")
    width = max(len(case.name) for case in cases)
    print(f"{'':{width}}  {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of limit':>8}")
    results, failures = [], 0
    for case in cases:
        try:
            result = run(case, bandwidth, rate, measure.l2_bytes())
        except Exception as error:  # the other cases still say something
            failures += 1
            print(f"{case.name:{width}}  failed: {type(error).__name__}: {error}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        results.append(result)
        print(
            f"{result.name:{width}}  {result.microseconds:9.2f} {result.gb_per_s:7.0f} "
            f"{result.tflop_per_s:8.1f} {100 * result.of_limit:7.1f}%",
            flush=True,
        )
    record = {
        "card": card,
        "copy_gb_per_s": bandwidth / 1e9,
        "matmul_tflop_per_s": rate / 1e12,
        "cases": [vars(result) for result in results],
    }
    return 0 if save(options.json, record) and not failures else 1


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
