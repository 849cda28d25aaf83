"""The gated product of many rows on Hopper in the emulator: layouts, swizzles, that every wait ends, turns of
warpgroups, gates. Then the order of tiles, and what is compiled ahead."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.ops import fused_product, jit, nvrtc
from engine.ops import gated_gemm_sm90 as op
from engine.ops.hopper import Device
from engine.ops.kernel_build import build
from engine.ops.kernel_cache import Job, KernelCache
from tests.kernels import emulator
from tests.kernels.emulator import as_if_cuda, emulated, emulated_map
from tests.kernels.models import MODELS
from tests.kernels.test_wide_gemm_sm90 import assert_close

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


def run_on(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, num_sms=num_sms))


def run_by(schedule: str, stages: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/kernels/cuda_emu.h."""
    variant = op.variant

    def changed(tile: int, dtype: torch.dtype) -> jit.VariantSpec:
        spec = variant(tile, dtype)
        defines = {**spec.defines, "STAGES": stages or op.stages_of(tile)}
        return replace(spec, defines={**defines, schedule: 1} if schedule else defines)

    monkeypatch.setattr(op, "variant", changed)
    op.load.cache_clear()


# Rows, rows of W and columns that fit no tile; few SMs have several tiles each, in bands. With two stages, the
# fewest with which loads go on during products, each is used again and again.
CASES = [
    # m, n, k, SMs, stages, schedule
    (270, 272, 200, 3, None, ""),
    (270, 272, 72, 2, 2, "EMU_LATE"),
    (5, 16, 8, 132, 3, "EMU_LATE"),
]


@needs_compiler
@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize(("m", "n", "k", "num_sms", "stages", "schedule"), CASES)
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    tile: int,
    m: int,
    n: int,
    k: int,
    num_sms: int,
    stages: int | None,
    schedule: str,
) -> None:
    run_on(num_sms, monkeypatch)
    run_by(schedule, stages, monkeypatch)
    dtype = FP16 if schedule else BF16
    wide_x = torch.full((m + 2, k + 24), NAN, dtype=dtype)
    wide_out = torch.full((m + 2, n // 2 + 16), 7.0, dtype=dtype)
    x, out = wide_x[1 : m + 1, 8 : 8 + k], wide_out[1 : m + 1, 8 : 8 + n // 2]
    x.copy_(torch.randn(m, k))
    w = (3 * torch.randn(n, k) / k**0.5).to(dtype)
    op.launch(x, w, out, tile)
    assert_close(out, fused_product.reference(x.float(), w, gated=True))
    out.fill_(7.0)
    assert (wide_out == 7.0).all(), "wrote beside the result"


@needs_compiler
def test_extreme_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what exp can say, silu is 0 or its argument; what is not a number stays so in its row."""
    run_on(2, monkeypatch)
    gates = torch.tensor([-3e38, -200.0, -90.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 200.0, 3e38])
    x = torch.zeros(12, 8)
    x[:10, 0], x[:10, 1] = gates, 1.0
    x[10], x[11, 0] = NAN, torch.inf
    w = torch.zeros(16, 8)
    w[:8, 0], w[8:, 1] = 1.0, 0.5
    out = op.gated_gemm_sm90(as_if_cuda(x.to(BF16)), w.to(BF16))
    want = fused_product.reference(x.to(BF16)[:10].float(), w, gated=True)
    torch.testing.assert_close(out[:10].float(), want, rtol=2**-8, atol=1e-30)
    assert out[10:].isnan().all()


def test_on_a_cpu_it_is_the_reference() -> None:
    x, w = torch.randn(300, 24).to(BF16), torch.randn(32, 24).to(BF16)
    want = fused_product.reference(x, w, gated=True)
    assert torch.equal(op.gated_gemm_sm90(x, w), want)
    out = torch.empty(300, 16, dtype=BF16)
    assert op.gated_gemm_sm90(x, w, out) is out
    assert torch.equal(out, want)


def tile_at(tile: int, m: int, n: int, band: int, item: int) -> tuple[int, int]:
    """Height and column, as struct Tiles of the kernel has it."""
    heights, columns = -(-m // op.ROWS), -(-n // tile)
    top = item // (band * columns) * band
    here = min(band, heights - top)
    in_band = item % (band * columns)
    return top + in_band % here, in_band // here


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("num_sms", [132, 114, 16])
def test_every_tile_has_its_turn_once(tile: int, num_sms: int) -> None:
    device = replace(HOPPER, num_sms=num_sms)
    for m in (1, 257, 512, 1000, 2049, 8192):
        for n in (8, 896, 9728, 37888):
            count, band = op.tiles_of(tile, m, n), op.band_of(tile, m, device)
            tiles = {tile_at(tile, m, n, band, item) for item in range(count)}
            rows, columns = {row for row, _ in tiles}, {column for _, column in tiles}
            assert len(tiles) == count
            assert len(rows) == max(rows) + 1 == -(-m // op.ROWS)
            assert len(columns) == max(columns) + 1 == -(-n // tile)
            assert 1 <= op.grid_of(tile, m, n, device) <= min(count, num_sms)


@pytest.mark.parametrize("tile", op.TILES)
def test_tiles_fit_into_an_sm(tile: int) -> None:
    assert op.stages_of(tile) >= 4
    assert op.variant(tile, BF16).smem_bytes <= HOPPER.smem_limit


@pytest.mark.parametrize(
    ("m", "n", "tile"),
    [
        *((m, 37888, 192) for m in (256, 320, 512, 1024, 2048, 8192)),
        (256, 9728, 192),  # 1 round or 2
        (320, 9728, 128),  # 2 rounds or 2
        (512, 9728, 192),  # 2 rounds or 3
        (1024, 9728, 128),  # 4 rounds or 5
        (2048, 9728, 192),  # 7 rounds or 10: 53.0 us or 52.4
        (8192, 9728, 192),
    ],
)
def test_the_faster_tile_is_taken(m: int, n: int, tile: int) -> None:
    assert op.tile_for(m, n, HOPPER) == tile


def test_it_is_compiled_ahead_for_gated_products() -> None:
    config = replace(MODELS["Qwen2.5-7B"], arch="sm_90a")
    assert op.specs(config) == [op.variant(tile, BF16) for tile in op.TILES]
    assert op.specs(replace(config, intermediate_size=364)) == []
    assert op.specs(replace(config, arch="sm_89")) == []
    assert op.specs(replace(config, dtype=torch.float32)) == []


def test_every_variant_compiles_without_spills_or_remarks() -> None:
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    specs = [op.variant(tile, dtype) for tile in op.TILES for dtype in (BF16, FP16)]
    jobs = [Job.of(spec.source, spec.defines, "sm_90a") for spec in specs]
    for built in build(jobs, KernelCache(), workers=len(os.sched_getaffinity(0))):
        assert built.entry.resources["gated_gemm_sm90"].spill_bytes == 0, built.lines()
        assert not built.entry.warnings, f"{built.lines()} {built.entry.warnings}"


def test_wrong_tensors_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(132, monkeypatch)
    x, w = torch.randn(300, 64).to(BF16), torch.randn(32, 64).to(BF16)
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        op.check(x, w[:24])
    with pytest.raises(ValueError, match="multiple of 8 bfloat16"):
        op.check(x[:, :60], w[:, :60])
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        op.check(x.float(), w.float())
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 32).to(BF16).T)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(300, 100).to(BF16)[:, 3:67], w)
    with pytest.raises(ValueError, match="out"):
        op.check(x, w, torch.empty(300, 20, dtype=BF16)[:, :16])
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, has_clusters=False))
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        op.check(x, w)
