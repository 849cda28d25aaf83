"""The few-row product in the emulator, through its launcher, with SMs made scarce to get many tiles."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product
from engine.ops import skinny_gemm as op
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.models import MODELS

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16
LARGE, SMALL = 227 * 1024, 99 * 1024  # shared memory of a block: data center and gaming GPUs
EPS = 1e-5


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(op):
        yield


def scarce(monkeypatch: pytest.MonkeyPatch, num_sms: int, smem_limit: int = LARGE) -> None:
    monkeypatch.setattr(op, "device_limits", lambda device=None: (num_sms, smem_limit))
    op.prepare.cache_clear()


def numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def assert_rounded(got: Tensor, want: Tensor) -> None:
    """`got` is float32's `want`, rounded once: by half a unit of the last place, and by float32's noise."""
    typical = want.pow(2).mean().sqrt()
    allowed = 0.501 * torch.finfo(got.dtype).eps * want.abs() + 1e-5 * typical
    excess = (got.float() - want).abs() - allowed
    where = divmod(int(excess.nan_to_num(1e9).argmax()), got.shape[1])
    assert (excess <= 0).all(), f"{got[where]} instead of {want[where]} at (row, column) {where}"


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "options", "num_sms"),
    [
        (1, 37, 104, BF16, "", 3),
        (8, 101, 640, FP16, "", 1),
        (3, 60, 1160, BF16, "bias normed", 2),
        (8, 37, 576, FP16, "residual", 6),
        (5, 41, 1544, BF16, "bias residual", 1),
        (8, 240, 896, BF16, "normed gated", 2),
        (2, 80, 576, FP16, "bias normed gated", 2),
        (7, 32, 8, BF16, "gated", 1),
        (8, 176, 3080, BF16, "bias normed gated residual", 3),
        (13, 112, 136, FP16, "bias normed gated residual", 1),
        (17, 33, 72, FP16, "bias normed residual", 2),
        (32, 70, 200, BF16, "normed residual", 1),
    ],
)
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    options: str,
    num_sms: int,
) -> None:
    scarce(monkeypatch, num_sms)
    gated, norm_eps = "gated" in options, EPS if "normed" in options else None
    outputs = n // 2 if gated else n
    sizes = torch.logspace(-1, 1, m)[:, None]
    x = (torch.randn(m, k + 24) * sizes).to(dtype)[:, 8 : 8 + k]
    w = numbers(n, k, dtype=dtype, scale=k**-0.5)
    bias = numbers(n, dtype=dtype) if "bias" in options else None
    residual = numbers(m, outputs + 5, dtype=dtype)[:, :outputs] if "residual" in options else None
    want = fused_product.reference(
        x.float(), w.float(), None if bias is None else bias.float(),
        norm_eps=norm_eps, gated=gated, residual=None if residual is None else residual.float(),
    )  # fmt: skip
    out = torch.full((m, outputs), torch.nan, dtype=dtype) if residual is None else residual
    op.launch(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual)
    assert_rounded(out, want)


@pytest.mark.parametrize(
    ("m", "n", "k", "options"), [(3, 101, 640, ""), (13, 112, 136, "bias normed gated residual")]
)
def test_float32_results_are_not_rounded(
    monkeypatch: pytest.MonkeyPatch, m: int, n: int, k: int, options: str
) -> None:
    scarce(monkeypatch, 2)
    gated, norm_eps = "gated" in options, EPS if "normed" in options else None
    outputs = n // 2 if gated else n
    x, w = numbers(m, k, dtype=BF16), numbers(n, k, dtype=BF16, scale=k**-0.5)
    bias = numbers(n, dtype=BF16) if "bias" in options else None
    residual = numbers(m, outputs, dtype=BF16) if "residual" in options else None
    wide = torch.full((m, outputs + 3), torch.nan)
    out = wide[:, :outputs]
    op.check(x, w, bias, out, gated, residual)
    op.launch(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=residual)
    want = fused_product.reference(
        x.float(), w, bias, norm_eps=norm_eps, gated=gated, residual=residual
    )
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    assert wide[:, outputs:].isnan().all()


def test_plans_with_and_without_keeping_x_and_of_all_heights_are_among_these_cases() -> None:
    cases = [(101, 640, 1), (37, 576, 6), (41, 1544, 1), (240, 896, 2), (176, 3080, 3)]
    plans = [
        op.make_plan(op.Product(1, n, k, gated=n % 16 == 0), sms, LARGE) for n, k, sms in cases
    ]
    tiles = [plan.tiles for plan in plans if plan is not None]
    assert {t.x_chunks > 0 for t in tiles} == {False, True}
    assert {t.eights % 2 for t in tiles} == {0, 1}
    assert {t.refills for t in tiles} == {False, True}
    assert any(plan is not None and plan.larger_blocks > 0 for plan in plans)


def test_a_row_does_not_depend_on_the_batch_or_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(17, 200).to(BF16), torch.randn(48, 200).to(BF16)
    results = []
    for num_sms, smem_limit, m in [(1, LARGE, 17), (3, LARGE, 9), (2, SMALL, 5), (7, LARGE, 1)]:
        scarce(monkeypatch, num_sms, smem_limit)
        out = torch.empty(m, 24, dtype=BF16)
        op.launch(x[:m], w, None, out, norm_eps=EPS, gated=True)
        results.append(out)
    for out in results[1:]:
        assert torch.equal(out, results[0][: len(out)])


def test_other_rows_and_their_nan_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce(monkeypatch, 2)
    x, w = numbers(4, 136, dtype=BF16), numbers(37, 136, dtype=BF16)
    want, got = torch.empty(4, 37, dtype=BF16), torch.empty(4, 37, dtype=BF16)
    op.launch(x, w, None, want, norm_eps=EPS)
    x[[0, 2]] = torch.nan
    op.launch(x, w, None, got, norm_eps=EPS)
    assert torch.equal(got[[1, 3]], want[[1, 3]])
    assert got[[0, 2]].isnan().all()


@pytest.mark.parametrize("num_sms", [7, 108, 128, 132])
@pytest.mark.parametrize("smem_limit", [SMALL, 163 * 1024, LARGE])
def test_plans_cover_all_rows_within_memory(num_sms: int, smem_limit: int) -> None:
    for n in (1, 16, 576, 896, 1152, 3584, 4608, 9728, 37888, 151936, 152064):
        for k in (8, 64, 896, 4864, 18944):
            for gated in (False, True):
                if gated and n % 16:
                    continue
                for columns, normed in [(1, False), (1, True), (2, True)]:
                    product = op.Product(columns, n, k, gated, normed)
                    plan = op.make_plan(product, num_sms, smem_limit)
                    assert plan is not None
                    assert plan.tiles.smem_bytes <= smem_limit
                    assert plan.tiles.stages > plan.tiles.refills
                    assert plan.grid <= num_sms
                    units = plan.grid * plan.block_units + plan.larger_blocks
                    assert units * product.unit == n
                    assert 0 <= plan.larger_blocks < plan.grid
                    assert plan.block_units > 0
                    assert plan.tile_rows % product.unit == 0
                    assert 0 < plan.tile_rows <= 8 * plan.tiles.eights <= 48
                    assert plan.tiles.x_chunks in (0, product.warp_chunks)


def test_small_products_leave_memory_to_the_next_kernel() -> None:
    config = MODELS["Qwen2.5-0.5B fp16"]
    for product in op.decoder_products(config):
        if product.n == config.vocab_size:
            continue
        plan = op.make_plan(product, *op.H200)
        assert plan is not None
        assert 2 * (plan.tiles.smem_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_what_is_compiled_ahead_serves_every_card_of_an_architecture(arch: str) -> None:
    smem_limit = op.SMEM_LIMITS.get(arch, op.LEAST_SMEM_LIMIT)
    for n in (16, 576, 1152, 3584, 37888, 152064):
        product = op.Product(1, n, 896, gated=n == 37888, normed=n == 37888)
        ahead = op.possible_tiles(arch, product)
        for num_sms in (20, 58, 108, 114, 132, 142):
            plan = op.make_plan(product, num_sms, smem_limit)
            assert plan is not None
            assert plan.tiles in ahead


def test_macros_determine_the_memory() -> None:
    """As a kernel's limit is set once for each binary."""
    sizes: dict[tuple[tuple[str, object], ...], int] = {}
    for config in MODELS.values():
        for spec in op.specs(replace(config, arch="sm_90a")):
            key = tuple(sorted(spec.defines.items()))
            assert sizes.setdefault(key, spec.smem_bytes) == spec.smem_bytes


