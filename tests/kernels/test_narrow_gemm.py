"""The product of up to 64 rows in the emulator, by every way of cutting it up, through its launcher."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, hopper, jit
from engine.ops import narrow_gemm as op
from engine.ops.hopper import Device
from engine.ops.narrow_gemm import Plan, Tiling
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.models import MODELS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Device(132, 227 * 1024, has_clusters=True)
NAN = float("nan")
EPS = 1e-5

FLAT, FLAT_WIDE, LOW, LOW_WIDE, MIDDLE, HIGHER, HIGH, HIGHEST, TOWER = op.TILINGS

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(op):
        yield


def plan_of(
    tiling: Tiling, m: int, clusters: int, cluster: int, tile_rows: int, gated: bool = False
) -> Plan:
    column_tiles, grid = op.column_tiles_for(m), clusters * cluster
    plan = Plan(tiling, column_tiles, cluster, grid, tile_rows, gated, block_chunks=1)
    staged = op.with_stages(plan, HOPPER)
    assert staged is not None
    return staged


@dataclass
class Inputs:
    """x with strides and NaN around; the residual and, beside it, an out that lie among other numbers."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    gated: bool = False

    def __post_init__(self) -> None:
        m, k = self.m, self.k
        outputs = self.n // 2 if self.gated else self.n
        wide = torch.full((m + 1, k + 24), NAN, dtype=self.dtype)
        self.x = wide[:m, 8 : 8 + k]
        sizes = torch.logspace(-1, 1, m)[:, None]  # so that norms differ from row to row
        self.x.copy_(torch.randn(m, k) * sizes)
        self.w = (torch.randn(self.n, k) / k**0.5).to(self.dtype)
        self.bias = torch.randn(self.n).to(self.dtype)
        self.residual = torch.randn(m, outputs + 2).to(self.dtype)[:, :outputs]
        self.wide_out = torch.full((m + 1, outputs + 6), 7.0, dtype=self.dtype)
        self.out = self.wide_out[:m, 4 : 4 + outputs]

    def nothing_else_was_written(self) -> bool:
        self.out.fill_(7.0)
        return bool((self.wide_out == 7.0).all())


def assert_close(got: Tensor, want: Tensor) -> None:
    """`want`: in float32. What rounding to got's dtype costs, of the number or of the typical one, is half
    an eps; sums in another order and fast functions of the gate are far below the other half."""
    limit = torch.finfo(got.dtype).eps * want.abs().clamp_min(want.pow(2).mean().sqrt())
    error = (got.float() - want).abs()
    worst = divmod(int((error / limit).argmax()), got.shape[1])
    assert (error <= limit).all(), f"{got[worst]} instead of {want[worst]} at {worst}"


# By tiling: each once with a ragged last tile, several tiles for a cluster, and K that ends in a chunk.
@needs_compiler
@pytest.mark.parametrize(
    ("tiling", "m", "n", "k", "dtype", "clusters", "cluster", "tile_rows"),
    [
        (FLAT, 13, 26, 264, BF16, 2, 1, 10),
        (LOW, 32, 60, 392, FP16, 1, 2, 28),
        (FLAT_WIDE, 20, 26, 1032, BF16, 1, 1, 10),
        (MIDDLE, 33, 150, 200, BF16, 1, 2, 56),
        (HIGHER, 16, 96, 136, BF16, 1, 1, 96),
        (HIGH, 64, 130, 328, BF16, 2, 4, 112),
        (HIGHEST, 9, 144, 128, FP16, 1, 2, 144),
        (TOWER, 50, 230, 192, BF16, 1, 1, 224),
    ],
)
def test_against_the_reference(
    tiling: Tiling,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    clusters: int,
    cluster: int,
    tile_rows: int,
) -> None:
    given = Inputs(m, n, k, dtype)
    plan = plan_of(tiling, m, clusters, cluster, tile_rows)
    op.launch(given.x, given.w, given.bias, given.out, plan)
    want = fused_product.reference(given.x.float(), given.w, given.bias)
    assert_close(given.out, want)
    assert given.nothing_else_was_written()


