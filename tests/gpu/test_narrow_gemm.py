"""The product of 9 to 128 rows against float32: every plan, ragged sizes, graphs, and the same bits each time."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from engine.ops import jit
from engine.ops import narrow_gemm as op
from engine.ops.linear import linear
from engine.ops.narrow_gemm import Plan
from tests.gpu.test_skinny_gemm import BF16, FP16, NAN, assert_close, limit, numbers

COLUMN_TILES = (2, 4, 8, 16)
ROWS = (1, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536),
    (4608, 3584), (3584, 3584), (3584, 18944),
    (2, 8), (6, 72), (100, 200), (134, 1000), (4098, 520), (20000, 104),
]  # fmt: skip
PLANNED_SHAPES = [(3584, 3584), (896, 896), (1002, 1096)]


def some_plans(column_tiles: int, n: int, k: int) -> list[Plan]:
    """The two best of each size of cluster, by their estimates."""
    device = op.device_of()
    plans = op.candidates(column_tiles, n, k, device)
    plans.sort(key=lambda plan: op.estimate(plan, n, k, device))
    return [p for c in op.CLUSTERS for p in [q for q in plans if q.cluster == c][:2]]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    plans = [op.prepare(c, n, k, 0) for c in COLUMN_TILES for n, k in SHAPES]
    plans += [p for c in COLUMN_TILES for n, k in PLANNED_SHAPES for p in some_plans(c, n, k)]
    jit.prebuild([op.variant(plan, BF16) for plan in plans])


@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.narrow_gemm(x, w, out=out) is out
    assert_close(out, x.float() @ w.float().T, limit(BF16))


@pytest.mark.parametrize("m", [11, 16, 32, 50, 64, 128])
@pytest.mark.parametrize(("n", "k"), PLANNED_SHAPES)
def test_every_way_to_cut_a_product_up(m: int, n: int, k: int) -> None:
    x, w, bias = numbers(m, k), numbers(n, k, scale=k**-0.5), numbers(n)
    want = x.float() @ w.float().T + bias.float()
    plans = some_plans(op.column_tiles_for(m), n, k)
    assert plans
    for plan in plans:
        out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
        op.launch(x, w, bias, out, plan)
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


@pytest.mark.parametrize("m", [16, 37, 64, 128])
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (896, 4864), (134, 1000)])
def test_the_same_bits_every_time(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    want = op.narrow_gemm(x, w)
    for i in range(20):
        got = op.narrow_gemm(x, w)
        assert torch.equal(got, want), f"run {i}: {int((got != want).sum())} numbers differ"


@pytest.mark.parametrize(("n", "k"), [(3584, 3584), (896, 4864)])
def test_a_row_is_the_same_in_every_batch_of_one_plan(n: int, k: int) -> None:
    x, w = numbers(64, k), numbers(n, k, scale=k**-0.5)
    want = op.narrow_gemm(x, w)
    for m in range(33, 64):
        start = 7 * m % (65 - m)
        got = op.narrow_gemm(x[start : start + m], w)
        same = (got == want[start : start + m]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


@pytest.mark.parametrize("m", [20, 64])
def test_other_rows_and_their_nan_do_not_matter(m: int) -> None:
    x, w = numbers(m, 896), numbers(896, 896, scale=1 / 30)
    want = op.narrow_gemm(x, w)
    bad = torch.arange(m, device="cuda") % 3 == 1
    x[bad] = NAN
    got = op.narrow_gemm(x, w)
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


def test_linear_takes_the_kernel_where_it_pays() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (9, 16, 32, 33, 128):
        x = numbers(m, 896)
        got = linear(x, w, bias)
        assert_close(got, x.float() @ w.float().T + bias.float(), 2 * limit(BF16))
        if op.is_chosen(x, w):
            assert torch.equal(got, op.narrow_gemm(x, w, bias))
        else:
            assert torch.equal(got, F.linear(x, w, bias))
    odd = numbers(16, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(linear(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))


@pytest.mark.parametrize("cluster", [c for c in op.CLUSTERS if c > 1])
def test_as_many_clusters_run_at_a_time_as_plans_assume(cluster: int) -> None:
    if not op.device_of().has_clusters:
        pytest.skip("clusters are used on Hopper")
    from cuda.bindings import driver

    plans = [p for p in op.candidates(8, 3584, 3584, op.device_of()) if p.cluster == cluster]
    plan = max(plans, key=lambda p: p.smem_bytes)  # such that a block fills an SM
    function = op.load(plan, BF16).load(torch.cuda.current_device()).ptr
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
