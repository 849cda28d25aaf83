"""The product of many rows on Hopper in the emulator: layouts, swizzles, that every wait ends, turns of
warpgroups, what is done to the result. Then the order of tiles, and what is compiled ahead."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, jit, linear, nvrtc
from engine.ops import tall_gemm_sm90 as op
from engine.ops.kernel_build import build
from engine.ops.kernel_cache import Job, KernelCache
from engine.ops.narrow_gemm import Device
from engine.ops.tall_gemm_sm90 import Shapes
from tests.kernels import emulator
from tests.kernels.emulator import as_if_cuda, emulated, emulated_map, forget
from tests.kernels.models import MODELS

BF16, FP16 = torch.bfloat16, torch.float16
HOPPER = Device(132, 227 * 1024, has_clusters=True)
NAN = float("nan")
KINDS = ("gated", "bias", "residual", "bias residual")
PRODUCTS = {  # of a 7B and a 0.5B model: rows of W, columns
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "0.5B gate_up": (9728, 896),
    "0.5B down": (896, 4864),
}

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

    def changed(
        tile: int, dtype: torch.dtype, gated: bool = False, residual: bool = False
    ) -> jit.VariantSpec:
        spec = variant(tile, dtype, gated, residual)
        defines = {**spec.defines, "STAGES": stages or op.stages_of(tile)}
        return replace(spec, defines={**defines, schedule: 1} if schedule else defines)

    monkeypatch.setattr(op, "variant", changed)
    op.load.cache_clear()


def assert_close(got: Tensor, want: Tensor) -> None:
    """`want`: in float32. What rounding to got's dtype costs, of the number or of the typical one of its row, is
    half an eps; sums in another order and fast functions of the gate are far below the other half."""
    typical = want.pow(2).mean(1, keepdim=True).sqrt()
    limit = torch.finfo(got.dtype).eps * torch.maximum(want.abs(), typical)
    error = (got.float() - want).abs()
    worst = divmod(int((error / limit).nan_to_num(torch.inf).argmax()), got.shape[1])
    assert (error <= limit).all(), f"{got[worst]} instead of {want[worst]} at {worst}"


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
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k", "num_sms", "stages", "schedule"), CASES)
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    tile: int,
    kind: str,
    m: int,
    n: int,
    k: int,
    num_sms: int,
    stages: int | None,
    schedule: str,
) -> None:
    gated, residual = kind == "gated", "residual" in kind
    if not gated:
        n += 8  # so that the last octets of a quad are missing
    outputs = n // 2 if gated else n
    run_on(num_sms, monkeypatch)
    run_by(schedule, stages, monkeypatch)
    dtype = FP16 if schedule else BF16
    wide_x = torch.full((m + 2, k + 24), NAN, dtype=dtype)
    wide_out = torch.full((m + 2, outputs + 16), 7.0, dtype=dtype)
    x, out = wide_x[1 : m + 1, 8 : 8 + k], wide_out[1 : m + 1, 8 : 8 + outputs]
    x.copy_(torch.randn(m, k))
    if residual:
        out.copy_(torch.randn(m, outputs))
    w = (3 * torch.randn(n, k) / k**0.5).to(dtype)
    bias = torch.randn(n).to(dtype) if "bias" in kind else None
    want = fused_product.reference(
        x.float(), w, bias, gated=gated, residual=out.clone() if residual else None
    )
    op.launch(x, w, bias, out, tile, gated, residual)
    assert_close(out, want)
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
    out = op.tall_gemm_sm90(as_if_cuda(x.to(BF16)), w.to(BF16), gated=True)
    want = fused_product.reference(x.to(BF16)[:10].float(), w, gated=True)
    torch.testing.assert_close(out[:10].float(), want, rtol=2**-8, atol=1e-30)
    assert out[10:].isnan().all()


@needs_compiler
def test_linear_takes_it_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    forget((linear,))
    run_on(132, monkeypatch)
    chosen = (Shapes(m=range(257, 300), n=range(100)),)
    monkeypatch.setattr(op, "CHOSEN", {"gated": chosen, "other": chosen})
    w, bias = (torch.randn(32, 64) / 8).to(BF16), torch.randn(32).to(BF16)
    x = torch.randn(299, 64).to(BF16)
    gpu_x = as_if_cuda(x)
    out = linear.fused_linear(gpu_x, w, gated=True).as_subclass(Tensor)
    assert_close(out, fused_product.reference(x.float(), w, gated=True))
    total = torch.randn(299, 32).to(BF16)
    want = fused_product.reference(x.float(), w, bias, residual=total)
    assert linear.fused_linear(gpu_x, w, bias, residual=total) is total
    assert_close(total, want)
    monkeypatch.setattr(linear, "rms_norm", lambda x, weight, eps: as_if_cuda(x * 2))
    out = linear.fused_linear(gpu_x, w, bias, norm_eps=1e-6).as_subclass(Tensor)
    assert_close(out, fused_product.reference(2 * x.float(), w, bias))

    def takes(
        x: Tensor,
        w: Tensor = w,
        bias: Tensor | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
    ) -> bool:
        return linear.is_for_many_rows(x, w, bias, gated, residual)

    assert takes(gpu_x)
    assert takes(gpu_x, gated=True)
    assert not takes(x), "not on a CPU"
    assert not takes(as_if_cuda(torch.zeros(300, 64, dtype=BF16)))
    assert not takes(gpu_x, w.repeat(4, 1)), "too many rows of W"
    assert not takes(gpu_x, bias=bias, gated=True)
    assert not takes(gpu_x, residual=total, gated=True)
    assert not takes(as_if_cuda(torch.zeros(299, 65, dtype=BF16))[:, 1:]), "rows at odd places"
    assert not takes(gpu_x, residual=torch.zeros(299, 33, dtype=BF16)[:, 1:])
    monkeypatch.setattr(linear, "tall", None)
    y = linear.fused_linear(x, w)  # nothing around it: a model's head
    assert torch.equal(y, torch.nn.functional.linear(x, w))
    forget((linear,))


def test_on_a_cpu_it_is_the_reference() -> None:
    x, w, bias = torch.randn(300, 24).to(BF16), torch.randn(32, 24).to(BF16), torch.randn(32)
    want = fused_product.reference(x, w, gated=True)
    assert torch.equal(op.tall_gemm_sm90(x, w, gated=True), want)
    total = torch.randn(300, 32).to(BF16)
    want = fused_product.reference(x, w, bias, residual=total)
    assert op.tall_gemm_sm90(x, w, bias, residual=total) is total
    assert torch.equal(total, want)


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
        (512, 37888, 192),
        (8192, 37888, 192),
        (1024, 9728, 128),  # 4 rounds or 5
        (4096, 9728, 192),
        (512, 3584, 128),  # 76 or 112 tiles
        (8192, 3584, 128),  # 10 rounds or 14
        (8192, 896, 128),  # 3 rounds or 4
        (2560, 896, 192),  # 1 round or 2
    ],
)
def test_the_tile_that_keeps_most_sms_busy_is_taken(m: int, n: int, tile: int) -> None:
    assert op.tile_for(m, n, HOPPER) == tile


def test_what_is_chosen_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(MODELS["Qwen2.5-7B"], arch="sm_90a")
    monkeypatch.setattr(op, "device_of", lambda index=None: HOPPER)

    def is_chosen(m: int, product: str, dtype: torch.dtype = BF16) -> bool:
        n, k = PRODUCTS[product]
        return op.is_chosen(m, n, k, product.endswith("gate_up"), dtype, None)

    monkeypatch.setattr(op, "CHOSEN", {"gated": (), "other": ()})
    assert op.specs(config) == []
    assert not any(is_chosen(8192, product) for product in PRODUCTS)
    chosen = {
        "gated": (Shapes(m=range(1024, 1 << 20), n=range(20000, 99999)),),
        "other": (Shapes(m=range(300, 1 << 20), k=range(4000, 99999)),),
    }
    monkeypatch.setattr(op, "CHOSEN", chosen)
    assert is_chosen(1024, "7B gate_up")
    assert not is_chosen(1024, "7B gate_up", torch.float32)
    assert not is_chosen(1023, "7B gate_up")
    assert not is_chosen(1024, "0.5B gate_up")
    assert is_chosen(300, "7B down")
    assert is_chosen(300, "0.5B down")
    assert not is_chosen(299, "0.5B down")
    assert not is_chosen(300, "7B o")
    kinds = [(False, True), (True, False)]
    assert op.specs(config) == [op.variant(t, BF16, *kind) for kind in kinds for t in op.TILES]
    assert op.specs(replace(config, arch="sm_89")) == []
    assert op.specs(replace(config, dtype=torch.float32)) == []
    assert op.specs(replace(MODELS["SmolLM2-135M"], arch="sm_90a")) == []
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, has_clusters=False))
    assert not is_chosen(1024, "7B gate_up"), "not on other GPUs"


def test_every_variant_compiles_without_spills_or_remarks() -> None:
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    kinds = [(True, False), (False, False), (False, True)]
    specs = [op.variant(t, d, *kind) for t in op.TILES for d in (BF16, FP16) for kind in kinds]
    jobs = [Job.of(spec.source, spec.defines, "sm_90a") for spec in specs]
    for built in build(jobs, KernelCache(), workers=len(os.sched_getaffinity(0))):
        assert built.entry.resources["tall_gemm_sm90"].spill_bytes == 0, built.lines()
        assert not built.entry.warnings, f"{built.lines()} {built.entry.warnings}"


def test_wrong_tensors_are_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on(132, monkeypatch)
    x, w = torch.randn(300, 64).to(BF16), torch.randn(32, 64).to(BF16)
    total = torch.zeros(300, 32, dtype=BF16)
    with pytest.raises(ValueError, match="multiple of 8 rows"):
        op.check(x, w[:20])
    with pytest.raises(ValueError, match="multiple of 16"):
        op.check(x, w[:24], gated=True)
    with pytest.raises(ValueError, match="multiple of 8 bfloat16"):
        op.check(x[:, :60], w[:, :60])
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        op.check(x.float(), w.float())
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 32).to(BF16).T)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(300, 100).to(BF16)[:, 3:67], w)
    with pytest.raises(ValueError, match="out"):
        op.check(x, w, None, torch.empty(300, 20, dtype=BF16)[:, :16], gated=True)
    with pytest.raises(ValueError, match="the residual is"):
        op.check(x, w, residual=total[:, :24])
    with pytest.raises(ValueError, match="the bias is"):
        op.check(x, w, torch.zeros(16, dtype=BF16))
    with pytest.raises(ValueError, match="neither bias nor residual"):
        op.check(x, w, torch.zeros(32, dtype=BF16), gated=True)
    with pytest.raises(ValueError, match="written over"):
        op.check(x, w, None, total.clone(), residual=total)
    monkeypatch.setattr(op, "device_of", lambda index=None: replace(HOPPER, has_clusters=False))
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        op.check(x, w)