@needs_compiler
@pytest.mark.parametrize(
    ("tiling", "m", "n", "k", "clusters", "cluster", "tile_rows", "gated"),
    [
        (FLAT_WIDE, 13, 26, 1032, 1, 1, 10, False),
        (LOW, 32, 96, 392, 1, 2, 32, True),
        (MIDDLE, 33, 150, 200, 1, 2, 56, False),
    ],
)
def test_float32_results_are_not_rounded(
    tiling: Tiling,
    m: int,
    n: int,
    k: int,
    clusters: int,
    cluster: int,
    tile_rows: int,
    gated: bool,
) -> None:
    given = Inputs(m, n, k, BF16, gated)
    outputs = given.out.shape[1]
    wide = torch.full((m, outputs + 2), NAN)
    out = wide[:, :outputs]
    op.check(given.x, given.w, given.bias, out, gated, given.residual)
    plan = plan_of(tiling, m, clusters, cluster, tile_rows, gated)
    op.launch(given.x, given.w, given.bias, out, plan, EPS, given.residual)
    want = fused_product.reference(
        given.x.float(), given.w, given.bias, norm_eps=EPS, gated=gated, residual=given.residual
    )
    torch.testing.assert_close(out, want, atol=2e-5, rtol=1e-5)
    assert wide[:, outputs:].isnan().all()
    odd = torch.empty(m, outputs + 1)[:, :outputs]
    with pytest.raises(ValueError, match="multiples of 8 bytes"):
        op.check(given.x, given.w, given.bias, odd, gated, given.residual)


# With all that surrounds it; a kernel for each line, so lines differ in everything.
@needs_compiler
@pytest.mark.parametrize(
    ("tiling", "m", "n", "k", "dtype", "clusters", "cluster", "tile_rows", "normed", "gated"),
    [
        (FLAT, 9, 26, 264, BF16, 1, 1, 10, True, False),
        (LOW, 17, 60, 648, FP16, 1, 2, 28, True, False),
        (MIDDLE, 33, 150, 200, BF16, 1, 2, 56, True, False),
        (TOWER, 16, 230, 192, BF16, 1, 1, 224, True, False),
        (FLAT, 13, 64, 264, FP16, 2, 1, 16, True, True),
        (LOW, 32, 96, 392, BF16, 1, 2, 32, True, True),
        (MIDDLE, 31, 208, 200, BF16, 1, 4, 48, True, True),
        (HIGHER, 31, 176, 136, BF16, 1, 1, 96, True, True),
        (HIGH, 64, 256, 328, FP16, 1, 2, 112, True, True),
        (HIGHEST, 1, 192, 8, BF16, 1, 1, 192, True, True),
        (LOW, 10, 64, 136, BF16, 1, 1, 32, False, True),
        (LOW_WIDE, 12, 60, 1288, BF16, 1, 2, 28, True, False),
    ],
)
@pytest.mark.parametrize("with_residual", [False, True])
def test_with_what_surrounds_it(
    tiling: Tiling,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    clusters: int,
    cluster: int,
    tile_rows: int,
    normed: bool,
    gated: bool,
    with_residual: bool,
) -> None:
    given, norm_eps = Inputs(m, n, k, dtype, gated), EPS if normed else None
    plan = plan_of(tiling, m, clusters, cluster, tile_rows, gated)
    bias, residual = (given.bias, given.out) if with_residual else (None, None)
    given.out.copy_(given.residual)
    want = fused_product.reference(
        given.x.float(), given.w, bias, norm_eps=norm_eps, gated=gated, residual=residual
    )
    op.launch(given.x, given.w, bias, given.out, plan, norm_eps, residual)
    assert_close(given.out, want)
    assert given.nothing_else_was_written()


@needs_compiler
def test_a_residual_that_is_not_the_result() -> None:
    given = Inputs(20, 60, 648, FP16)
    plan, before = plan_of(LOW, 20, 1, 2, 28), given.residual.clone()
    op.launch(given.x, given.w, None, given.out, plan, EPS, given.residual)
    want = fused_product.reference(given.x.float(), given.w, norm_eps=EPS, residual=given.residual)
    assert_close(given.out, want)
    assert torch.equal(given.residual, before)


