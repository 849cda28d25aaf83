"""The product of up to 256 rows on Hopper in the emulator: layouts, swizzles, that every wait ends, tiles that several
blocks share, and what surrounds the product in a decoder. Then its plans, and what is compiled ahead."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, jit, nvrtc
from engine.ops import wide_gemm_sm90 as op
from engine.ops.hopper import Device
from engine.ops.kernel_build import build
from engine.ops.kernel_cache import Job, KernelCache
from engine.ops.wide_gemm_sm90 import Plan, Tiling
from tests.kernels import emulator
from tests.kernels.emulator import emulated, emulated_map

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Device(132, 227 * 1024, has_clusters=True)
NAN = float("nan")
EPS = 1e-5

ONE, TWO, THREE, FOUR = op.TILINGS

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(op, "tensor_map", emulated_map)
    with emulated(op):
        yield


def plan_of(
    tiling: Tiling, tile: int, cluster: int, rounds: int, n: int, k: int, gated: bool = False
) -> Plan:
    num_tiles = -(-n // tile)
    grid = -(-num_tiles // rounds) * cluster
    plan = Plan(tiling, tile, cluster, grid, rounds, -(-k // op.CHUNK), gated)
    stages = op.most_stages(plan, HOPPER.smem_limit)
    assert stages is not None, "does not fit into shared memory"
    return replace(plan, stages=stages)


@dataclass
class Inputs:
    """x with strides and NaN around; the residual and, beside it, an out that lie among other numbers."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    gated: bool = False

    def __post_init__(self) -> None:
        m, k, outputs = self.m, self.k, self.n // 2 if self.gated else self.n
        wide = torch.full((m + 1, k + 24), NAN, dtype=self.dtype)
        self.x = wide[:m, 8 : 8 + k]
        sizes = torch.logspace(-1, 1, m)[:, None]  # so that norms differ from row to row
        self.x.copy_(torch.randn(m, k) * sizes)
        self.w = (torch.randn(self.n, k) / k**0.5).to(self.dtype)
        self.bias = torch.randn(self.n).to(self.dtype)
        self.residual = torch.randn(m, outputs + 8).to(self.dtype)[:, :outputs]
        self.wide_out = torch.full((m + 1, outputs + 16), 7.0, dtype=self.dtype)
        self.out = self.wide_out[:m, 8 : 8 + outputs]

    def nothing_else_was_written(self) -> bool:
        self.out.fill_(7.0)
        return bool((self.wide_out == 7.0).all())


def assert_close(got: Tensor, want: Tensor) -> None:
    """`want`: in float32. What rounding to got's dtype costs, of the number or of the typical one of its row, is
    half an eps; sums in another order and fast functions of the gate are far below the other half."""
    typical = want.pow(2).mean(1, keepdim=True).sqrt()
    limit = torch.finfo(got.dtype).eps * torch.maximum(want.abs(), typical)
    error = (got.float() - want).abs()
    worst = divmod(int((error / limit).nan_to_num(torch.inf).argmax()), got.shape[1])
    assert (error <= limit).all(), f"{got[worst]} instead of {want[worst]} at {worst}"


