"""Products of 32 to 256 rows by several plans each, and by torch's library, at the layers of two models; then
behind a small kernel, as in a decode step: then launches depend on each other, but where a case says "apart".

The plan that engine/ops/wide_gemm_sm90.py chooses has a star. Weights rotate, so that L2 does not hold them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit
from engine.ops import wide_gemm_sm90 as op
from engine.ops.narrow_gemm import device_of
from engine.ops.rms_norm import rms_norm
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.narrow_gemm import by_library
from scripts.bench_cases.skinny_gemm import LAYERS, num_bytes, numbers

Multiply = Callable[[Tensor, Tensor], Tensor]

ROWS = (32, 48, 64, 96, 128, 192, 256)
CHAIN_ROWS = (64, 128, 256)
SIZES = {name: size for name, size in LAYERS.items() if not name.endswith("head")}


@cache
def plans_of(m: int, n: int, k: int) -> list[op.Plan]:
    """By their estimates: the best, the best of small clusters, and the best of those that divide tiles
    where the first does not, or the other way round."""
    device = device_of()
    plans = op.candidates(op.columns_for(m), n, k, device)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    best = plans[0]
    small = next(plan for plan in plans if plan.cluster <= 2)
    other = [plan for plan in plans if plan.is_divided != best.is_divided]
    return list(dict.fromkeys([best, small, *other[:1]]))


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    plans = [plan for n, k in SIZES.values() for m in ROWS for plan in plans_of(m, n, k)]
    specs = {str(spec): spec for spec in (op.variant(plan, torch.bfloat16) for plan in plans)}
    jit.prebuild(list(specs.values()))


def by_plan(plan: op.Plan, m: int, n: int, k: int, copies: int) -> list[Launch]:
    compile_all()
    return [
        partial(op.launch, numbers(m, k), numbers(n, k), None, numbers(m, n), plan)
        for _ in range(copies)
    ]


def library(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def ours(plan: op.Plan, x: Tensor, w: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], w.shape[0])
    op.launch(x, w, None, out, plan)
    return out


def chain(multiply: Multiply, dependent: bool, m: int, n: int, k: int, copies: int) -> list[Launch]:
    """Each launch is of a small kernel and of the product of what it wrote."""
    compile_all()
    norm_weight = numbers(k)

    def step(source: Tensor, w: Tensor) -> Tensor:
        with jit.dependent_launches() if dependent else nullcontext():
            return multiply(rms_norm(source, norm_weight, 1e-6), w)

    return [partial(step, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    cases = []
    for name, (n, k) in SIZES.items():
        for m in ROWS:
            traffic, flops, title = num_bytes(m, n, k), 2.0 * m * n * k, f"wide_gemm {name} M={m}"
            cases.append(Case(f"{title} library", partial(by_library, m, n, k), traffic, flops))
            for i, plan in enumerate(plans_of(m, n, k)):
                label = f"{title}{'*' if i == 0 else ''} {plan}"
                cases.append(Case(label, partial(by_plan, plan, m, n, k), traffic, flops))
    for name, (n, k) in SIZES.items():
        for m in CHAIN_ROWS:
            best = plans_of(m, n, k)[0]
            ways: list[tuple[str, Multiply, bool]] = [
                ("library", library, True),
                (f"{best}, apart", partial(ours, best), False),
            ]
            ways += [(f"{plan}", partial(ours, plan), True) for plan in plans_of(m, n, k)]
            for label, multiply, dependent in ways:
                setup = partial(chain, multiply, dependent, m, n, k)
                title = f"wide_gemm chain {name} M={m} {label}"
                cases.append(Case(title, setup, num_bytes(m, n, k)))
    return cases
