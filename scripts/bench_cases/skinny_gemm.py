"""Products of few rows, and the same by torch's library, at the layers of two models."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.skinny_gemm import skinny_gemm
from scripts.bench_cases import Case, Launch

LAYERS = {  # name: (outputs, inputs)
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "7B head": (152064, 3584),
    "0.5B qkv": (1152, 896),
    "0.5B o": (896, 896),
    "0.5B gate_up": (9728, 896),
    "0.5B down": (896, 4864),
    "0.5B head": (151936, 896),
}
ROWS = (1, 4, 8, 16, 32)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def plain(
    linear: Callable[[Tensor, Tensor], Tensor], m: int, n: int, k: int, copies: int
) -> list[Launch]:
    return [partial(linear, numbers(m, k), numbers(n, k)) for _ in range(copies)]


def with_residual(m: int, n: int, k: int, copies: int) -> list[Launch]:
    launches: list[Launch] = []
    for _ in range(copies):
        hidden = numbers(m, n)
        launches.append(
            partial(skinny_gemm, numbers(m, k), numbers(n, k), residual=hidden, out=hidden)
        )
    return launches


def normed(m: int, n: int, k: int, gated: bool, copies: int) -> list[Launch]:
    return [
        partial(skinny_gemm, numbers(m, k), numbers(n, k), norm_eps=1e-6, gated=gated)
        for _ in range(copies)
    ]


def num_bytes(m: int, n: int, k: int) -> float:
    return 2.0 * (n * k + m * k + m * n)


def bench_cases() -> list[Case]:
    cases = []
    for name, (n, k) in LAYERS.items():
        for m in ROWS:
            traffic = num_bytes(m, n, k)
            kernel, library = (
                partial(plain, skinny_gemm, m, n, k),
                partial(plain, F.linear, m, n, k),
            )
            cases.append(Case(f"skinny_gemm {name} M={m}", kernel, traffic))
            cases.append(Case(f"skinny_gemm {name} M={m} library", library, traffic))
            if m > 8:
                continue
            if name.endswith((" o", "down")):
                fused = partial(with_residual, m, n, k)
                cases.append(Case(f"skinny_gemm {name} M={m} + residual", fused, traffic))
            if name.endswith(("qkv", "gate_up")):
                is_gated = name.endswith("gate_up")
                what = "normed, gated" if is_gated else "normed"
                fused = partial(normed, m, n, k, is_gated)
                cases.append(Case(f"skinny_gemm {name} M={m} {what}", fused, traffic))
    return cases
