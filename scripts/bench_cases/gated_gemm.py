"""Gated products of many rows, as a decoder's prompts have them, at the layers of two models: by our kernel in
each tiling (with a star: the one that engine/ops/gated_gemm_sm90.py takes), and by torch's library with a kernel
behind it, and its bare product.
"""

from functools import cache, partial

import torch
import torch.nn.functional as F

from engine.ops import gated_gemm_sm90 as op
from engine.ops import jit
from engine.ops.activation import silu_and_mul
from engine.ops.gated_gemm_sm90 import Tiling
from engine.ops.narrow_gemm import device_of
from scripts.bench_cases import Case, Launch
from scripts.bench_cases.skinny_gemm import LAYERS, numbers

ROWS = (512, 1024, 2048, 4096, 8192)
PRODUCTS = {name: shape for name, shape in LAYERS.items() if name.endswith("gate_up")}


@cache
def compile_all() -> None:
    """In several processes, before the first case."""
    jit.prebuild([op.variant(tiling, torch.bfloat16) for tiling in op.TILINGS])


def by_tiling(tiling: Tiling, m: int, n: int, k: int, copies: int) -> list[Launch]:
    compile_all()
    return [
        partial(op.launch, numbers(m, k), numbers(n, k), numbers(m, n // 2), tiling)
        for _ in range(copies)
    ]


def by_library(with_gate: bool, m: int, n: int, k: int, copies: int) -> list[Launch]:
    def launch(x: torch.Tensor, w: torch.Tensor) -> None:  # whose results need not be kept
        y = F.linear(x, w)
        if with_gate:
            silu_and_mul(y, interleaved=True)

    return [partial(launch, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def num_bytes(m: int, n: int, k: int) -> float:
    return 2.0 * (n * k + m * k + m * n / 2)


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    cases = []
    for name, (n, k) in PRODUCTS.items():
        for m in ROWS:
            traffic, flops, title = num_bytes(m, n, k), 2.0 * m * n * k, f"gated_gemm {name} M={m}"
            taken = op.tiling_for(m, n, k, device_of())
            for what, with_gate in (("library, gate", True), ("library's bare product", False)):
                setup = partial(by_library, with_gate, m, n, k)
                cases.append(Case(f"{title} {what}", setup, traffic, flops))
            for tiling in op.TILINGS:
                label = f"{title}{'*' if tiling == taken else ''} {tiling}"
                cases.append(Case(label, partial(by_tiling, tiling, m, n, k), traffic, flops))
    return cases