# Ragged in every direction, rings that go round, all tilings, options as a decoder has them and all together.
PRODUCTS = [
    # m, n, k, dtype, tiling, tile, cluster, rounds, options
    (33, 72, 328, BF16, ONE, 24, 1, 1, ""),
    (64, 200, 904, BF16, ONE, 40, 1, 2, "bias normed"),
    (63, 144, 328, FP16, ONE, 16, 1, 5, "normed gated"),
    (64, 272, 136, BF16, ONE, 64, 1, 2, "bias normed gated residual"),
    (50, 320, 72, BF16, ONE, 160, 1, 1, "residual"),
    (1, 8, 8, BF16, ONE, 8, 1, 1, "bias normed residual"),
    (65, 96, 520, BF16, TWO, 32, 1, 3, "residual"),
    (128, 144, 200, FP16, TWO, 72, 1, 1, "bias residual"),
    (100, 224, 328, BF16, TWO, 16, 1, 7, "normed gated"),
    (70, 512, 72, BF16, TWO, 256, 1, 2, "bias normed gated"),
    (127, 208, 72, BF16, TWO, 56, 1, 1, ""),
    (130, 88, 200, BF16, THREE, 48, 1, 1, "bias normed residual"),
    (192, 160, 136, FP16, THREE, 160, 1, 1, "normed gated"),
    (200, 80, 328, BF16, FOUR, 80, 1, 1, "normed gated"),
    (256, 104, 136, BF16, FOUR, 24, 1, 2, "bias residual"),
    (255, 320, 72, BF16, FOUR, 160, 1, 1, "bias normed gated residual"),
    (64, 72, 1096, BF16, ONE, 32, 4, 1, "residual"),
    (33, 136, 328, BF16, ONE, 120, 2, 1, "bias normed"),
    (20, 208, 520, FP16, ONE, 96, 4, 1, "bias normed gated residual"),
    (128, 88, 456, BF16, TWO, 56, 2, 1, "bias residual"),
    (100, 96, 328, BF16, TWO, 80, 4, 1, "normed gated"),
    (180, 72, 264, FP16, THREE, 40, 2, 1, "bias residual"),
    (256, 128, 264, BF16, FOUR, 120, 4, 1, "residual"),
    (200, 160, 136, BF16, FOUR, 80, 2, 1, "bias normed gated residual"),
]  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "tiling", "tile", "cluster", "rounds", "options"), PRODUCTS
)
@pytest.mark.parametrize("schedule", ["plain", "EMU_LATE"])
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    tiling: Tiling,
    tile: int,
    cluster: int,
    rounds: int,
    options: str,
    schedule: str,
) -> None:
    if schedule != "plain":
        if cluster > 1 and m > 128:
            pytest.skip("takes minutes: sums arrive one by one")
        run_by(schedule, monkeypatch)
    gated = "gated" in options
    given = Inputs(m, n, k, dtype, gated)
    plan = plan_of(tiling, tile, cluster, rounds, n, k, gated)
    bias = given.bias if "bias" in options else None
    norm_eps = EPS if "normed" in options else None
    residual = given.residual if "residual" in options else None
    want = fused_product.reference(
        given.x.float(), given.w, bias, norm_eps=norm_eps, gated=gated, residual=residual
    )
    given.out.fill_(NAN)
    if residual is not None and m % 2 == 0:  # in place
        residual = given.out.copy_(residual)
    op.launch(given.x, given.w, bias, given.out, plan, norm_eps, residual)
    assert_close(given.out, want)
    assert given.nothing_else_was_written()


