"""The product of 9 to 64 rows against float32: every plan, all that surrounds it, graphs, the same bits each time.

Results are as exact as bfloat16 or float16 can say them: errors stay below twice what rounding costs.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops import narrow_gemm as op
from engine.ops.linear import fused_linear, linear
from engine.ops.narrow_gemm import Plan
from tests.gpu.test_skinny_gemm import BF16, FP16, NAN, assert_close, limit, numbers

COLUMN_TILES = (2, 4, 8)
ROWS = (1, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)
EPS = 1e-5

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536),
    (4608, 3584), (3584, 3584), (3584, 18944),
    (2, 8), (6, 72), (100, 200), (134, 1000), (4098, 520), (20000, 104),
]  # fmt: skip
PLANNED_SHAPES = [(3584, 3584), (896, 896), (1002, 1096)]
FUSED_SHAPES = [
    (1152, 896),
    (9728, 896),
    (896, 4864),
    (3584, 3584),
    (16, 8),
    (112, 1000),
    (4112, 520),
]
GATED_SHAPES = [(9728, 896), (3072, 576), (3584, 3584), (1008, 1096)]

# As a decoder launches products, and all together
OPTIONS = ["bias normed", "residual", "normed gated", "bias normed gated residual"]


def some_plans(column_tiles: int, n: int, k: int, gated: bool = False) -> list[Plan]:
    """The three best of each size of cluster, by their estimates."""
    device = op.device_of()
    plans = op.candidates(column_tiles, n, k, device, gated)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    return [p for c in op.CLUSTERS for p in [q for q in plans if q.cluster == c][:3]]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    wanted = []
    for c in COLUMN_TILES:
        wanted += [(op.prepare(c, n, k, False, 0), BF16, False) for n, k in SHAPES]
        for n, k in FUSED_SHAPES:
            for options in OPTIONS:
                plan = op.prepare(c, n, k, "gated" in options, 0)
                wanted += [(plan, dtype, "normed" in options) for dtype in (BF16, FP16)]
        wanted += [(p, BF16, False) for n, k in PLANNED_SHAPES for p in some_plans(c, n, k)]
        wanted += [(p, BF16, True) for n, k in PLANNED_SHAPES for p in some_plans(c, n, k)]
        wanted += [(p, BF16, True) for n, k in GATED_SHAPES for p in some_plans(c, n, k, True)]
    jit.prebuild([op.variant(*one) for one in dict.fromkeys(wanted)])


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


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.narrow_gemm(x, w, out=out) is out
    assert_close(out, reference(x, w), limit(BF16))


@pytest.mark.parametrize("m", [1, 9, 16, 19, 64])
@pytest.mark.parametrize(("n", "k"), FUSED_SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_with_what_surrounds_it(m: int, n: int, k: int, options: str, dtype: torch.dtype) -> None:
    gated = "gated" in options
    norm_eps = EPS if "normed" in options else None
    sizes = torch.logspace(-2, 1, m, device="cuda")[:, None] if norm_eps else 1.0  # a norm for each
    x, w = (numbers(m, k) * sizes).to(dtype), numbers(n, k, dtype=dtype, scale=k**-0.5)
    bias = numbers(n, dtype=dtype) if "bias" in options else None
    outputs = n // 2 if gated else n
    residual = numbers(m, outputs, dtype=dtype) if "residual" in options else None
    want = reference(x, w, bias, norm_eps=norm_eps, gated=gated, residual=residual)
    fresh = op.narrow_gemm(x, w, bias, norm_eps=norm_eps, gated=gated, residual=residual)
    assert_close(fresh, want, limit(dtype))
    out = torch.full_like(fresh, NAN) if residual is None else residual  # in place
    op.narrow_gemm(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual)
    assert torch.equal(out, fresh), f"{int((out != fresh).sum())} numbers differ"


@pytest.mark.parametrize("m", [11, 16, 32, 50, 64])
@pytest.mark.parametrize(("n", "k"), PLANNED_SHAPES)
@pytest.mark.parametrize("norm_eps", [None, EPS])
def test_every_way_to_cut_a_product_up(m: int, n: int, k: int, norm_eps: float | None) -> None:
    x, w, bias = numbers(m, k, scale=0.3), numbers(n, k, scale=k**-0.5), numbers(n)
    check_plans(x, w, bias, some_plans(op.column_tiles_for(m), n, k), norm_eps)


@pytest.mark.parametrize("m", [11, 16, 32, 50, 64])
@pytest.mark.parametrize(("n", "k"), GATED_SHAPES)
def test_every_way_to_cut_a_gated_product_up(m: int, n: int, k: int) -> None:
    x, w, bias = numbers(m, k, scale=0.3), numbers(n, k, scale=k**-0.5), numbers(n)
    check_plans(x, w, bias, some_plans(op.column_tiles_for(m), n, k, True), EPS)


@pytest.mark.parametrize("m", [16, 32, 64])
@pytest.mark.parametrize("gated", [False, True])
def test_few_blocks_with_many_tiles_each(m: int, gated: bool) -> None:
    """Stages, the exchange and, between a cluster's blocks, its two buffers are used again and again."""
    n, k = 1008, 1096
    x, w, bias = numbers(m, k, scale=0.3), numbers(n, k, scale=k**-0.5), numbers(n)
    plans = some_plans(op.column_tiles_for(m), n, k, gated)
    few = [
        replace(plan, grid=min(plan.grid, blocks * plan.cluster))
        for plan in plans
        for blocks in (1, 2)
    ]
    for _ in range(5):
        check_plans(x, w, bias, few, EPS)


