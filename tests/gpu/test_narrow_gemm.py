"""The product of up to 64 rows against float32: every plan, all that surrounds it, graphs, the same bits each time.

Results are as exact as bfloat16 or float16 can say them: errors stay below twice what rounding costs.
"""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops import narrow_gemm as op
from engine.ops.hopper import device_of
from engine.ops.linear import fused_linear, linear
from engine.ops.narrow_gemm import Plan
from tests.gpu.conftest import Record
from tests.gpu.product_cases import (
    BF16,
    EPS,
    FP16,
    LAYERS,
    NAN,
    OPTIONS,
    assert_close,
    check_layers_in_a_graph,
    check_other_rows,
    check_rows_of_batches,
    check_strided,
    check_surrounded,
    clusters_at_a_time,
    limit,
    numbers,
    reference,
)

COLUMN_TILES = (2, 4, 8)
ROWS = (1, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)

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


def some_plans(column_tiles: int, n: int, k: int, gated: bool = False) -> list[Plan]:
    """The three best of each size of cluster, by their estimates."""
    device = device_of()
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
    check_surrounded(op.narrow_gemm, m, n, k, dtype, options)


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
    check_strided(op.narrow_gemm, m, 258, 904, dtype, offset=4)


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
    norm_eps = EPS if fused else None
    check_rows_of_batches(op.narrow_gemm, 17, 32, n, k, norm_eps=norm_eps, gated=fused)


@pytest.mark.parametrize("m", [20, 64])
@pytest.mark.parametrize("fused", [False, True])
def test_other_rows_and_their_nan_do_not_matter(m: int, fused: bool) -> None:
    check_other_rows(op.narrow_gemm, m, norm_eps=EPS if fused else None, gated=fused)


@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("width", [896, 3584])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_graph_sees_new_data_at_replay(
    m: int,
    width: int,
    dependent: bool,
    graph_replay: Record,
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
@pytest.mark.parametrize(("hidden", "inner"), LAYERS)
@pytest.mark.parametrize("dependent", [False, True])
def test_layers_in_a_graph_add_to_the_residual_in_place(
    m: int,
    hidden: int,
    inner: int,
    dependent: bool,
    graph_replay: Record,
) -> None:
    check_layers_in_a_graph(op.narrow_gemm, m, hidden, inner, dependent, graph_replay)


def test_linear_takes_the_kernel_where_it_pays() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (9, 16, 32, 33, 64):
        x, residual = numbers(m, 896), numbers(m, 896)
        product = x.float() @ w.float().T + bias.float()
        alone, added = linear(x, w, bias), residual.clone()
        fused_linear(x, w, bias, residual=added)
        assert_close(alone, product, 2 * limit(BF16))
        assert_close(added, product + residual.float(), 4 * limit(BF16))
        device = device_of(x.device.index)
        is_chosen = op.is_chosen(m, 896, 896, BF16, device)
        assert is_chosen == (device.has_clusters and m <= op.CHOSEN_ROWS)
        if is_chosen:
            assert torch.equal(alone, op.narrow_gemm(x, w, bias))
            assert torch.equal(added, op.narrow_gemm(x, w, bias, residual=residual))
    odd = numbers(16, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(linear(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))


@pytest.mark.parametrize("cluster", [c for c in op.CLUSTERS if c > 1])
def test_as_many_clusters_run_at_a_time_as_plans_assume(cluster: int) -> None:
    if not device_of().has_clusters:
        pytest.skip("clusters are used on Hopper")
    plans = [p for p in op.candidates(8, 3584, 3584, device_of()) if p.cluster == cluster]
    plan = max(plans, key=lambda p: p.smem_bytes)  # such that a block fills an SM
    kernel = op.load(plan, BF16, False)
    count = clusters_at_a_time(kernel, cluster, plan.grid, op.THREADS, plan.smem_bytes)
    assert count >= device_of().clusters_of(cluster), f"only {count} clusters of {cluster} fit"
