"""Products of up to 128 rows by several plans each, and by torch's library, at the layers of two models.

The plan that engine/ops/narrow_gemm.py chooses has a star. Weights rotate, so that L2 does not hold them.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F

from engine.ops import jit
from engine.ops import narrow_gemm as op
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.skinny_gemm import LAYERS, num_bytes, numbers

ROWS = (1, 8, 16, 32, 64, 128)


@cache
def plans_of(m: int, n: int, k: int) -> list[op.Plan]:
    """The best estimate of each size of cluster and the three best of all, best first."""
    device = op.device_of()
    plans = op.candidates(op.column_tiles_for(m), n, k, device)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    by_cluster = [next((p for p in plans if p.cluster == c), None) for c in op.CLUSTERS]
    return [plan for i, plan in enumerate(plans) if i < 3 or plan in by_cluster]


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    plans = [plan for n, k in LAYERS.values() for m in ROWS for plan in plans_of(m, n, k)]
    jit.prebuild([op.variant(plan, torch.bfloat16) for plan in plans])


def by_plan(plan: op.Plan, m: int, n: int, k: int, copies: int) -> list[Launch]:
    compile_all()
    return [
        partial(op.launch, numbers(m, k), numbers(n, k), None, numbers(m, n), plan)
        for _ in range(copies)
    ]


def by_library(m: int, n: int, k: int, copies: int) -> list[Launch]:
    return [partial(F.linear, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def bench_cases() -> list[Case]:
    cases = []
    for name, (n, k) in LAYERS.items():
        for m in ROWS:
            traffic, flops, title = num_bytes(m, n, k), 2.0 * m * n * k, f"narrow_gemm {name} M={m}"
            library = partial(by_library, m, n, k)
            cases.append(Case(f"{title} library", library, traffic, flops))
            for i, plan in enumerate(plans_of(m, n, k)):
                label = f"{title}{'*' if i == 0 else ''} {plan}"
                cases.append(Case(label, partial(by_plan, plan, m, n, k), traffic, flops))
    return cases