def check_plans(
    x: Tensor, w: Tensor, bias: Tensor, plans: list[Plan], norm_eps: float | None
) -> None:
    assert plans
    want = reference(x, w, bias, norm_eps=norm_eps, gated=plans[0].gated)
    for plan in plans:
        out = torch.full(want.shape, NAN, dtype=BF16, device="cuda")
        op.launch(x, w, bias, out, plan, norm_eps)
        try:
            assert_close(out, want, limit(BF16))
        except AssertionError as error:
            raise AssertionError(f"{plan}: {error}") from None


@pytest.mark.parametrize("m", [10, 24, 64])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_strided_rows_and_bias(m: int, dtype: torch.dtype) -> None:
    n, k = 258, 904
    wide_x = torch.full((m + 2, k + 48), NAN, dtype=dtype, device="cuda")
    wide_out = torch.full((m + 2, n + 10), NAN, dtype=dtype, device="cuda")
    x, out = wide_x[1 : m + 1, 16 : 16 + k], wide_out[1 : m + 1, 4 : 4 + n]
    x.copy_(numbers(m, k, dtype=dtype))
    w, bias = numbers(n, k, dtype=dtype, scale=k**-0.5), numbers(n, dtype=dtype)
    op.narrow_gemm(x, w, bias, out)
    assert_close(out, x.float() @ w.float().T + bias.float(), limit(dtype))
    out.fill_(NAN)
    assert wide_out.isnan().all(), "wrote beside the result"


@pytest.mark.parametrize("m", [16, 32, 64])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (896, 4864), (112, 1000)])
@pytest.mark.parametrize("fused", [False, True])
def test_the_same_bits_every_time(m: int, n: int, k: int, fused: bool) -> None:
    x, w, norm_eps = numbers(m, k), numbers(n, k, scale=k**-0.5), EPS if fused else None
    want = op.narrow_gemm(x, w, norm_eps=norm_eps, gated=fused)
    for i in range(20):
        got = op.narrow_gemm(x, w, norm_eps=norm_eps, gated=fused)
        assert torch.equal(got, want), f"run {i}: {int((got != want).sum())} numbers differ"


