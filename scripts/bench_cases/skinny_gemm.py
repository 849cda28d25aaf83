"""Products of few rows, and the same by torch's library, at the layers of two models.

A "layer" is the products of a decoder's layer one after another, without attention: fused as decode steps
launch them or with kernels of their own for norm and gate, and each started early or when the one before
it has ended.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit
from engine.ops.activation import silu_and_mul
from engine.ops.rms_norm import rms_norm
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
EPS = 1e-6


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
        partial(skinny_gemm, numbers(m, k), numbers(n, k), norm_eps=EPS, gated=gated)
        for _ in range(copies)
    ]


def layers(model: str, m: int, fused: bool, early: bool, copies: int) -> list[Launch]:
    return [partial(Layer(model, m), fused, early) for _ in range(copies)]


class Layer:
    """The products of one layer and their weights."""

    def __init__(self, model: str, m: int) -> None:
        names = ("qkv", "o", "gate_up", "down")
        self.qkv, self.o, self.gate_up, self.down = (
            numbers(*LAYERS[f"{model} {name}"]) for name in names
        )
        self.attended, self.hidden = numbers(m, self.o.shape[1]), numbers(m, self.o.shape[0])

    def __call__(self, fused: bool, early: bool) -> Tensor:
        with jit.dependent_launches() if early else nullcontext():
            self.add(self.attended, self.o)
            if fused:
                gated = skinny_gemm(self.hidden, self.gate_up, norm_eps=EPS, gated=True)
                self.add(gated, self.down)
                return skinny_gemm(self.hidden, self.qkv, norm_eps=EPS)
            normed = rms_norm(self.hidden, None, EPS)
            self.add(silu_and_mul(skinny_gemm(normed, self.gate_up), interleaved=True), self.down)
            return skinny_gemm(rms_norm(self.hidden, None, EPS), self.qkv)

    def add(self, x: Tensor, w: Tensor) -> None:
        skinny_gemm(x, w, out=self.hidden, residual=self.hidden)


def layer_cases() -> list[Case]:
    cases = []
    for model in ("0.5B", "7B"):
        shapes = [LAYERS[f"{model} {name}"] for name in ("qkv", "o", "gate_up", "down")]
        for m in (1, 4, 8):
            traffic = sum(num_bytes(m, n, k) for n, k in shapes)
            for fused in (True, False):
                for early in (True, False):
                    name = f"skinny_gemm {model} layer M={m} {'fused' if fused else 'apart'}"
                    setup = partial(layers, model, m, fused, early)
                    cases.append(Case(name + (", early" if early else ""), setup, traffic))
    return cases


def num_bytes(m: int, n: int, k: int) -> float:
    return 2.0 * (n * k + m * k + m * n)


def bench_cases() -> list[Case]:
    cases = layer_cases()
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
