"""The product of up to 256 rows on Hopper against float32: every way to cut it up, ragged sizes, graphs, and the
same bits each time. Waits that never end are turned into errors."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from engine.ops import jit
from engine.ops import wide_gemm_sm90 as op
from engine.ops.linear import linear
from engine.ops.narrow_gemm import device_of
from engine.ops.rms_norm import rms_norm
from engine.ops.wide_gemm_sm90 import Plan
from tests.gpu.test_skinny_gemm import BF16, FP16, NAN, assert_close, limit, numbers

ROWS = (1, 32, 33, 47, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193, 255, 256)

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536),
    (4608, 3584), (3584, 3584), (3584, 18944),
    (8, 8), (8, 4000), (136, 1000), (4104, 520), (20000, 104),
]  # fmt: skip
PLANNED_SHAPES = [(3584, 3584), (896, 896), (1032, 1096)]
variant_of_product = op.variant


def trapping(plan: Plan, dtype: torch.dtype) -> jit.VariantSpec:
    spec = variant_of_product(plan, dtype)
    return replace(spec, defines={**spec.defines, "SLUICE_TRAP": 1})


def different_plans(columns: int, n: int, k: int) -> list[Plan]:
    """The best, by the estimate, of each tiling, each size of cluster, and whether tiles are divided."""
    device = device_of()
    plans = op.candidates(columns, n, k, device)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    best: dict[tuple[object, ...], Plan] = {}
    for plan in plans:
        best.setdefault((plan.tiling, plan.cluster, plan.is_divided), plan)
    return list(best.values())


@pytest.fixture(scope="module")
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    device = device_of()
    plans = [op.make_plan(c, n, k, device) for c in op.COLUMNS for n, k in SHAPES]
    plans += [p for c in op.COLUMNS for n, k in PLANNED_SHAPES for p in different_plans(c, n, k)]
    jit.prebuild(list({str(spec): spec for spec in (trapping(p, BF16) for p in plans)}.values()))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available() or jit.device_arch() != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    request.getfixturevalue("compiled")
    monkeypatch.setattr(op, "variant", trapping)
    op.load.cache_clear()
    yield
    op.load.cache_clear()


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.wide_gemm_sm90(x, w, out=out) is out
    assert_close(out, x.float() @ w.float().T, limit(BF16))


@pytest.mark.parametrize("m", [32, 50, 64, 90, 128, 180, 256])
@pytest.mark.parametrize(("n", "k"), PLANNED_SHAPES)
def test_every_way_to_cut_a_product_up(m: int, n: int, k: int) -> None:
    x, w, bias = numbers(m, k), numbers(n, k, scale=k**-0.5), numbers(n)
    want = x.float() @ w.float().T + bias.float()
    for plan in different_plans(op.columns_for(m), n, k):
        for run in range(2):  # the second finds the counters as the first left them
            out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
            op.launch(x, w, bias, out, plan)
            try:
                assert_close(out, want, limit(BF16))
            except AssertionError as error:
                raise AssertionError(f"{plan}, run {run}: {error}") from None
    assert not op.arrivals_of(x.device).any(), "a counter is not back at zero"


@pytest.mark.parametrize("m", [33, 64, 100, 250])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_strided_rows_and_bias(m: int, dtype: torch.dtype) -> None:
    n, k = 264, 904
    wide_x = torch.full((m + 2, k + 48), NAN, dtype=dtype, device="cuda")
    wide_out = torch.full((m + 2, n + 24), NAN, dtype=dtype, device="cuda")
    x, out = wide_x[1 : m + 1, 16 : 16 + k], wide_out[1 : m + 1, 8 : 8 + n]
    x.copy_(numbers(m, k, dtype=dtype))
    w, bias = numbers(n, k, dtype=dtype, scale=k**-0.5), numbers(n, dtype=dtype)
    op.wide_gemm_sm90(x, w, bias, out)
    assert_close(out, x.float() @ w.float().T + bias.float(), limit(dtype))
    out.fill_(NAN)
    assert wide_out.isnan().all(), "wrote beside the result"


@pytest.mark.parametrize("m", [37, 64, 128, 256])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (896, 4864), (136, 1000)])
def test_the_same_bits_every_time(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    for plan in different_plans(op.columns_for(m), n, k):
        want, got = (torch.empty(m, n, dtype=BF16, device="cuda") for _ in range(2))
        op.launch(x, w, None, want, plan)
        for run in range(20):
            op.launch(x, w, None, got, plan)
            differing = int((got != want).sum())
            assert differing == 0, f"{plan}, run {run}: {differing} numbers differ"


@pytest.mark.parametrize(("n", "k"), [(3584, 3584), (896, 4864)])
def test_a_row_is_the_same_in_every_batch_of_one_plan(n: int, k: int) -> None:
    x, w = numbers(128, k), numbers(n, k, scale=k**-0.5)
    want = op.wide_gemm_sm90(x, w)
    for m in range(97, 128):
        start = 7 * m % (129 - m)
        got = op.wide_gemm_sm90(x[start : start + m], w)
        same = (got == want[start : start + m]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


@pytest.mark.parametrize("m", [40, 128, 256])
def test_other_rows_and_their_nan_do_not_matter(m: int) -> None:
    x, w = numbers(m, 896), numbers(896, 896, scale=1 / 30)
    want = op.wide_gemm_sm90(x, w)
    bad = torch.arange(m, device="cuda") % 3 == 1
    x[bad] = NAN
    got = op.wide_gemm_sm90(x, w)
    assert torch.equal(got[~bad], want[~bad])
    assert got[bad].isnan().all()


@pytest.mark.parametrize("m", [48, 128])
@pytest.mark.parametrize("width", [896, 3584])
@pytest.mark.parametrize("dependent", [False, True])
def test_a_graph_sees_new_data_at_replay(
    m: int,
    width: int,
    dependent: bool,
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    x, w = numbers(m, width), numbers(width, width, scale=width**-0.5)
    scale = 1 + numbers(width, scale=0.1)
    plain, normed = ([torch.empty_like(x) for _ in range(6)] for _ in range(2))
    kept: list[torch.Tensor] = []

    def layers() -> None:  # each reads what the one before has just written
        for before, after in zip([x, *plain], plain, strict=False):
            op.wide_gemm_sm90(before, w, out=after)
        kept.clear()
        for before, after in zip([x, *normed], normed, strict=False):
            kept.append(rms_norm(before, scale, 1e-6))
            op.wide_gemm_sm90(kept[-1], w, out=after)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(layers)
    for _ in range(3):
        x.copy_(numbers(m, width))
        w.copy_(numbers(width, width, scale=width**-0.5))
        for buffer in (*plain, *normed):
            buffer.fill_(NAN)
        replay()
        for before, after in zip([x, *plain], plain, strict=False):
            assert_close(after, before.float() @ w.float().T, limit(BF16))
        for before, after in zip(kept, normed, strict=True):
            assert_close(after, before.float() @ w.float().T, limit(BF16))
        assert_close(kept[-1], rms_norm(normed[-2], scale, 1e-6), limit(BF16))


def test_every_plan_behind_a_kernel_that_writes_x(
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    n, k, m = 1032, 1096, 100
    source, w, scale = numbers(m, k), numbers(n, k, scale=k**-0.5), 1 + numbers(k, scale=0.1)
    plans = different_plans(op.columns_for(m), n, k)
    outs = [torch.empty(m, n, dtype=BF16, device="cuda") for _ in plans]
    inputs: list[torch.Tensor] = []

    def work() -> None:
        inputs.clear()
        for plan, out in zip(plans, outs, strict=True):
            inputs.append(rms_norm(source, scale, 1e-6))
            op.launch(inputs[-1], w, None, out, plan)

    with jit.dependent_launches():
        replay = graph_replay(work)
    for _ in range(5):
        source.copy_(numbers(m, k))
        for tensor in (*inputs, *outs):
            tensor.fill_(NAN)
        replay()
        want = inputs[0].float() @ w.float().T
        for plan, out in zip(plans, outs, strict=True):
            try:
                assert_close(out, want, limit(BF16))
            except AssertionError as error:
                raise AssertionError(f"{plan}: {error}") from None


def test_memory_is_not_taken_while_a_graph_is_captured(device: torch.device) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(8, device=device)  # something to capture
        with pytest.raises(RuntimeError, match="run the product once before"):
            op.parts_of(12345, device)


def test_linear_takes_the_kernel_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "CHOSEN", ((range(49, 129), range(0, 896 * 896 * 2 + 1)),))
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (48, 49, 64, 128, 129):
        x = numbers(m, 896)
        got = linear(x, w, bias)
        assert_close(got, x.float() @ w.float().T + bias.float(), 2 * limit(BF16))
        if 49 <= m <= 128:
            assert torch.equal(got, op.wide_gemm_sm90(x, w, bias))
        else:
            assert torch.equal(got, F.linear(x, w, bias))
    odd = numbers(64, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(linear(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))


@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("columns", op.COLUMNS)
def test_as_many_clusters_run_at_a_time_as_plans_assume(columns: int, cluster: int) -> None:
    from cuda.bindings import driver

    plans = [p for p in op.candidates(columns, 3584, 3584, device_of()) if p.cluster == cluster]
    plan = max(plans, key=lambda p: p.smem_bytes)  # such that a block fills an SM
    function = op.load(plan, BF16).load(torch.cuda.current_device()).ptr
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = plan.cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = plan.num_clusters * plan.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = plan.tiling.threads, 1, 1
    config.sharedMemBytes = plan.smem_bytes
    config.attrs, config.numAttrs = [attribute], 1
    status, count = driver.cuOccupancyMaxActiveClusters(driver.CUfunction(function), config)
    assert int(status) == 0, status
    assert count >= device_of().clusters_of(plan.cluster), f"only {count} clusters fit"
