"""The product of 9 to 128 rows in the emulator, by every way of cutting it up, through its launcher."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import linear as linear_op
from engine.ops import narrow_gemm as op
from engine.ops.narrow_gemm import Device, Plan, Tiling
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.models import MODELS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Device(132, 227 * 1024, has_clusters=True)
NAN = float("nan")

needs_compiler = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(op):
        yield


def plan_of(tiling: Tiling, column_tiles: int, clusters: int, cluster: int, tile_rows: int) -> Plan:
    plan = Plan(tiling, column_tiles, cluster, clusters * cluster, tile_rows, block_chunks=1)
    staged = op.with_stages(plan, HOPPER)
    assert staged is not None
    return staged


def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x with strides and NaN around, w, bias, and an out that lies among other numbers."""
    wide = torch.full((m + 1, k + 24), NAN, dtype=dtype)
    x = wide[:m, 8 : 8 + k]
    x.copy_(torch.randn(m, k))
    w = (torch.randn(n, k) / k**0.5).to(dtype)
    return x, w, torch.randn(n).to(dtype), torch.full((m + 1, n + 6), 7.0, dtype=dtype)


# By tiling: each once with a ragged last tile, several tiles for a cluster, and K that ends in a chunk.
@needs_compiler
@pytest.mark.parametrize(
    ("tiling", "m", "n", "k", "dtype", "clusters", "cluster", "tile_rows"),
    [
        (op.TILINGS[0], 13, 26, 264, BF16, 2, 1, 10),
        (op.TILINGS[1], 32, 60, 392, FP16, 1, 2, 28),
        (op.TILINGS[2], 33, 150, 200, BF16, 1, 2, 56),
        (op.TILINGS[3], 16, 96, 136, BF16, 1, 1, 96),
        (op.TILINGS[4], 64, 130, 328, BF16, 2, 4, 112),
        (op.TILINGS[4], 128, 120, 72, BF16, 1, 1, 120),
        (op.TILINGS[5], 9, 144, 128, FP16, 1, 2, 144),
        (op.TILINGS[6], 50, 230, 192, BF16, 1, 1, 224),
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
    x, w, bias, wide_out = inputs(m, n, k, dtype)
    out = wide_out[:m, 4 : 4 + n]
    plan = plan_of(tiling, op.column_tiles_for(m), clusters, cluster, tile_rows)
    op.launch(x, w, bias, out, plan)
    want = op.reference(x, w, bias)
    error = (out.float() - want.float()).norm() / want.float().norm()
    assert error < 1e-4, f"relative error {error:.3g}"
    out.fill_(7.0)
    assert (wide_out == 7.0).all(), "wrote beside the result"


@needs_compiler
def test_nan_of_other_rows_stays_there() -> None:
    x, w, _, _ = inputs(20, 64, 96, BF16)
    plan = plan_of(op.TILINGS[2], 4, 1, 1, 64)
    want, out = torch.empty(20, 64, dtype=BF16), torch.empty(20, 64, dtype=BF16)
    op.launch(x, w, None, want, plan)
    x[[0, 9, 17]] = NAN
    op.launch(x, w, None, out, plan)
    others = [i for i in range(20) if i not in (0, 9, 17)]
    assert torch.equal(out[others], want[others])
    assert out[[0, 9, 17]].isnan().all()


@needs_compiler
def test_the_public_function_by_the_plan_of_a_device_with_few_sms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: Device(3, 99 * 1024, False))
    x, w, bias, _ = inputs(40, 200, 144, BF16)
    out = op.narrow_gemm(emulator.as_if_cuda(x), w, bias, torch.empty(40, 200, dtype=BF16))
    assert torch.allclose(out.float(), op.reference(x, w, bias).float(), rtol=0.01, atol=0.01)


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
@pytest.mark.parametrize("column_tiles", [2, 4, 8, 16])
def test_plans_cover_the_product_within_the_device(device: Device, column_tiles: int) -> None:
    for n in (2, 576, 896, 1152, 3584, 4608, 9728, 37888, 152064):
        for k in (8, 576, 896, 3584, 18944):
            plans = op.candidates(column_tiles, n, k, device)
            if device.has_clusters or column_tiles <= 4:
                assert plans, f"{n} x {k} does not fit"
            assert op.make_plan(column_tiles, n, k, device) in plans or not plans
            for plan in plans:
                tiling, clusters = plan.tiling, plan.grid // plan.cluster
                assert plan.grid % plan.cluster == 0
                assert clusters <= device.clusters_of(plan.cluster)
                assert plan.cluster == 1 or device.has_clusters
                assert plan.tile_rows % 2 == 0
                assert plan.tile_rows <= tiling.rows
                assert plan.cluster <= -(-k // tiling.chunk), "a block without chunks"
                assert clusters <= -(-n // plan.tile_rows), "a cluster without tiles"
                assert op.MIN_STAGES <= plan.stages <= op.MAX_STAGES
                columns = 8 * plan.column_tiles
                sums = 4 * tiling.rows * columns * max(1, tiling.warps_k - 1)
                needed = plan.stages * 2 * tiling.chunk * (tiling.rows + columns) + sums
                assert needed == plan.smem_bytes <= device.smem_limit


def test_what_is_compiled_ahead_serves_every_card(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS["Qwen2.5-7B"]
    ahead = op.specs(replace(config, arch="sm_90a"))
    for device in (HOPPER, Device(114, 227 * 1024, True), Device(60, 227 * 1024, True)):
        monkeypatch.setattr(op, "device_of", lambda index=None, device=device: device)
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


@needs_compiler
def test_linear_takes_the_kernel_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, num_sms=4))
    called: list[int] = []
    monkeypatch.setattr(
        linear_op, "narrow_gemm", lambda x, w, bias=None: called.append(len(x)) or x.new_zeros(1)
    )
    monkeypatch.setattr(linear_op, "linear_cuda", lambda x, w, bias=None: x.new_zeros(1))
    w = torch.randn(64, 96).to(BF16)
    for m in (1, 8, 9, 16, 32, 33):
        linear_op.linear(emulator.as_if_cuda(torch.randn(m, 96).to(BF16)), w)
    assert called == [9, 16, 32]
    odd = torch.randn(16, 100).to(BF16)[:, 1:97]  # rows between multiples of 16 bytes
    linear_op.linear(emulator.as_if_cuda(odd), w)
    linear_op.linear(emulator.as_if_cuda(torch.randn(16, 96)), w.float())
    assert called == [9, 16, 32]


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(16, 64).to(BF16), torch.randn(8, 64).to(BF16)
    with pytest.raises(ValueError, match="1 to 128 rows"):
        op.check(torch.randn(129, 64).to(BF16), w, None, None)
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
