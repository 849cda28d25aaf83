"""Gated products of many rows, as a decoder's prompts have them, at the layers of two models: by our kernel with each
tile (a star: the one that engine/ops/gated_gemm_sm90.py takes), and by torch's library with a kernel for the gate.
None of them norms x, which has a kernel in front in any case, but at 256 rows: there all do, and
engine/ops/wide_gemm_sm90.py, which norms on the way, is beside them.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import gated_gemm_sm90 as op
from engine.ops import jit
from engine.ops import wide_gemm_sm90 as wide
from engine.ops.activation import silu_and_mul
from engine.ops.hopper import device_of
from engine.ops.rms_norm import rms_norm
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.skinny_gemm import EPS, LAYERS, numbers

WIDE_ROWS = wide.ROWS[-1]
ROWS = (WIDE_ROWS, 320, 512, 1024, 2048, 8192)
PRODUCTS = {name: shape for name, shape in LAYERS.items() if name.endswith("gate_up")}
Work = Callable[[Tensor, Tensor, Tensor], None]  # x, W, out


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    specs = [op.variant(tile, torch.bfloat16) for tile in op.TILES]
    for n, k in PRODUCTS.values():
        plan = wide.prepare(WIDE_ROWS, n, k, True, True, None)
        specs.append(wide.variant(plan, torch.bfloat16, True, False))
    jit.prebuild(specs)


def by_tile(tile: int, x: Tensor, w: Tensor, out: Tensor) -> None:
    op.launch(x, w, out, tile)


def by_library(x: Tensor, w: Tensor, out: Tensor) -> None:  # whose result need not be kept
    silu_and_mul(F.linear(x, w), interleaved=True)


def by_wide(x: Tensor, w: Tensor, out: Tensor) -> None:
    wide.wide_gemm_sm90(x, w, None, out, norm_eps=EPS, gated=True)


def behind_norm(work: Work, x: Tensor, w: Tensor, out: Tensor) -> None:
    work(rms_norm(x, None, EPS), w, out)


def launches(work: Work, m: int, n: int, k: int, copies: int) -> list[Launch]:
    compile_all()
    return [partial(work, numbers(m, k), numbers(n, k), numbers(m, n // 2)) for _ in range(copies)]


def works_of(m: int, n: int) -> dict[str, Work]:
    works: dict[str, Work] = {"library, gate": by_library}
    taken = op.tile_for(m, n, device_of())
    for tile in op.TILES:
        works[f"{op.ROWS}x{tile}{'*' if tile == taken else ''}"] = partial(by_tile, tile)
    if m == WIDE_ROWS:
        works = {f"norm, {who}": partial(behind_norm, work) for who, work in works.items()}
        works["wide"] = by_wide
    return works


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    cases = []
    for name, (n, k) in PRODUCTS.items():
        for m in ROWS:
            traffic, flops = 2.0 * (n * k + m * k + m * n / 2), 2.0 * m * n * k
            for who, work in works_of(m, n).items():
                title, setup = f"gated_gemm {name} M={m} {who}", partial(launches, work, m, n, k)
                cases.append(Case(title, setup, traffic, flops))
    return cases
