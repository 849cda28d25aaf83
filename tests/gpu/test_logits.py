"""A model's head on a GPU gives float32 logits that were never rounded to 16 bits, whoever computes it."""

import pytest
import torch

from engine.ops import narrow_gemm, skinny_gemm, wide_gemm_sm90
from engine.ops.hopper import device_of
from engine.ops.linear import kernel_for, linear_float32
from tests.gpu.conftest import Record
from tests.gpu.product_cases import BF16, FP16, NAN, assert_close, numbers

ROWS = (1, 3, 8, 9, 16, 17, 64, 300)
# sums of thousands of products in another order; a rounding to bfloat16 costs up to 4e-3
LIMIT = 2e-4


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("vocab_size", "hidden"), [(49_152, 576), (32_000, 4096), (1002, 72)])
def test_logits_are_exact(vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
    w = numbers(vocab_size, hidden, dtype=dtype, scale=hidden**-0.5)
    used = set()
    for m in ROWS:
        x = numbers(m, hidden, dtype=dtype)
        used.add(kernel_for(x, w))
        want = x.double() @ w.double().T
        fresh = linear_float32(x, w)
        assert fresh.dtype is torch.float32
        assert_close(fresh, want, LIMIT)
        place = torch.full((m + 1, vocab_size), NAN, device="cuda")
        assert linear_float32(x, w, place[:m]).data_ptr() == place.data_ptr()
        assert torch.equal(place[:m], fresh)
        assert place[m].isnan().all(), f"{m} rows: wrote behind the result"
    ours = {skinny_gemm.skinny_gemm}
    if device_of().has_clusters:  # the small W is narrow_gemm's
        is_small = vocab_size == 1002
        ours.add(narrow_gemm.narrow_gemm if is_small else wide_gemm_sm90.wide_gemm_sm90)
    assert used == {None, *ours}


@pytest.mark.parametrize("m", [4, 12, 40])
def test_in_a_graph(m: int, graph_replay: Record) -> None:
    x, w = numbers(m, 576), numbers(49_152, 576, scale=1 / 24)
    out = torch.empty(m, 49_152, device="cuda")
    linear_float32(x, w, out)  # loads the kernel
    replay = graph_replay(lambda: linear_float32(x, w, out))
    for _ in range(2):
        x.copy_(numbers(m, 576))
        out.fill_(NAN)
        replay()
        assert_close(out, x.double() @ w.double().T, LIMIT)


def test_float32_models_have_their_own() -> None:
    x, w = torch.randn(5, 96, device="cuda"), torch.randn(200, 96, device="cuda")
    assert_close(linear_float32(x, w), x.double() @ w.double().T, 1e-3)
