"""Products of few rows with rows that are as large, small or broken as they can be, in the emulator.

Each row's result is that of float32, and no row spoils another.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, narrow_gemm, skinny_gemm, wide_gemm_sm90
from engine.ops.hopper import Device
from tests.kernels import emulator
from tests.kernels.emulator import emulated, emulated_map

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16
SMALL_HOPPER = Device(4, 227 * 1024, has_clusters=True)
N, K = 96, 328
EPS = 1e-6


def by_skinny(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, gated: bool) -> None:
    skinny_gemm.launch(x, w, bias, out, norm_eps=EPS, gated=gated)


def by_narrow(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, gated: bool) -> None:
    plan = narrow_gemm.make_plan(2, N, K, SMALL_HOPPER, gated)
    assert plan is not None
    narrow_gemm.launch(x, w, bias, out, plan, EPS)


def by_wide(x: Tensor, w: Tensor, bias: Tensor, out: Tensor, gated: bool) -> None:
    plan = wide_gemm_sm90.make_plan(64, N, K, SMALL_HOPPER, gated)
    wide_gemm_sm90.launch(x, w, bias, out, plan, EPS)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(wide_gemm_sm90, "tensor_map", emulated_map)
    monkeypatch.setattr(skinny_gemm, "device_limits", lambda device=None: (3, 227 * 1024))
    skinny_gemm.prepare.cache_clear()
    with emulated(skinny_gemm, narrow_gemm, wide_gemm_sm90):
        yield
    skinny_gemm.prepare.cache_clear()


def extreme_rows(dtype: torch.dtype) -> Tensor:
    """[8, K]: plain rows between the largest, the smallest, nothing, and what is no number."""
    x = torch.randn(8, K)
    largest = torch.finfo(dtype).max if dtype is FP16 else 1e18  # whose square float32 holds
    x[1] = largest * torch.randint(0, 2, (K,)).mul(2).sub(1)
    x[2] *= 1e-6  # subnormal in float16; eps counts more than its square
    x[3] = 0
    x[5, 7] = torch.inf
    x[6, 9] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("launch", [by_skinny, by_narrow, by_wide])
def test_rows_of_all_sizes(
    launch: Callable[[Tensor, Tensor, Tensor, Tensor, bool], None], dtype: torch.dtype, gated: bool
) -> None:
    x, w = extreme_rows(dtype), (torch.randn(N, K) / K**0.5).to(dtype)
    bias = torch.randn(N).to(dtype)
    want = fused_product.reference(x.float(), w, bias, norm_eps=EPS, gated=gated)
    assert want.isfinite().all(1).tolist() == [True] * 5 + [False] * 2 + [True]
    out = torch.zeros(8, N // 2 if gated else N, dtype=dtype)
    launch(x, w, bias, out, gated)
    assert not out[5:7].isfinite().any()
    finite = [0, 1, 2, 3, 4, 7]
    # beyond half an eps for rounding: sums in another order, the tensor cores' and fast functions
    limit = torch.finfo(dtype).eps * want.abs().clamp_min(0.3)
    excess = ((out.float() - want).abs() / limit)[finite]
    assert (excess <= 1).all(), f"{float(excess.max())} of what is allowed, by row {excess.amax(1)}"
