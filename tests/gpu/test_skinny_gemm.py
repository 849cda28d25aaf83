"""The few-row product against float32, and bit for bit against itself at other batch sizes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import skinny_gemm as op

BF16, FP16 = torch.bfloat16, torch.float16
NAN = float("nan")

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536), (49152, 576),
    (4608, 3584), (3584, 3584), (3584, 18944), (37888, 3584),
    (1, 8), (7, 72), (100, 200), (133, 1000), (4097, 520), (264, 64), (20000, 104),
]  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_close(got: Tensor, want: Tensor, limit: float) -> None:
    """`limit` bounds the error relative to the result's root mean square, at every element."""
    assert got.isfinite().all(), f"not finite at {(~got.isfinite()).nonzero()[:5].tolist()}"
    typical = want.float().pow(2).mean().sqrt()
    error = (got.float() - want.float()).abs() / want.float().abs().clamp_min(typical)
    worst = int(error.argmax())
    where = divmod(worst, got.shape[1])
    assert error.max() < limit, (
        f"relative error {error.max():.3g} at (row, column) {where} of {tuple(got.shape)}: "
        f"{got[where]} instead of {want[where]}; mean error {error.mean():.3g}"
    )


def limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps  # twice what rounding the result costs


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 16, 17, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.skinny_gemm(x, w, out=out) is out
    assert_close(out, x.float() @ w.float().T, limit(BF16))


@pytest.mark.parametrize("m", [1, 5, 16, 30])
@pytest.mark.parametrize(("n", "k"), [(896, 896), (3584, 3584), (133, 1000)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_bias_and_residual_in_place(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, w = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, scale=k**-0.5)
    bias, hidden = numbers(n, dtype=dtype), numbers(m, n, dtype=dtype)
    want = x.float() @ w.float().T + bias.float() + hidden.float()
    op.skinny_gemm(x, w, bias, residual=hidden, out=hidden)
    assert_close(hidden, want, limit(dtype))


@pytest.mark.parametrize("m", [1, 4, 8, 13])
@pytest.mark.parametrize(("n", "k"), [(4864, 896), (18944, 3584), (1536, 576), (29, 136)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated(m: int, n: int, k: int, normed: bool, with_bias: bool) -> None:
    x, w = numbers(m, k), numbers(2 * n, k, scale=k**-0.5)
    bias = numbers(2 * n) if with_bias else None
    norm_weight = (1 + numbers(k, scale=0.2)).to(BF16) if normed else None
    got = op.skinny_gemm(x, w, bias, gated=True, norm_weight=norm_weight, eps=1e-6)
    want = op.reference(
        x.float(),
        w.float(),
        None if bias is None else bias.float(),
        gated=True,
        norm_weight=None if norm_weight is None else norm_weight.float(),
        eps=1e-6,
    )
    # normalised: inputs are rounded once, before the product, which adds noise to small results
    assert_close(got, want, 4 * limit(BF16) if normed else limit(BF16))


@pytest.mark.parametrize("m", [1, 8, 15])
def test_normed_inputs_of_any_size(m: int) -> None:
    n, k = 1152, 896
    size = torch.logspace(-3, 3, m, device="cuda")[:, None]
    x, w = (numbers(m, k).float() * size).to(BF16), numbers(n, k, scale=k**-0.5)
    norm_weight, bias = numbers(k), numbers(n)
    got = op.skinny_gemm(x, w, bias, norm_weight=norm_weight, eps=1e-6)
    normed = F.rms_norm(x.float(), (k,), norm_weight.float(), 1e-6)
    assert_close(got, normed @ w.float().T + bias.float(), 4 * limit(BF16))


@pytest.mark.parametrize(("n", "k"), [(896, 4864), (4608, 3584), (133, 1000)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_row_is_the_same_in_every_batch(n: int, k: int, fused: bool) -> None:
    x, w = numbers(32, k), numbers(2 * n if fused else n, k, scale=k**-0.5)
    norm_weight = numbers(k) if fused else None

    def product(rows: Tensor) -> Tensor:
        return op.skinny_gemm(rows, w, gated=fused, norm_weight=norm_weight, eps=1e-6)

    want = product(x)
    for m in range(1, 32):
        start = 7 * m % (33 - m)
        got = product(x[start : start + m])
        same = (got == want[start : start + m]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


def test_other_rows_and_their_nan_do_not_matter() -> None:
    w = numbers(896, 896, scale=1 / 30)
    x = numbers(5, 896)
    want = op.skinny_gemm(x, w)
    x[[0, 2, 4]] = NAN
    got = op.skinny_gemm(x, w)
    assert torch.equal(got[[1, 3]], want[[1, 3]])
    assert got[[0, 2, 4]].isnan().all()


def test_strided_rows() -> None:
    wide, hidden = numbers(6, 2000), numbers(6, 512)
    w = numbers(256, 896, scale=1 / 30)
    x, residual, out = wide[:, 40 : 40 + 896], hidden[:, :256], torch.full_like(hidden, NAN)
    op.skinny_gemm(x, w, residual=residual, out=out[:, :256])
    assert_close(out[:, :256], x.float() @ w.float().T + residual.float(), limit(BF16))
    assert out[:, 256:].isnan().all()


def test_a_graph_sees_new_data_at_replay(
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    x, w, hidden = numbers(4, 3584), numbers(3584, 3584, scale=1 / 60), numbers(4, 3584)

    def three_layers() -> None:  # each waits for the one before
        for _ in range(3):
            op.skinny_gemm(x, w, residual=hidden, out=hidden)

    replay = graph_replay(three_layers)
    for _ in range(2):
        x.copy_(numbers(4, 3584))
        w.copy_(numbers(3584, 3584, scale=1 / 60))
        hidden.copy_(numbers(4, 3584))
        want = hidden.float() + 3 * (x.float() @ w.float().T)
        replay()
        assert_close(hidden, want, 3 * limit(BF16))


def test_linear_takes_the_kernel_for_few_rows_and_the_library_for_many() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (1, 16, 33, 100):
        x = numbers(m, 896)
        got = op.linear_cuda(x, w, bias)
        assert_close(got, x.float() @ w.float().T + bias.float(), 2 * limit(BF16))
        library = F.linear(x, w, bias)
        kernel = op.skinny_gemm(x, w, bias) if m <= op.MAX_ROWS else library
        assert torch.equal(got, kernel if m <= op.DISPATCH_ROWS else library)
    odd = numbers(3, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(op.linear_cuda(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))
