"""Times of a decoder's products by every kernel that can compute them, against the one that is chosen.

    python scripts/bench_products.py                             # ten models, some two minutes
    python scripts/bench_products.py --model qwen2.5-7b --rows 8 16 --json times.json

Each product is launched many times in a row, with what surrounds it in a decoder and as decode graphs launch it: the
next launch starts early and fetches weights meanwhile. Weights rotate, so that L2 does not hold them. Of a layer's
four products the sums are shown: as engine/ops/linear.py chooses, by the fastest kernel of each, by torch's library.
Then whatever is more than 3% slower than the fastest. The estimates that choose are fitted to such times.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine.ops import gated_gemm_sm90 as gated_gemm
from engine.ops import jit, linear
from engine.ops import narrow_gemm as narrow
from engine.ops import skinny_gemm as skinny
from engine.ops import wide_gemm_sm90 as wide
from engine.ops.activation import silu_and_mul
from engine.ops.hopper import device_of
from engine.ops.rms_norm import rms_norm
from engine.ops.wide_gemm_sm90 import Product
from scripts.bench_cases import measure
from scripts.bench_command import parse, run_benchmark, save, with_quiet_children
from scripts.loadtest.options import at_least_one

BF16 = torch.bfloat16
EPS = 1e-6
MODELS = {  # hidden, intermediate, heads, KV heads, head size, vocabulary
    "smollm2-135m": (576, 1536, 9, 3, 64, 49_152),
    "qwen2.5-0.5b": (896, 4864, 14, 2, 64, 151_936),
    "qwen3-0.6b": (1024, 3072, 16, 8, 128, 151_936),
    "llama-3.2-1b": (2048, 8192, 32, 8, 64, 128_256),
    "qwen2.5-1.5b": (1536, 8960, 12, 2, 128, 151_936),
    "qwen2.5-3b": (2048, 11_008, 16, 2, 128, 151_936),
    "qwen3-4b": (2560, 9728, 32, 8, 128, 151_936),
    "qwen2.5-7b": (3584, 18_944, 28, 4, 128, 152_064),
    "llama-3.1-8b": (4096, 14_336, 32, 8, 128, 128_256),
    "qwen2.5-14b": (5120, 13_824, 40, 8, 128, 152_064),
}
ROWS = (1, 4, 8, 9, 16, 17, 32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
WEIGHT_BYTES = 120e6  # of a product's weights that rotate, at least
LAUNCHES = 20  # in a replay, at least
FAR_BEHIND = 1.03

Kernel = Callable[[Tensor], object]  # of a weight


def products_of(model: str) -> dict[str, Product]:
    hidden, inner, heads, kv_heads, head_dim, vocab = MODELS[model]
    return {
        "qkv": Product((heads + 2 * kv_heads) * head_dim, hidden, normed=True),
        "o": Product(hidden, heads * head_dim, residual=True),
        "gate_up": Product(2 * inner, hidden, normed=True, gated=True),
        "down": Product(hidden, inner, residual=True),
        "head": Product(vocab, hidden, float_out=True),
    }


def library(p: Product, x: Tensor, out: Tensor, w: Tensor) -> Tensor:
    if p.float_out:
        return torch.mm(x, w.t(), torch.float32, out=out)
    if p.residual:
        return out.addmm_(x, w.t())
    y = F.linear(rms_norm(x, None, EPS), w)
    return silu_and_mul(y, interleaved=True) if p.gated else y


def ours(kernel: Callable[..., Tensor], p: Product, x: Tensor, out: Tensor, w: Tensor) -> Tensor:
    residual, norm_eps = (out if p.residual else None), (EPS if p.normed else None)
    return kernel(x, w, None, out, norm_eps=norm_eps, gated=p.gated, residual=residual)


def kernels_for(m: int, p: Product) -> dict[str, Kernel]:
    """All that take so many rows, by name."""
    x = torch.randn(m, p.k, device="cuda", dtype=BF16)
    outputs, dtype = (p.n // 2 if p.gated else p.n), (torch.float32 if p.float_out else BF16)
    out = torch.zeros(m, outputs, device="cuda", dtype=dtype)
    found: dict[str, Kernel] = {"library": partial(library, p, x, out)}
    if skinny.supports(m, p.n, p.k, BF16):
        found["skinny_gemm"] = partial(ours, skinny.skinny_gemm, p, x, out)
    if device_of().has_clusters and narrow.supports(m, p.n, p.k, BF16):
        found["narrow_gemm"] = partial(ours, narrow.narrow_gemm, p, x, out)
    if device_of().has_clusters and wide.supports(m, p.n, p.k, BF16):
        found["wide_gemm_sm90"] = partial(ours, wide.wide_gemm_sm90, p, x, out)
    if device_of().has_clusters and p.gated and m >= gated_gemm.FEWEST_ROWS:
        found["norm_and_gated_gemm"] = partial(ours, linear.norm_and_gated_gemm, p, x, out)
    return found


def chosen_for(m: int, p: Product) -> str:
    surrounding = (p.normed, p.gated, p.residual)
    m = min(m, linear.MOST_FEW_ROWS + 1)
    kernel = linear.fastest(m, p.n, p.k, BF16, device_of(), *surrounding)
    return "library" if kernel is None else kernel.__name__


def microseconds(kernel: Kernel, weights: list[Tensor]) -> float:
    def launch(w: Tensor) -> object:
        with jit.dependent_launches():
            return kernel(w)

    launches = [partial(launch, w) for w in weights]
    return 1e6 * measure.time_launches(launches, -(-LAUNCHES // len(weights)))


def compile_all(models: list[str], rows: list[int]) -> None:
    """In several processes, ahead of the first measurement."""
    specs: list[jit.VariantSpec] = []
    for p in [product for model in models for product in products_of(model).values()]:
        for columns in {skinny.column_tiles_for(m) for m in rows if m <= skinny.MAX_ROWS}:
            product = skinny.Product(columns, p.n, p.k, p.gated, p.normed, p.float_out)
            specs += [
                skinny.variant(product, t, BF16) for t in skinny.possible_tiles(None, product)
            ]
        if device_of().has_clusters:
            buckets = {wide.rows_for(m) for m in rows if m <= wide.ROWS[-1]}
            specs += [wide.variant_of(p, bucket, BF16, device_of()) for bucket in buckets]
            for columns in {narrow.column_tiles_for(m) for m in rows if m <= narrow.MAX_ROWS}:
                plan = narrow.make_plan(columns, p.n, p.k, device_of(), p.gated)
                if plan is not None:
                    specs.append(narrow.variant(plan, BF16, p.normed, p.float_out))
    with_quiet_children(lambda: jit.prebuild(specs))


@dataclass(frozen=True)
class Timing:
    """Of one product by all kernels."""

    model: str
    product: str
    n: int
    k: int
    rows: int
    chosen: str
    us: dict[str, float]

    @property
    def regret(self) -> float:
        return self.us[self.chosen] / min(self.us.values())


def time_model(model: str, rows: list[int]) -> list[Timing]:
    timings = []
    for name, p in products_of(model).items():
        copies = max(2, min(60, 1 + int(WEIGHT_BYTES / (2 * p.n * p.k))))
        weights = [torch.randn(p.n, p.k, device="cuda", dtype=BF16) for _ in range(copies)]
        for w in weights:
            w *= p.k**-0.5  # sums of about 1, however often they are added up
        for m in rows:
            us = {kind: microseconds(kernel, weights) for kind, kernel in kernels_for(m, p).items()}
            timings.append(Timing(model, name, p.n, p.k, m, chosen_for(m, p), us))
    return timings


def print_model(model: str, timings: list[Timing]) -> None:
    print(f"\n{model:14} {'us of a layer, and of the head':>34}")
    print(f"{'rows':>6} {'chosen':>9} {'fastest':>9} {'library':>9} | {'chosen':>9} {'library':>9}")
    for m in dict.fromkeys(timing.rows for timing in timings):
        layer = [t for t in timings if t.rows == m and t.product != "head"]
        (head,) = (t for t in timings if t.rows == m and t.product == "head")
        sums = (
            sum(t.us[t.chosen] for t in layer),
            sum(min(t.us.values()) for t in layer),
            sum(t.us["library"] for t in layer),
        )
        print(
            f"{m:6} {sums[0]:9.1f} {sums[1]:9.1f} {sums[2]:9.1f} | "
            f"{head.us[head.chosen]:9.1f} {head.us['library']:9.1f}",
            flush=True,
        )
    for t in timings:
        if t.regret > FAR_BEHIND:
            times = ", ".join(f"{kind} {us:.2f}" for kind, us in t.us.items())
            print(f"  {t.product} {t.n} x {t.k}, {t.rows} rows: {t.chosen} of {times}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = f"some of {', '.join(MODELS)}; default: all"
    parser.add_argument(
        "--model", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL", help=names
    )
    rows = f"up to 256; default: {' '.join(map(str, ROWS))}"
    parser.add_argument("--rows", nargs="+", type=at_least_one, default=list(ROWS), help=rows)
    parser.add_argument("--json", type=Path, help="write all times here as well")
    options = parse(parser)
    if not torch.cuda.is_available():
        print("bench_products.py measures CUDA kernels and finds no CUDA device", file=sys.stderr)
        return 1
    bandwidth, rate = measure.copy_bandwidth(), measure.matmul_rate()
    card = torch.cuda.get_device_name(0)
    print(f"{card}: copy {bandwidth / 1e9:.0f} GB/s, matmul {rate / 1e12:.0f} TFLOP/s (bfloat16)")
    compile_all(options.model, options.rows)
    timings: list[Timing] = []
    for model in options.model:
        timings += (of_model := time_model(model, options.rows))
        print_model(model, of_model)
    regrets = [timing.regret for timing in timings]
    print(
        f"\nchosen over fastest: {sum(regrets) / len(regrets):.4f} in the mean, {max(regrets):.2f} at most"
    )
    record = {"card": card, "timings": [vars(timing) for timing in timings]}
    return 0 if save(options.json, record) else 1


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
