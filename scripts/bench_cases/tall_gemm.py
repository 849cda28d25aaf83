"""Products of many rows as a decoder's prompts have them, at the layers of two models: by our kernel with each
tile (a star: the one that engine/ops/tall_gemm_sm90.py takes), and by torch's library with the kernels behind it
that it needs. None of them norms x, which has a kernel in front in any case, but at 256 rows: there all do that
want it normed, and engine/ops/wide_gemm_sm90.py, which norms on the way, is beside them.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit
from engine.ops import tall_gemm_sm90 as op
from engine.ops import wide_gemm_sm90 as wide
from engine.ops.activation import silu_and_mul
from engine.ops.narrow_gemm import device_of
from engine.ops.rms_norm import rms_norm
from engine.ops.wide_gemm_sm90 import Product
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.skinny_gemm import EPS, numbers
from scripts.bench_cases.wide_gemm import PRODUCTS

WIDE_ROWS = wide.ROWS[-1]
ROWS = (WIDE_ROWS, 320, 512, 1024, 2048, 8192)
Work = Callable[[Tensor, Tensor, Tensor | None, Tensor], None]  # x, W, bias, out


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    kinds = {(p.gated, p.residual) for p in PRODUCTS.values()}
    specs = [op.variant(tile, torch.bfloat16, *kind) for kind in kinds for tile in op.TILES]
    for p in PRODUCTS.values():
        plan = wide.prepare(WIDE_ROWS, p.n, p.k, p.gated, p.normed, None)
        specs.append(wide.variant(plan, torch.bfloat16, p.normed, p.residual))
    jit.prebuild(specs)


def by_tile(
    tile: int, product: Product, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    op.launch(x, w, bias, out, tile, product.gated, product.residual)


def by_library(product: Product, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if product.residual:
        out.addmm_(x, w.t())
        return
    y = F.linear(x, w, bias)
    if product.gated:
        silu_and_mul(y, interleaved=True)


def by_wide(product: Product, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    plan = wide.prepare(
        wide.rows_for(len(x)), product.n, product.k, product.gated, product.normed, None
    )
    wide.launch(
        x, w, bias, out, plan, EPS if product.normed else None, out if product.residual else None
    )


def behind_norm(work: Work, x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    work(rms_norm(x, None, EPS), w, bias, out)


def launches(work: Work, m: int, product: Product, copies: int) -> list[Launch]:
    """A bias where queries, keys and values have one."""
    compile_all()
    outputs = product.n // 2 if product.gated else product.n
    has_bias = not (product.gated or product.residual)
    return [
        partial(
            work,
            numbers(m, product.k),
            numbers(product.n, product.k),
            numbers(product.n) if has_bias else None,
            numbers(m, outputs),
        )
        for _ in range(copies)
    ]


def num_bytes(m: int, product: Product) -> float:
    """Of x, W and the result, and of the residual."""
    n, k = product.n, product.k
    outputs = n // 2 if product.gated else n
    return 2.0 * (n * k + m * k + m * outputs * (2 if product.residual else 1))


def cases_of(name: str, product: Product, m: int) -> list[Case]:
    taken = op.tile_for(m, product.n, device_of())
    works: dict[str, Work] = {"library": partial(by_library, product)}
    for tile in op.TILES:
        star = "*" if tile == taken else ""
        works[f"{op.ROWS}x{tile}{star}"] = partial(by_tile, tile, product)
    if m == WIDE_ROWS and product.normed:
        works = {f"norm, {who}": partial(behind_norm, work) for who, work in works.items()}
    if m == WIDE_ROWS:
        works["wide"] = partial(by_wide, product)
    traffic, flops = num_bytes(m, product), 2.0 * m * product.n * product.k
    return [
        Case(f"tall_gemm {name} M={m} {who}", partial(launches, work, m, product), traffic, flops)
        for who, work in works.items()
    ]


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    return [
        case
        for name, product in PRODUCTS.items()
        for m in ROWS
        for case in cases_of(name, product, m)
    ]