def run_by(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/kernels/cuda_emu.h."""
    variant = op.variant

    def scheduled(plan: Plan, *options: Any) -> jit.VariantSpec:
        spec = variant(plan, *options)
        return replace(spec, defines={**spec.defines, schedule: 1})

    monkeypatch.setattr(op, "variant", scheduled)
    op.load.cache_clear()


@needs_compiler
@pytest.mark.parametrize("cluster", [1, 2])
def test_nan_of_other_rows_stays_there(cluster: int) -> None:
    given = Inputs(40, 64, 392, BF16)
    plan = plan_of(ONE, 32, cluster, 1, 64, 392)
    want, out = torch.empty(40, 64, dtype=BF16), torch.empty(40, 64, dtype=BF16)
    op.launch(given.x, given.w, None, want, plan, EPS)
    bad = [0, 9, 17, 33]
    given.x[bad] = NAN
    op.launch(given.x, given.w, None, out, plan, EPS)
    others = [i for i in range(40) if i not in bad]
    assert torch.equal(out[others], want[others])
    assert out[bad].isnan().all()


@needs_compiler
def test_the_public_function_by_the_plan_of_a_device_with_few_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, num_sms=4))
    given = Inputs(40, 208, 144, BF16, gated=True)
    x = emulator.as_if_cuda(given.x)
    out = op.wide_gemm_sm90(x, given.w, given.bias, given.out, norm_eps=EPS, gated=True)
    want = fused_product.reference(given.x.float(), given.w, given.bias, norm_eps=EPS, gated=True)
    assert_close(out, want)


def test_on_a_cpu_it_is_the_reference() -> None:
    given = Inputs(40, 64, 72, BF16)
    out = op.wide_gemm_sm90(given.x, given.w, norm_eps=EPS, residual=given.residual)
    want = fused_product.reference(given.x, given.w, norm_eps=EPS, residual=given.residual)
    assert torch.equal(out, want)


@pytest.mark.parametrize("device", [HOPPER, Device(114, 227 * 1024, True)], ids=str)
@pytest.mark.parametrize("rows", op.ROWS)
@pytest.mark.parametrize("gated", [False, True])
def test_plans_cover_the_product_within_the_device(device: Device, rows: int, gated: bool) -> None:
    for n in (8, 576, 896, 1152, 3584, 4608, 9728, 37888, 152064, 256000):
        for k in (8, 576, 896, 3584, 18944):
            if gated and n % 16:
                continue
            plans = op.candidates(rows, n, k, device, gated)
            for normed in (False, True):
                assert op.make_plan(rows, n, k, device, gated, normed) in plans
            for plan in plans:
                assert rows <= plan.tiling.rows < rows + 64
                assert plan.tile in op.TILES
                assert plan.tile <= plan.tiling.widest
                assert plan.tile % (16 if gated else 8) == 0
                assert plan.grid % plan.cluster == 0
                clusters = plan.grid // plan.cluster
                assert 1 <= clusters <= device.clusters_of(plan.cluster)
                assert plan.tile * clusters * plan.rounds >= n
                assert plan.tile * (clusters * plan.rounds - clusters) < n, "a round for nothing"
                assert plan.rounds == 1 or plan.cluster == 1
                assert plan.num_chunks == -(-k // op.CHUNK) >= plan.cluster
                assert op.MIN_STAGES <= plan.stages <= op.MAX_STAGES
                assert plan.parcel_bytes <= plan.stages * (plan.stage_bytes - 16)
                assert plan.smem_bytes <= device.smem_limit


@pytest.mark.parametrize(
    ("rows", "n", "k", "gated", "normed", "best"),
    [  # by the measurements that the estimate was fitted to
        (32, 3584, 3584, False, False, {"30/4 x120 s7", "30/4 x120 s9"}),
        (64, 4608, 3584, False, True, {"64/2 x72 s12", "29/4 x160 s7"}),
        (64, 37888, 3584, True, True, {"132/1 x144 r2 s6", "132/1 x144 r2 s8"}),
        (128, 3584, 18944, False, False, {"30/4 x120 s7"}),
        (128, 9728, 896, True, True, {"122/1 x80 s4"}),
        (256, 896, 4864, False, False, {"28/4 x32 s6"}),
        (256, 896, 896, False, False, {"56/2 x16 s6"}),
    ],
)
def test_plans_are_the_fastest_that_were_measured(
    rows: int, n: int, k: int, gated: bool, normed: bool, best: set[str]
) -> None:
    assert str(op.make_plan(rows, n, k, HOPPER, gated, normed)) in best


# Where registers are fewest: the widest tiles of each number of warps, all options and none.
NARROWER = {ONE: (8, 80), TWO: (80, 192), THREE: (112,), FOUR: (40, 96)}


def test_every_tiling_compiles_without_spills_or_remarks() -> None:
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    jobs = []
    for tiling in op.TILINGS:
        for tile in (*NARROWER[tiling], tiling.widest):
            for cluster, normed, residual in [(1, True, False), (1, False, True), (2, True, True)]:
                gated = normed and tile % 16 == 0
                plan = plan_of(tiling, tile, cluster, 1, 8 * tile, 4096, gated)
                spec = op.variant(plan, BF16, normed, residual)
                jobs.append(Job.of(spec.source, spec.defines, "sm_90a"))
    for built in build(jobs, KernelCache(), workers=len(os.sched_getaffinity(0))):
        assert built.entry.resources["wide_gemm_sm90"].spill_bytes == 0, built.lines()
        assert not built.entry.warnings, f"{built.lines()} {built.entry.warnings}"


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(64, 64).to(BF16), torch.randn(8, 64).to(BF16)
    with pytest.raises(ValueError, match="1 to 256 rows"):
        op.check(torch.randn(257, 64).to(BF16), w)
    with pytest.raises(ValueError, match="multiple of 8 rows"):
        op.check(x, w[:7])
    with pytest.raises(ValueError, match="multiple of 16"):
        op.check(x, w, gated=True)
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 8).to(BF16).T)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(64, 100).to(BF16)[:, 3:67], w)
    with pytest.raises(ValueError, match="bias"):
        op.check(x, w, torch.randn(9).to(BF16))
    with pytest.raises(ValueError, match="out"):
        op.check(x, w, out=torch.empty(64, 12, dtype=BF16)[:, :8])
    with pytest.raises(ValueError, match="the residual"):
        op.check(x, w, residual=torch.empty(64, 16, dtype=BF16))