def test_specs_are_what_a_decoder_launches() -> None:
    config = MODELS["Qwen2.5-7B"]
    specs = op.specs(config)
    h, i = config.hidden_size, config.intermediate_size
    attention = config.num_heads * config.head_dim
    qkv = attention + 2 * config.num_kv_heads * config.head_dim
    launched = [(qkv, h, False, True), (h, attention, False, False), (2 * i, h, True, True),
                (h, i, False, False), (config.vocab_size, h, False, False)]  # fmt: skip
    for m in range(1, op.DISPATCH_ROWS + 1):
        for n, k, gated, normed in launched:
            float_out = n == config.vocab_size
            product = op.Product(op.column_tiles_for(m), n, k, gated, normed, float_out)
            plan = op.make_plan(product, *op.H200)
            assert plan is not None
            assert op.variant(product, plan.tiles, config.dtype) in specs


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(4, 64).to(BF16), torch.randn(24, 64).to(BF16)

    def check(
        x: Tensor, w: Tensor, bias: Tensor | None = None, out: Tensor | None = None,
        gated: bool = False, residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        op.check(x, w, bias, out, gated, residual)

    check(x, w, w[:, 0].contiguous(), numbers(4, 24, dtype=BF16))
    with pytest.raises(ValueError, match="1 to 32 rows"):
        check(torch.randn(33, 64).to(BF16), w)
    with pytest.raises(ValueError, match=r"contiguous \[N, 64\]"):
        check(x, torch.randn(64, 24).to(BF16).T)
    with pytest.raises(ValueError, match="16 bytes"):
        check(torch.randn(4, 100).to(BF16)[:, 3:67], w)
    with pytest.raises(ValueError, match="multiple of 16"):
        check(x, w, gated=True)
    with pytest.raises(ValueError, match=r"bias is \(24,\)"):
        check(x, w, torch.randn(24))
    with pytest.raises(ValueError, match=r"residual is \(4, 25\)"):
        check(x, w, residual=numbers(4, 25, dtype=BF16))
    with pytest.raises(ValueError, match=r"out is \(4, 24\)"):
        check(x, w, out=numbers(24, 4, dtype=BF16).T)
