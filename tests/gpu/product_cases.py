"""What products of few rows have to do, whichever kernel computes them: checks against float32.

A `Product` has the signature of fused_product.reference.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from engine.ops import fused_product, jit
from tests.gpu.conftest import Record

Product = Callable[..., Tensor]

BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")
EPS = 1e-5
LAYERS = [(896, 4864), (576, 1536), (3584, 18944)]  # hidden and intermediate size
# As a decoder launches products, and all together
OPTIONS = ["bias normed", "residual", "normed gated", "bias normed gated residual"]


def numbers(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_close(got: Tensor, want: Tensor, limit: float) -> None:
    """`limit` bounds the error relative to the result's root mean square, at every element."""
    assert got.isfinite().all(), f"not finite at {(~got.isfinite()).nonzero()[:5].tolist()}"
    typical = want.float().pow(2).mean().sqrt()
    error = (got.float() - want.float()).abs() / want.float().abs().clamp_min(typical)
    worst = int(error.argmax())
    where = divmod(worst, got.shape[1])
    assert error.max() < limit, (
        f"relative error {error.max():.3g} at (row, column) {where} of {tuple(got.shape)}: "
        f"{got[where]} instead of {want[where]}; mean error {error.mean():.3g}"
    )


def limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps  # twice what rounding the result costs


def reference(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """In float32."""
    return fused_product.reference(
        x.float(), w, bias, norm_eps=norm_eps, gated=gated, residual=residual
    )


def check_surrounded(
    product: Product, m: int, n: int, k: int, dtype: torch.dtype, options: str
) -> None:
    """With `options`, into fresh memory and in place. Rows of x have norms of all sizes."""
    gated = "gated" in options
    norm_eps = EPS if "normed" in options else None
    sizes = torch.logspace(-2, 1, m, device="cuda")[:, None] if norm_eps else 1.0
    x, w = (numbers(m, k) * sizes).to(dtype), numbers(n, k, dtype=dtype, scale=k**-0.5)
    bias = numbers(n, dtype=dtype) if "bias" in options else None
    outputs = n // 2 if gated else n
    residual = numbers(m, outputs, dtype=dtype) if "residual" in options else None
    want = reference(x, w, bias, norm_eps=norm_eps, gated=gated, residual=residual)
    fresh = product(x, w, bias, norm_eps=norm_eps, gated=gated, residual=residual)
    assert_close(fresh, want, limit(dtype))
    out = torch.full_like(fresh, NAN) if residual is None else residual
    product(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual)
    assert torch.equal(out, fresh), f"{int((out != fresh).sum())} numbers differ"


def check_strided(
    product: Product, m: int, n: int, k: int, dtype: torch.dtype, offset: int
) -> None:
    """Rows of x and out within larger matrices, of which nothing else is read or written."""
    wide_x = torch.full((m + 2, k + 48), NAN, dtype=dtype, device="cuda")
    wide_out = torch.full((m + 2, n + 3 * offset), NAN, dtype=dtype, device="cuda")
    x, out = wide_x[1 : m + 1, 16 : 16 + k], wide_out[1 : m + 1, offset : offset + n]
    x.copy_(numbers(m, k, dtype=dtype))
    w, bias = numbers(n, k, dtype=dtype, scale=k**-0.5), numbers(n, dtype=dtype)
    product(x, w, bias, out)
    assert_close(out, reference(x, w, bias), limit(dtype))
    out.fill_(NAN)
    assert wide_out.isnan().all(), "wrote beside the result"


def check_rows_of_batches(
    product: Product, smallest: int, largest: int, n: int, k: int, **options: object
) -> None:
    """A row has the same bits in every batch of `smallest` to `largest` rows."""
    x, w = numbers(largest, k), numbers(n, k, scale=k**-0.5)
    want = product(x, w, **options)
    for m in range(smallest, largest):
        start = 7 * m % (largest + 1 - m)
        got = product(x[start : start + m], w, **options)
        same = (got == want[start : start + m]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


def check_other_rows(product: Product, m: int, **options: object) -> None:
    """NaN in some rows changes nothing in others."""
    x, w = numbers(m, 896), numbers(896, 896, scale=1 / 30)
    want = product(x, w, **options)
    bad = torch.arange(m, device="cuda") % 3 == 1
    x[bad] = NAN
    got = product(x, w, **options)
    assert torch.equal(got[~bad], want[~bad])
    assert got[bad].isnan().all()


def check_layers_in_a_graph(
    product: Product, m: int, hidden: int, inner: int, dependent: bool, graph_replay: Record
) -> None:
    """Two layers of a decoder without attention, their sums in place: each launch reads what the one before
    has written, and overwrites what it has read. With new data at each replay, the same bits as launches
    apart from each other, which are checked one by one."""
    stream, width = numbers(m, hidden), hidden + 256
    weights = [
        (numbers(width, hidden, scale=hidden**-0.5), numbers(hidden, width, scale=width**-0.5),
         numbers(2 * inner, hidden, scale=hidden**-0.5), numbers(hidden, inner, scale=inner**-0.5))
        for _ in range(2)
    ]  # fmt: skip
    between = [torch.empty(m, width, dtype=BF16, device="cuda") for _ in range(2)]
    gates = [torch.empty(m, inner, dtype=BF16, device="cuda") for _ in range(2)]
    states = [torch.empty_like(stream) for _ in range(4)]

    def layers(keep: bool) -> None:
        for i, (qkv, o, gate_up, down) in enumerate(weights):
            product(stream, qkv, out=between[i], norm_eps=EPS)
            product(between[i], o, out=stream, residual=stream)
            if keep:
                states[2 * i].copy_(stream)
            product(stream, gate_up, out=gates[i], norm_eps=EPS, gated=True)
            product(gates[i], down, out=stream, residual=stream)
            if keep:
                states[2 * i + 1].copy_(stream)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(lambda: layers(keep=False))
    for _ in range(3):
        start = before = numbers(m, hidden)
        stream.copy_(start)
        layers(keep=True)
        for i, (qkv, o, gate_up, down) in enumerate(weights):
            attended, gated = states[2 * i], states[2 * i + 1]
            assert_close(between[i], reference(before, qkv, norm_eps=EPS), limit(BF16))
            assert_close(attended, reference(between[i], o, residual=before), limit(BF16))
            want = reference(attended, gate_up, norm_eps=EPS, gated=True)
            assert_close(gates[i], want, limit(BF16))
            assert_close(gated, reference(gates[i], down, residual=attended), limit(BF16))
            before = gated
        for tensor in (*between, *gates):
            tensor.fill_(NAN)
        stream.copy_(start)
        replay()
        assert torch.equal(stream, before), f"{int((stream != before).sum())} numbers differ"


def clusters_at_a_time(
    kernel: jit.Kernel, cluster: int, grid: int, threads: int, smem_bytes: int
) -> int:
    """How many clusters of `cluster` blocks the current device runs, as its driver says."""
    from cuda.bindings import driver

    function = kernel.load(torch.cuda.current_device()).ptr
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.attrs, config.numAttrs = [attribute], 1
    status, count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function), config)
    assert int(status) == 0, status
    return int(count)