@pytest.mark.parametrize(("n", "k"), [(3584, 3584), (896, 4864)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_row_is_the_same_in_every_batch_of_one_plan(n: int, k: int, fused: bool) -> None:
    x, w, norm_eps = numbers(32, k), numbers(n, k, scale=k**-0.5), EPS if fused else None
    want = op.narrow_gemm(x, w, norm_eps=norm_eps, gated=fused)
    for m in range(17, 32):
        start = 7 * m % (33 - m)
        got = op.narrow_gemm(x[start : start + m], w, norm_eps=norm_eps, gated=fused)
        same = (got == want[start : start + m]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


@pytest.mark.parametrize("m", [20, 64])
@pytest.mark.parametrize("fused", [False, True])
def test_other_rows_and_their_nan_do_not_matter(m: int, fused: bool) -> None:
    x, w, norm_eps = numbers(m, 896), numbers(896, 896, scale=1 / 30), EPS if fused else None
    want = op.narrow_gemm(x, w, norm_eps=norm_eps, gated=fused)
    bad = torch.arange(m, device="cuda") % 3 == 1
    x[bad] = NAN
    got = op.narrow_gemm(x, w, norm_eps=norm_eps, gated=fused)
    assert torch.equal(got[~bad], want[~bad])
    assert got[bad].isnan().all()


@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("width", [896, 3584])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_graph_sees_new_data_at_replay(
    m: int,
    width: int,
    dependent: bool,
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    x, w = numbers(m, width), numbers(width, width, scale=width**-0.5)
    buffers = [torch.empty_like(x) for _ in range(6)]

    def layers() -> None:  # each reads what the one before has just written
        for before, after in zip([x, *buffers], buffers, strict=False):
            op.narrow_gemm(before, w, out=after)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(layers)
    for _ in range(3):
        x.copy_(numbers(m, width))
        w.copy_(numbers(width, width, scale=width**-0.5))
        replay()
        for before, after in zip([x, *buffers], buffers, strict=False):
            assert_close(after, before.float() @ w.float().T, limit(BF16))


@pytest.mark.parametrize("m", [9, 16, 32])
@pytest.mark.parametrize(("hidden", "inner"), [(896, 4864), (576, 1536), (3584, 18944)])
@pytest.mark.parametrize("dependent", [False, True])
def test_layers_in_a_graph_add_to_the_residual_in_place(
    m: int,
    hidden: int,
    inner: int,
    dependent: bool,
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    """Each launch reads what the one before has written, and overwrites what it has read."""
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
            op.narrow_gemm(stream, qkv, out=between[i], norm_eps=EPS)
            op.narrow_gemm(between[i], o, out=stream, residual=stream)
            if keep:
                states[2 * i].copy_(stream)
            op.narrow_gemm(stream, gate_up, out=gates[i], norm_eps=EPS, gated=True)
            op.narrow_gemm(gates[i], down, out=stream, residual=stream)
            if keep:
                states[2 * i + 1].copy_(stream)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(lambda: layers(keep=False))
    for _ in range(3):
        start = before = numbers(m, hidden)
        stream.copy_(start)
        layers(keep=True)  # by separate launches, to be checked one by one
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


def test_linear_takes_the_kernel_where_it_pays() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (9, 16, 32, 33, 64):
        x = numbers(m, 896)
        assert torch.equal(linear(x, w, bias), F.linear(x, w, bias)), "with nothing around it"
        got, residual = numbers(m, 896), numbers(m, 896)
        got.copy_(residual)
        fused_linear(x, w, bias, residual=got)
        want = x.float() @ w.float().T + bias.float() + residual.float()
        assert_close(got, want, 4 * limit(BF16))
        if op.is_chosen(m, 896, 896, BF16, x.device.index):
            assert torch.equal(got, op.narrow_gemm(x, w, bias, residual=residual))
    odd = numbers(16, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(linear(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))


@pytest.mark.parametrize("cluster", [c for c in op.CLUSTERS if c > 1])
def test_as_many_clusters_run_at_a_time_as_plans_assume(cluster: int) -> None:
    if not op.device_of().has_clusters:
        pytest.skip("clusters are used on Hopper")
    from cuda.bindings import driver

    plans = [p for p in op.candidates(8, 3584, 3584, op.device_of()) if p.cluster == cluster]
    plan = max(plans, key=lambda p: p.smem_bytes)  # such that a block fills an SM
    function = op.load(plan, BF16, False).load(torch.cuda.current_device()).ptr
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = op.THREADS, 1, 1
    config.sharedMemBytes = plan.smem_bytes
    config.attrs, config.numAttrs = [attribute], 1
    status, count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function), config)
    assert int(status) == 0, status
    assert count >= op.device_of().clusters_of(cluster), f"only {count} clusters of {cluster} fit"