@needs_compiler
@pytest.mark.parametrize("schedule", ["EMU_LATE", "EMU_BACKWARDS"])
def test_sums_that_arrive_late_and_blocks_in_another_order(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Five tiles for each cluster: its two buffers and their barriers are used again."""
    variant = op.variant

    def scheduled(*args: object) -> jit.VariantSpec:
        spec = variant(*args)  # type: ignore[arg-type]
        return replace(spec, defines={**spec.defines, schedule: 1})

    monkeypatch.setattr(op, "variant", scheduled)
    given = Inputs(20, 250, 264, BF16)
    plan = plan_of(LOW, 20, 2, 2, 26)
    op.launch(given.x, given.w, given.bias, given.out, plan, EPS)
    want = fused_product.reference(given.x.float(), given.w, given.bias, norm_eps=EPS)
    assert_close(given.out, want)
    assert given.nothing_else_was_written()


@needs_compiler
def test_nan_of_other_rows_stays_there() -> None:
    given = Inputs(20, 64, 392, BF16, gated=True)
    plan = plan_of(LOW, 20, 1, 2, 32, gated=True)
    want = torch.empty(20, 32, dtype=BF16)
    op.launch(given.x, given.w, None, want, plan, EPS)
    given.x[[0, 9, 17]] = NAN
    op.launch(given.x, given.w, None, given.out, plan, EPS)
    others = [i for i in range(20) if i not in (0, 9, 17)]
    assert torch.equal(given.out[others], want[others])
    assert given.out[[0, 9, 17]].isnan().all()


@needs_compiler
@pytest.mark.parametrize("gated", [False, True])
def test_the_public_function_by_the_plan_of_a_device_with_few_sms(
    monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: Device(3, 99 * 1024, False))
    given = Inputs(30, 208, 144, BF16, gated)
    x = emulator.as_if_cuda(given.x)
    out = op.narrow_gemm(x, given.w, given.bias, given.out, norm_eps=EPS, gated=gated)
    assert out is given.out
    want = fused_product.reference(given.x.float(), given.w, given.bias, norm_eps=EPS, gated=gated)
    assert_close(out, want)


@pytest.mark.parametrize(
    "device",
    [
        HOPPER,
        Device(114, 227 * 1024, True),
        Device(108, 163 * 1024, False),
        Device(5, 99 * 1024, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("column_tiles", [2, 4, 8])
@pytest.mark.parametrize("gated", [False, True])
def test_plans_cover_the_product_within_the_device(
    device: Device, column_tiles: int, gated: bool
) -> None:
    group = 16 if gated else 2
    for n in (group, 576, 896, 1152, 3584, 4608, 9728, 37888, 152064):
        for k in (8, 576, 896, 3584, 18944):
            plans = op.candidates(column_tiles, n, k, device, gated)
            if device.has_clusters or column_tiles <= 4:
                assert plans, f"{n} x {k} does not fit"
            assert op.make_plan(column_tiles, n, k, device, gated) in plans or not plans
            for plan in plans:
                tiling, clusters = plan.tiling, plan.grid // plan.cluster
                assert plan.grid % plan.cluster == 0
                assert clusters <= device.clusters_of(plan.cluster)
                assert plan.cluster == 1 or device.has_clusters
                assert plan.tile_rows % group == 0
                assert plan.gated == gated
                assert plan.tile_rows <= tiling.rows
                assert plan.cluster <= -(-k // tiling.chunk), "a block without chunks"
                assert clusters <= -(-n // plan.tile_rows), "a cluster without tiles"
                assert op.MIN_STAGES <= plan.stages <= op.MAX_STAGES
                columns = 8 * plan.column_tiles
                sums = 4 * tiling.rows * columns * tiling.warps_k + op.SQUARES_BYTES
                if plan.cluster > 1:
                    sums += 8 * tiling.rows * columns + 4 * plan.cluster * columns + 16
                needed = plan.stages * 2 * tiling.chunk * (tiling.rows + columns) + sums
                assert needed == plan.smem_bytes <= device.smem_limit


def test_what_is_compiled_ahead_serves_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS["Qwen2.5-0.5B fp16"]
    ahead = op.specs(replace(config, arch="sm_90a"))
    for device in (HOPPER, Device(114, 227 * 1024, True), Device(60, 227 * 1024, True)):
        monkeypatch.setattr(hopper, "device_of", lambda index=None, device=device: device)
        wanted = op.specs(config)
        assert wanted
        assert all(spec in ahead for spec in wanted)
    assert op.specs(replace(config, arch="sm_80")) == []


def test_few_rows_take_tiles_of_one_block_and_many_take_clusters() -> None:
    few, many = (op.make_plan(c, 3584, 3584, HOPPER) for c in (2, 8))
    assert few is not None
    assert many is not None
    assert op.estimate(few, 3584, 3584, HOPPER) < op.estimate(many, 3584, 3584, HOPPER)
    assert (few.cluster, many.cluster) == (1, 2)
    assert many.tile_rows > few.tile_rows
    alone = [p for p in op.candidates(8, 3584, 3584, HOPPER) if p.cluster == 1]
    best_alone = min(op.estimate(p, 3584, 3584, HOPPER) for p in alone)
    assert op.estimate(many, 3584, 3584, HOPPER) < best_alone


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(16, 64).to(BF16), torch.randn(8, 64).to(BF16)
    with pytest.raises(ValueError, match="1 to 64 rows"):
        op.check(torch.randn(65, 64).to(BF16), w, None, None)
    with pytest.raises(ValueError, match="even number of rows"):
        op.check(x, w[:7], None, None)
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 8).to(BF16).T, None, None)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(16, 100).to(BF16)[:, 3:67], w, None, None)
    with pytest.raises(ValueError, match="bias"):
        op.check(x, w, torch.randn(9).to(BF16)[1:], None)
    with pytest.raises(ValueError, match="out"):
        op.check(x, w, None, torch.empty(16, 9, dtype=BF16)[:, :8])
    with pytest.raises(ValueError, match="multiple of 16"):
        op.check(x, w, gated=True)
    with pytest.raises(ValueError, match=r"the residual .* must be a \[16, 8\]"):
        op.check(x, w, residual=torch.empty(16, 4, dtype=BF16))
