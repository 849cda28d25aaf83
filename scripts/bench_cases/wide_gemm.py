"""Products of 32 to 256 rows as a decoder has them, at the layers of two models: by the plan that
engine/ops/wide_gemm_sm90.py chooses (with a star), by the best other plans, and torch's library's bare product.
Weights rotate, so that L2 does not hold them. scripts/bench_products.py times chains of dependent launches.
"""

from functools import cache, partial

import torch
from torch import Tensor

from engine.ops import jit
from engine.ops import wide_gemm_sm90 as op
from engine.ops.hopper import device_of
from engine.ops.wide_gemm_sm90 import Plan, Product
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.narrow_gemm import by_library
from scripts.bench_cases.skinny_gemm import LAYERS, num_bytes, numbers

ROWS = (32, 64, 128, 256)
FAR_BEHIND = 1.3
EPS = 1e-6
KINDS = {
    "qkv": {"normed": True},
    "o": {"residual": True},
    "gate_up": {"normed": True, "gated": True},
    "down": {"residual": True},
}
PRODUCTS = {
    name: Product(n, k, **KINDS[kind])
    for name, (n, k) in LAYERS.items()
    if (kind := name.split()[1]) in KINDS
}


@cache
def plans_of(m: int, product: Product) -> list[Plan]:
    """The best estimate, and the two next ones unless they are far behind."""
    rows = op.rows_for(m)

    def estimate(plan: Plan) -> float:
        return op.estimate(plan, rows, product.n, product.k, product.normed, device_of())

    plans = op.candidates(rows, product.n, product.k, device_of(), product.gated)
    plans.sort(key=estimate)
    return [plan for plan in plans if estimate(plan) <= FAR_BEHIND * estimate(plans[0])][:3]


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    products = [(p, plan) for p in PRODUCTS.values() for m in ROWS for plan in plans_of(m, p)]
    jit.prebuild([op.variant(plan, torch.bfloat16, p.normed, p.residual) for p, plan in products])


def tensors(m: int, product: Product) -> tuple[Tensor, Tensor, Tensor]:
    """x, W, and the result, which is the residual if there is one."""
    outputs = product.n // 2 if product.gated else product.n
    return numbers(m, product.k), numbers(product.n, product.k), numbers(m, outputs)


def by_plan(plan: Plan, m: int, product: Product, copies: int) -> list[Launch]:
    compile_all()
    launches: list[Launch] = []
    for _ in range(copies):
        x, w, out = tensors(m, product)
        launches.append(partial(fused, plan, product, x, w, out))
    return launches


def fused(plan: Plan, product: Product, x: Tensor, w: Tensor, out: Tensor) -> None:
    norm_eps = EPS if product.normed else None
    op.launch(x, w, None, out, plan, norm_eps, out if product.residual else None)


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    cases = []
    for name, product in PRODUCTS.items():
        n, k = product.n, product.k
        for m in ROWS:
            traffic, flops, title = num_bytes(m, n, k), 2.0 * m * n * k, f"wide_gemm {name} M={m}"
            cases.append(Case(f"{title} library", partial(by_library, m, n, k), traffic, flops))
            for i, plan in enumerate(plans_of(m, product)[: 1 if m == 32 else None]):
                label = f"{title}{'*' if i == 0 else ''} {plan}"
                cases.append(Case(label, partial(by_plan, plan, m, product), traffic, flops))
    return cases
