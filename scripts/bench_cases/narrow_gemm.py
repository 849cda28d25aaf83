"""Products of 8 to 64 rows by several plans each, by torch's library, and with what surrounds them in a decoder:
all in one kernel, and in kernels of their own.

The plan that engine/ops/narrow_gemm.py chooses has a star. Weights rotate, so that L2 does not hold them.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit
from engine.ops import narrow_gemm as op
from engine.ops.activation import silu_and_mul
from engine.ops.hopper import device_of
from engine.ops.rms_norm import rms_norm
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.skinny_gemm import LAYERS, num_bytes, numbers

ROWS = (8, 16, 32, 64)
EPS = 1e-6


@cache
def plans_of(m: int, n: int, k: int, gated: bool = False) -> list[op.Plan]:
    """The best estimate of each size of cluster and of each width of chunk, and the three best of all,
    best first."""
    device = device_of()
    plans = op.candidates(op.column_tiles_for(m), n, k, device, gated)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    kinds = [[p for p in plans if p.cluster == c] for c in op.CLUSTERS]
    kinds += [[p for p in plans if p.tiling.chunk == chunk] for chunk in (64, 128, 256)]
    firsts = [kind[0] for kind in kinds if kind]
    return [plan for i, plan in enumerate(plans) if i < 3 or plan in firsts]


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    plain = [(plan, False) for n, k in LAYERS.values() for m in ROWS for plan in plans_of(m, n, k)]
    normed = [(plan, True) for plan, _ in plain]
    gated = [
        (plan, True)
        for name, (n, k) in LAYERS.items()
        if name.endswith("gate_up")
        for m in ROWS
        for plan in plans_of(m, n, k, gated=True)
    ]
    jit.prebuild([op.variant(p, torch.bfloat16, e) for p, e in (*plain, *normed, *gated)])


def by_plan(
    plan: op.Plan, m: int, n: int, k: int, norm_eps: float | None, copies: int
) -> list[Launch]:
    compile_all()
    outputs = n // 2 if plan.gated else n
    return [
        partial(op.launch, numbers(m, k), numbers(n, k), None, numbers(m, outputs), plan, norm_eps)
        for _ in range(copies)
    ]


def by_library(m: int, n: int, k: int, copies: int) -> list[Launch]:
    return [partial(F.linear, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def with_residual(m: int, n: int, k: int, copies: int) -> list[Launch]:
    launches: list[Launch] = []
    for _ in range(copies):
        hidden = numbers(m, n)
        x, w = numbers(m, k), numbers(n, k)
        launches.append(partial(op.narrow_gemm, x, w, None, hidden, residual=hidden))
    return launches


def apart(m: int, n: int, k: int, gated: bool, copies: int) -> list[Launch]:
    """The norm, this kernel, the gate."""

    def launch(x: Tensor, w: Tensor) -> Tensor:
        y = op.narrow_gemm(rms_norm(x, None, EPS), w)
        return silu_and_mul(y, interleaved=True) if gated else y

    return [partial(launch, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def bench_cases() -> list[Case]:
    cases = []
    for name, (n, k) in LAYERS.items():
        for m in ROWS:
            traffic, flops, title = num_bytes(m, n, k), 2.0 * m * n * k, f"narrow_gemm {name} M={m}"
            library = partial(by_library, m, n, k)
            cases.append(Case(f"{title} library", library, traffic, flops))
            for i, plan in enumerate(plans_of(m, n, k)):
                label = f"{title}{'*' if i == 0 else ''} {plan}"
                cases.append(Case(label, partial(by_plan, plan, m, n, k, None), traffic, flops))
            if name.endswith((" o", "down")):
                launches = partial(with_residual, m, n, k)
                cases.append(Case(f"{title} + residual", launches, traffic, flops))
            if name.endswith(("qkv", "gate_up")):
                gated = name.endswith("gate_up")
                for i, plan in enumerate(plans_of(m, n, k, gated)):
                    label = f"{title}{'*' if i == 0 else ''} {plan}, normed{', gated' * gated}"
                    cases.append(Case(label, partial(by_plan, plan, m, n, k, EPS), traffic, flops))
                launches = partial(apart, m, n, k, gated)
                label = f"{title} norm{' and gate' * gated} apart"
                cases.append(Case(label, launches, traffic, flops))
    return cases
