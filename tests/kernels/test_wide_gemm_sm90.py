"""The product of up to 256 rows on Hopper in the emulator: layouts, swizzles, multicast, that every wait ends,
and tiles that several blocks share."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import jit, nvrtc
from engine.ops import wide_gemm_sm90 as op
from engine.ops.kernel_build import build
from engine.ops.kernel_cache import Job, KernelCache
from engine.ops.narrow_gemm import Device
from engine.ops.wide_gemm_sm90 import Plan, Tiling
from tests.kernels import emulator
from tests.kernels.emulator import emulated, emulated_map
from tests.kernels.models import MODELS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Device(132, 227 * 1024, has_clusters=True)
NAN = float("nan")

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(op, "tensor_map", emulated_map)
    with emulated(op):
        yield


def plan_of(
    n: int,
    k: int,
    columns: int,
    tiling: Tiling,
    cluster: int,
    num_clusters: int,
    tile_rows: int,
    is_divided: bool,
) -> Plan:
    num_tiles, num_chunks = -(-n // (tile_rows * cluster)), -(-k // op.CHUNK)
    plan = Plan(
        tiling, columns, cluster, num_clusters, tile_rows, num_tiles, num_chunks, is_divided
    )
    return op.with_stages(plan, HOPPER)


def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with strides and NaN around, w, bias, and an out that lies among other numbers."""
    wide = torch.full((m + 1, k + 24), NAN, dtype=dtype)
    x = wide[:m, 8 : 8 + k]
    x.copy_(torch.randn(m, k))
    w = (torch.randn(n, k) / k**0.5).to(dtype)
    return x, w, torch.randn(n).to(dtype), torch.full((m + 1, n + 16), 7.0, dtype=dtype)


# Ragged in every direction, rings that go round, tiles of one, two and more clusters.
PRODUCTS = [
    # m, n, k, dtype, columns, tiling, cluster, clusters, tile rows, divided
    (33, 72, 328, BF16, 64, (1, 1), 1, 2, 64, True),
    (50, 200, 456, BF16, 64, (1, 1), 2, 3, 40, True),
    (17, 136, 904, FP16, 32, (2, 1), 2, 1, 128, True),
    (64, 128, 1096, BF16, 64, (1, 1), 1, 5, 56, True),
    (70, 264, 200, FP16, 96, (3, 1), 1, 2, 144, False),
    (90, 136, 520, BF16, 96, (1, 1), 2, 3, 64, True),
    (128, 512, 264, BF16, 128, (2, 2), 1, 3, 256, True),
    (100, 320, 72, BF16, 128, (2, 1), 2, 2, 80, False),
    (130, 136, 328, BF16, 192, (2, 1), 2, 2, 64, True),
    (255, 144, 392, BF16, 256, (2, 1), 2, 2, 128, True),
    (100, 520, 264, BF16, 128, (1, 1), 4, 3, 64, True),
    (20, 96, 328, FP16, 32, (1, 1), 4, 2, 24, True),
    (1, 8, 8, BF16, 32, (1, 1), 2, 1, 8, False),
]


@needs_compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "columns", "tiling", "cluster", "clusters", "tile_rows", "divided"),
    PRODUCTS,
)
@pytest.mark.parametrize("schedule", ["plain", "EMU_BACKWARDS", "EMU_LATE"])
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    columns: int,
    tiling: tuple[int, int],
    cluster: int,
    clusters: int,
    tile_rows: int,
    divided: bool,
    schedule: str,
) -> None:
    if schedule == "EMU_BACKWARDS" and not divided:
        pytest.skip("the order of blocks matters where they share tiles")
    if schedule != "plain":
        run_by(schedule, monkeypatch)
    x, w, bias, wide_out = inputs(m, n, k, dtype)
    out = wide_out[:m, 8 : 8 + n]
    plan = plan_of(n, k, columns, Tiling(*tiling), cluster, clusters, tile_rows, divided)
    want = op.reference(x, w, bias)
    for _ in range(2):  # the second finds the counters as the first left them
        out.fill_(NAN)
        op.launch(x, w, bias, out, plan)
        error = (out.float() - want.float()).norm() / want.float().norm()
        assert error < 1e-4, f"relative error {error:.3g}"
    if divided:
        assert not op.arrivals_of(x.device).any()
    out.fill_(7.0)
    assert (wide_out == 7.0).all(), "wrote beside the result"


