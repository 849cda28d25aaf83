"""The few-row product in the emulator, through its launcher, with SMs made scarce to get many tiles."""

from collections.abc import Iterator

import pytest
import torch

from engine.ops import skinny_gemm as op
from tests.kernels import emulator
from tests.kernels.emulator import emulated

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16
LARGE, SMALL = 227 * 1024, 99 * 1024  # shared memory of a block: data center and gaming GPUs


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(op):
        yield


def scarce(monkeypatch: pytest.MonkeyPatch, num_sms: int, smem_limit: int = LARGE) -> None:
    monkeypatch.setattr(op, "device_limits", lambda device=None: (num_sms, smem_limit))
    op.prepare.cache_clear()


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "gated", "normed", "num_sms"),
    [
        (1, 37, 104, BF16, False, False, 3),
        (8, 101, 640, FP16, False, False, 1),
        (3, 60, 576, BF16, True, False, 2),
        (13, 29, 136, BF16, True, True, 1),
        (17, 33, 72, FP16, False, False, 2),
    ],
)
def test_against_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    gated: bool,
    normed: bool,
    num_sms: int,
) -> None:
    scarce(monkeypatch, num_sms)
    x = torch.randn(m, k + 24).to(dtype)[:, 8 : 8 + k]
    w = (torch.randn(n * (1 + gated), k) / k**0.5).to(dtype)
    bias, residual = torch.randn(len(w)).to(dtype), torch.randn(m, n).to(dtype)
    norm_weight = torch.rand(k).to(dtype) if normed else None
    out = residual.clone()
    op.launch(x, w, bias, out, out, gated, norm_weight, 1e-5)
    want = op.reference(x, w, bias, residual, gated=gated, norm_weight=norm_weight, eps=1e-5)
    error = (out.float() - want.float()).norm() / want.float().norm()
    # normalised inputs are rounded at another place than in the reference
    assert error < (4e-3 if normed else 1e-4), f"relative error {error:.3g}"


def test_a_row_does_not_depend_on_the_batch_or_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(17, 200).to(BF16), torch.randn(40, 200).to(BF16)
    results = []
    for num_sms, smem_limit, m in [(1, LARGE, 17), (3, LARGE, 9), (2, SMALL, 5), (7, LARGE, 1)]:
        scarce(monkeypatch, num_sms, smem_limit)
        out = torch.empty(m, 40, dtype=BF16)
        op.launch(x[:m], w, None, None, out, False, None, 0.0)
        results.append(out)
    for out in results[1:]:
        assert torch.equal(out, results[0][: len(out)])


@pytest.mark.parametrize("num_sms", [108, 128, 132])
@pytest.mark.parametrize("smem_limit", [SMALL, 163 * 1024, LARGE])
def test_plans_cover_all_outputs_within_memory(num_sms: int, smem_limit: int) -> None:
    for n in (1, 576, 896, 1152, 3584, 4608, 9728, 37888, 151936, 152064):
        for column_tiles in (1, 2):
            for gated in (False, True):
                plan = op.make_plan(column_tiles, n, gated, False, num_sms, smem_limit)
                assert plan is not None
                assert plan.tiles.smem_bytes <= smem_limit
                assert plan.grid <= num_sms
                assert (plan.grid - 1) * plan.block_rows < n <= plan.grid * plan.block_rows
                assert plan.tile_rows <= plan.tiles.row_tiles * (8 if gated else 16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_what_is_compiled_ahead_serves_every_card_of_an_architecture(arch: str) -> None:
    smem_limit = op.SMEM_LIMITS.get(arch, op.LEAST_SMEM_LIMIT)
    for n in (1, 576, 1152, 3584, 37888, 152064):
        ahead = op.possible_tiles(arch, 1, n, False, False)
        for num_sms in (20, 58, 108, 114, 132, 142):
            plan = op.make_plan(1, n, False, False, num_sms, smem_limit)
            assert plan is not None
            assert plan.tiles in ahead


def test_wrong_tensors_are_refused_with_a_remedy() -> None:
    x, w = torch.randn(4, 64).to(BF16), torch.randn(8, 64).to(BF16)
    with pytest.raises(ValueError, match="1 to 32 rows"):
        op.check(torch.randn(33, 64).to(BF16), w, None, False)
    with pytest.raises(ValueError, match="contiguous"):
        op.check(x, torch.randn(64, 8).to(BF16).T, None, False)
    with pytest.raises(ValueError, match="16 bytes"):
        op.check(torch.randn(4, 100).to(BF16)[:, 3:67], w, None, False)
    with pytest.raises(ValueError, match="bfloat16"):
        op.check(x.half(), w.half(), None, True)
