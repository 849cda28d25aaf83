"""The product of up to 256 rows on Hopper against float32: every way to cut it up, all that surrounds it, ragged
sizes, graphs, and the same bits each time. Waits that never end are turned into errors.

Results are as exact as bfloat16 or float16 can say them: errors stay below twice what rounding costs.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops import wide_gemm_sm90 as op
from engine.ops.hopper import device_of
from engine.ops.linear import fused_linear, kernel_for
from engine.ops.rms_norm import rms_norm
from engine.ops.wide_gemm_sm90 import Plan
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

ROWS = (1, 17, 31, 32, 33, 63, 64, 65, 97, 128, 129, 191, 192, 193, 255, 256)

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing; the last
# takes several tiles of each block
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536),
    (4608, 3584), (3584, 3584), (3584, 18944),
    (8, 8), (8, 4000), (136, 1000), (4104, 520), (43008, 104),
]  # fmt: skip
FUSED_SHAPES = [
    (1152, 896, BF16), (9728, 896, BF16), (896, 4864, BF16), (3584, 3584, FP16),
    (16, 8, BF16), (112, 1000, FP16), (4112, 520, BF16), (43008, 104, BF16),
]  # fmt: skip
PLANNED_SHAPES = [(3584, 3584), (1040, 1096)]
FLOAT_SHAPES = [(1152, 896), (896, 4864), (16_008, 576)]
variant_of_product = op.variant


def trapping(plan: Plan, dtype: torch.dtype, *surrounding: bool) -> jit.VariantSpec:
    spec = variant_of_product(plan, dtype, *surrounding)
    return replace(spec, defines={**spec.defines, "SLUICE_TRAP": 1})


def different_plans(rows: int, n: int, k: int, gated: bool = False) -> list[Plan]:
    """All candidates, and with as few stages as can be: then stages are used again and again."""
    plans = op.candidates(rows, n, k, device_of(), gated)
    fewest = [replace(plan, stages=plan.least_stages) for plan in plans]
    return list(dict.fromkeys([*plans, *fewest]))


@pytest.fixture(scope="module")
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    wanted: list[tuple[Plan, torch.dtype, *tuple[bool, ...]]] = []
    for rows in op.ROWS:
        for options in (False, True):  # norm; residual
            wanted += [
                (op.prepare(rows, n, k, False, options, 0), BF16, options, False) for n, k in SHAPES
            ]
        for hidden, inner in LAYERS:
            width = hidden + 256
            wanted += [
                (op.prepare(rows, width, hidden, False, True, 0), BF16, True, False),
                (op.prepare(rows, hidden, width, False, False, 0), BF16, False, True),
                (op.prepare(rows, 2 * inner, hidden, True, True, 0), BF16, True, False),
                (op.prepare(rows, hidden, inner, False, False, 0), BF16, False, True),
            ]
        for n, k, dtype in FUSED_SHAPES:
            for text in OPTIONS:
                normed, residual = "normed" in text, "residual" in text
                plan = op.prepare(rows, n, k, "gated" in text, normed, 0)
                wanted.append((plan, dtype, normed, residual))
        for n, k in PLANNED_SHAPES:
            wanted += [(plan, BF16, False, False) for plan in different_plans(rows, n, k)]
            gated = different_plans(rows, n, k, gated=True)
            wanted += [(plan, BF16, True, True) for plan in gated]
        for n, k in FLOAT_SHAPES:
            plans = different_plans(rows, n, k)
            wanted += [(plan, BF16, False, False, True) for plan in plans]
    jit.prebuild([trapping(*one) for one in dict.fromkeys(wanted)])


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if jit.device_arch() != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    request.getfixturevalue("compiled")
    monkeypatch.setattr(op, "variant", trapping)
    op.load.cache_clear()
    yield
    op.load.cache_clear()


@pytest.mark.parametrize("m", [1, 17, 33, 100, 150, 256])
@pytest.mark.parametrize(("n", "k"), FLOAT_SHAPES)
def test_results_that_are_not_rounded(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    want = x.double() @ w.double().T
    for plan in different_plans(op.rows_for(m), n, k):
        out = torch.full((m + 1, n), NAN, device="cuda")
        op.launch(x, w, None, out[:m], plan)
        assert_close(out[:m], want, 2e-4)
        assert out[m].isnan().all(), f"{plan} wrote behind the result"


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.wide_gemm_sm90(x, w, out=out) is out
    assert_close(out, reference(x, w), limit(BF16))


@pytest.mark.parametrize("m", [1, 20, 64, 100, 128, 180, 256])
@pytest.mark.parametrize(("n", "k", "dtype"), FUSED_SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_with_what_surrounds_it(m: int, n: int, k: int, dtype: torch.dtype, options: str) -> None:
    check_surrounded(op.wide_gemm_sm90, m, n, k, dtype, options)


@pytest.mark.parametrize("m", [24, 50, 64, 90, 128, 180, 200, 256])
@pytest.mark.parametrize(("n", "k"), PLANNED_SHAPES)
@pytest.mark.parametrize("all_options", [False, True])
def test_every_way_to_cut_a_product_up(m: int, n: int, k: int, all_options: bool) -> None:
    x, w, bias = numbers(m, k), numbers(n, k, scale=k**-0.5), numbers(n)
    norm_eps = EPS if all_options else None
    residual = numbers(m, n // 2) if all_options else None
    want = reference(x, w, bias, norm_eps=norm_eps, gated=all_options, residual=residual)
    for plan in different_plans(op.rows_for(m), n, k, all_options):
        out = torch.full(want.shape, NAN, dtype=BF16, device="cuda")
        op.launch(x, w, bias, out, plan, norm_eps, residual)
        try:
            assert_close(out, want, limit(BF16))
        except AssertionError as error:
            raise AssertionError(f"{plan}: {error}") from None


@pytest.mark.parametrize("m", [33, 64, 100, 250])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_strided_rows_and_bias(m: int, dtype: torch.dtype) -> None:
    check_strided(op.wide_gemm_sm90, m, 264, 904, dtype, offset=8)


@pytest.mark.parametrize("m", [37, 64, 128, 256])
@pytest.mark.parametrize(("n", "k"), PLANNED_SHAPES)
def test_the_same_bits_every_time(m: int, n: int, k: int) -> None:
    x, w, bias, residual = (
        numbers(m, k),
        numbers(n, k, scale=k**-0.5),
        numbers(n),
        numbers(m, n // 2),
    )
    for plan in different_plans(op.rows_for(m), n, k, gated=True):
        want, got = (torch.empty(m, n // 2, dtype=BF16, device="cuda") for _ in range(2))
        op.launch(x, w, bias, want, plan, EPS, residual)
        for run in range(20):
            op.launch(x, w, bias, got, plan, EPS, residual)
            differing = int((got != want).sum())
            assert differing == 0, f"{plan}, run {run}: {differing} numbers differ"


@pytest.mark.parametrize(("n", "k"), [(3584, 3584), (896, 4864)])
@pytest.mark.parametrize("norm_eps", [None, EPS])
def test_a_row_is_the_same_in_every_batch_of_one_plan(
    n: int, k: int, norm_eps: float | None
) -> None:
    check_rows_of_batches(op.wide_gemm_sm90, 65, 128, n, k, norm_eps=norm_eps)


@pytest.mark.parametrize("m", [40, 128, 256])
@pytest.mark.parametrize("norm_eps", [None, EPS])
def test_other_rows_and_their_nan_do_not_matter(m: int, norm_eps: float | None) -> None:
    check_other_rows(op.wide_gemm_sm90, m, norm_eps=norm_eps)


@pytest.mark.parametrize("m", [48, 128, 256])
@pytest.mark.parametrize(("hidden", "inner"), LAYERS)
@pytest.mark.parametrize("dependent", [False, True])
def test_layers_in_a_graph_add_to_the_residual_in_place(
    m: int,
    hidden: int,
    inner: int,
    dependent: bool,
    graph_replay: Record,
) -> None:
    check_layers_in_a_graph(op.wide_gemm_sm90, m, hidden, inner, dependent, graph_replay)


@pytest.mark.parametrize("m", [64, 100, 256])
def test_every_plan_behind_a_kernel_that_writes_x(m: int, graph_replay: Record) -> None:
    n, k = 1040, 1096
    source, w, scale = numbers(m, k), numbers(n, k, scale=k**-0.5), 1 + numbers(k, scale=0.1)
    residual = numbers(m, n // 2)
    plans = different_plans(op.rows_for(m), n, k, gated=True)
    outs = [torch.empty_like(residual) for _ in plans]
    inputs: list[Tensor] = []

    def work() -> None:
        inputs.clear()
        for plan, out in zip(plans, outs, strict=True):
            inputs.append(rms_norm(source, scale, 1e-6))
            op.launch(inputs[-1], w, None, out, plan, EPS, residual)

    with jit.dependent_launches():
        replay = graph_replay(work)
    for _ in range(5):
        source.copy_(numbers(m, k))
        for tensor in (*inputs, *outs):
            tensor.fill_(NAN)
        replay()
        want = reference(inputs[0], w, norm_eps=EPS, gated=True, residual=residual)
        for plan, out in zip(plans, outs, strict=True):
            try:
                assert_close(out, want, limit(BF16))
            except AssertionError as error:
                raise AssertionError(f"{plan}: {error}") from None


def test_linear_takes_the_kernel_where_it_is_chosen() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (17, 64, 128, 256, 257):
        x, residual = numbers(m, 896), numbers(m, 896)
        want = reference(x, w, bias, norm_eps=EPS)
        got = fused_linear(x, w, bias, norm_eps=EPS)
        assert_close(got, want, 2 * limit(BF16))
        is_chosen = kernel_for(x, w, normed=True, has_bias=True) is op.wide_gemm_sm90
        assert is_chosen == (m <= op.ROWS[-1])  # W is small
        if is_chosen:
            assert torch.equal(got, op.wide_gemm_sm90(x, w, bias, norm_eps=EPS))
        want = reference(x, w, residual=residual)
        assert fused_linear(x, w, residual=residual) is residual
        assert_close(residual, want, 2 * limit(BF16))
    odd = numbers(64, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    want = reference(odd, w, norm_eps=EPS)
    assert_close(fused_linear(odd, w, norm_eps=EPS), want, 2 * limit(BF16))


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("rows", op.ROWS)
def test_as_many_clusters_run_at_a_time_as_plans_assume(rows: int, cluster: int) -> None:
    plans = [p for p in op.candidates(rows, 3584, 3584, device_of()) if p.cluster == cluster]
    plan = max(plans, key=lambda p: p.smem_bytes)  # such that a block fills an SM
    kernel = op.load(plan, BF16, False, False)
    count = clusters_at_a_time(kernel, plan.cluster, plan.grid, plan.threads, plan.smem_bytes)
    assert count >= device_of().clusters_of(plan.cluster), f"only {count} clusters fit"