def run_by(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/kernels/cuda_emu.h."""
    variant = op.variant

    def scheduled(plan: Plan, dtype: torch.dtype) -> jit.VariantSpec:
        spec = variant(plan, dtype)
        return replace(spec, defines={**spec.defines, schedule: 1})

    monkeypatch.setattr(op, "variant", scheduled)
    op.load.cache_clear()


@needs_compiler
def test_the_order_of_arrival_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of parts that differ by powers of ten, so that another order would round otherwise."""
    x, w, _, _ = inputs(40, 64, 640, BF16)
    x *= torch.logspace(-2, 2, 640).to(BF16)
    plan = plan_of(64, 640, 64, Tiling(1, 1), 1, 4, 64, True)
    want, got = torch.empty(40, 64, dtype=BF16), torch.empty(40, 64, dtype=BF16)
    op.launch(x, w, None, want, plan)
    run_by("EMU_BACKWARDS", monkeypatch)
    op.launch(x, w, None, got, plan)
    assert torch.equal(got, want)


@needs_compiler
def test_nan_of_other_rows_stays_there() -> None:
    x, w, _, _ = inputs(40, 64, 392, BF16)
    plan = plan_of(64, 392, 64, Tiling(1, 1), 2, 2, 32, True)
    want, out = torch.empty(40, 64, dtype=BF16), torch.empty(40, 64, dtype=BF16)
    op.launch(x, w, None, want, plan)
    bad = [0, 9, 17, 33]
    x[bad] = NAN
    op.launch(x, w, None, out, plan)
    others = [i for i in range(40) if i not in bad]
    assert torch.equal(out[others], want[others])
    assert out[bad].isnan().all()


@needs_compiler
def test_the_public_function_by_the_plan_of_a_device_with_few_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, num_sms=4))
    x, w, bias, _ = inputs(40, 200, 144, BF16)
    out = op.wide_gemm_sm90(emulator.as_if_cuda(x), w, bias, torch.empty(40, 200, dtype=BF16))
    assert torch.allclose(out.float(), op.reference(x, w, bias).float(), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("device", [HOPPER, Device(114, 227 * 1024, True)], ids=str)
@pytest.mark.parametrize("columns", op.COLUMNS)
def test_plans_cover_the_product_within_the_device(device: Device, columns: int) -> None:
    for n in (8, 576, 896, 1152, 3584, 4608, 9728, 37888, 152064, 256000):
        for k in (8, 576, 896, 3584, 18944):
            plans = op.candidates(columns, n, k, device)
            assert op.make_plan(columns, n, k, device) in plans
            for plan in plans:
                assert plan.tiling.fits(columns)
                assert 1 <= plan.num_clusters <= device.clusters_of(plan.cluster)
                assert plan.tile_rows % 8 == 0
                assert plan.tile_rows <= plan.tiling.rows
                covered = plan.num_tiles * plan.cluster * plan.tile_rows
                assert covered - plan.cluster * plan.tile_rows < n <= covered
                assert plan.num_chunks == -(-k // op.CHUNK)
                units = plan.num_tiles * plan.num_chunks
                assert plan.num_clusters <= (units if plan.is_divided else plan.num_tiles)
                assert plan.num_clusters * plan.cluster_units >= units
                assert op.MIN_STAGES <= plan.stages <= op.MAX_STAGES
                assert plan.smem_bytes <= device.smem_limit
                assert plan.num_arrivals <= op.MAX_ARRIVALS


def test_small_matrices_are_shared_out_and_large_ones_have_whole_tiles() -> None:
    down, gate_up = op.make_plan(64, 896, 4864, HOPPER), op.make_plan(64, 37888, 3584, HOPPER)
    assert down.is_divided
    assert down.num_clusters > down.num_tiles
    assert not gate_up.is_divided
    assert gate_up.num_clusters * gate_up.cluster == 132


def test_what_is_chosen_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(MODELS["Qwen2.5-7B"], arch="sm_90a")
    monkeypatch.setattr(op, "CHOSEN", ())
    assert op.specs(config) == []
    monkeypatch.setattr(op, "CHOSEN", ((range(33, 65), range(0, 1 << 40)),))
    specs = op.specs(config)
    assert {spec.defines["COLUMNS"] for spec in specs} == {64}
    for n, k in op.products(config):
        assert op.variant(op.make_plan(64, n, k, HOPPER), BF16) in specs


def test_every_tiling_compiles_without_spills_or_remarks() -> None:
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    shapes = [(t, c) for t in op.TILINGS for c in op.COLUMNS if t.fits(c)]
    plans = [Plan(t, c, op.CLUSTERS[i % 3], 1, t.rows, 1, 64) for i, (t, c) in enumerate(shapes)]
    specs = [op.variant(op.with_stages(plan, HOPPER), BF16) for plan in plans]
    jobs = [Job.of(spec.source, spec.defines, "sm_90a") for spec in specs]
    for built in build(jobs, KernelCache(), workers=len(os.sched_getaffinity(0))):
        assert built.entry.resources["wide_gemm_sm90"].spill_bytes == 0, built.lines()
        assert not built.entry.warnings, f"{built.lines()} {built.entry.warnings}"


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(64, 64).to(BF16), torch.randn(8, 64).to(BF16)
    with pytest.raises(ValueError, match="1 to 256 rows"):
        op.check(torch.randn(257, 64).to(BF16), w, None, None)
    with pytest.raises(ValueError, match="multiple of 8 rows"):
        op.check(x, w[:7], None, None)
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 8).to(BF16).T, None, None)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(64, 100).to(BF16)[:, 3:67], w, None, None)
    with pytest.raises(ValueError, match="bias"):
        op.check(x, w, torch.randn(9).to(BF16), None)
    with pytest.raises(ValueError, match="out"):
        op.check(x, w, None, torch.empty(64, 12, dtype=BF16)[:, :8])
