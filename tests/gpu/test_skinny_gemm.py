"""The few-row product against float32, and bit for bit against itself at other batch sizes."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import fused_product, jit
from engine.ops import skinny_gemm as op
from engine.ops.linear import linear
from tests.gpu.conftest import Record
from tests.gpu.product_cases import (
    BF16,
    FP16,
    NAN,
    assert_close,
    limit,
    numbers,
    reference,
)

# (N, K): linear layers of Qwen2.5-0.5B, SmolLM2-135M and Qwen2.5-7B, then shapes that fit nothing
SHAPES = [
    (1152, 896), (896, 896), (9728, 896), (896, 4864), (960, 576), (576, 1536), (49152, 576),
    (4608, 3584), (3584, 3584), (3584, 18944), (37888, 3584),
    (1, 8), (7, 72), (100, 200), (133, 1000), (4097, 520), (264, 64), (20000, 104),
]  # fmt: skip
PLAIN_ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 32)
# rows of x, rows of W, columns, dtype, options
FusedCase = tuple[tuple[int, ...], int, int, torch.dtype, str]
# As a decoder launches them, and all together
OPTIONS = ["", "normed", "bias normed", "residual", "bias residual", "normed gated", "bias normed gated",
           "gated", "bias normed gated residual"]  # fmt: skip
FUSED_CASES: list[FusedCase] = [
    *[((1, 2, 5, 8), n, k, BF16, options)
      for n, k in [(1152, 896), (9728, 896), (896, 4864), (37888, 3584), (7760, 2056), (48, 72)]
      for options in OPTIONS],
    *[((1, 7, 13, 30), n, k, FP16, options)
      for n, k in [(1152, 896), (9728, 896), (48, 72)]
      for options in OPTIONS],
    # Around those that divide evenly among the blocks of an H200, and into tiles
    *[((3,), n, 584, BF16, options)
      for n in (1, 2, 131, 132, 133, 1055, 1056, 1057, 4223, 4224, 4225)
      for options in ("", "bias normed residual")],
    *[((4,), 16 * groups, k, BF16, "bias normed gated")
      for groups in (1, 2, 131, 132, 133, 395, 396, 397, 660)
      for k in (8, 896, 2048, 3584)],
]  # fmt: skip
EPS = 1e-6


def assert_fused(m: int, n: int, k: int, dtype: torch.dtype, options: str) -> None:
    """Rows of x of very different sizes if they are normed; out is the residual, if there is one."""
    gated, norm_eps = "gated" in options, EPS if "normed" in options else None
    outputs = n // 2 if gated else n
    size = torch.logspace(-2, 2, m, device="cuda")[:, None] if norm_eps is not None else 1.0
    x = (numbers(m, k).float() * size).to(dtype)
    w = numbers(n, k, dtype=dtype, scale=k**-0.5)
    bias = numbers(n, dtype=dtype) if "bias" in options else None
    hidden = numbers(m, outputs, dtype=dtype) if "residual" in options else None
    want = reference(x, w, bias, norm_eps=norm_eps, gated=gated, residual=hidden)
    out = torch.full((m, outputs), NAN, dtype=dtype, device="cuda") if hidden is None else hidden
    got = op.skinny_gemm(x, w, bias, out, norm_eps=norm_eps, gated=gated, residual=hidden)
    assert got is out
    assert_close(got, want, limit(dtype))


def specs_of(cases: list[FusedCase]) -> Iterator[jit.VariantSpec]:
    for rows, n, k, dtype, options in cases:
        for columns in {op.column_tiles_for(m) for m in rows}:
            product = op.Product(columns, n, k, "gated" in options, "normed" in options)
            plan = op.make_plan(product, *op.device_limits())
            assert plan is not None
            yield op.variant(product, plan.tiles, dtype)


@pytest.fixture(scope="module")
def compiled() -> None:
    """All variants of these cases, by several processes."""
    plain: list[FusedCase] = [(PLAIN_ROWS, n, k, BF16, "") for n, k in SHAPES]
    jit.prebuild([*specs_of(plain), *specs_of(FUSED_CASES)])


@pytest.mark.parametrize("m", PLAIN_ROWS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.usefixtures("compiled")
def test_plain(m: int, n: int, k: int) -> None:
    x, w = numbers(m, k), numbers(n, k, scale=k**-0.5)
    out = torch.full((m, n), NAN, dtype=BF16, device="cuda")
    assert op.skinny_gemm(x, w, out=out) is out
    assert_close(out, x.float() @ w.float().T, limit(BF16))


@pytest.mark.parametrize(
    ("rows", "n", "k", "dtype", "options"), FUSED_CASES, ids=lambda v: str(v).replace(" ", "-")
)
@pytest.mark.usefixtures("compiled")
def test_fused(rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, options: str) -> None:
    for m in rows:
        assert_fused(m, n, k, dtype, options)


@pytest.mark.parametrize("m", [1, 8, 15])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_normed_inputs_of_any_size(m: int, dtype: torch.dtype) -> None:
    n, k = 1152, 896
    size = torch.logspace(-3, 3, m, device="cuda")[:, None]
    x = (numbers(m, k).float() * size).to(dtype)
    w, norm_weight, bias = numbers(n, k, scale=k**-0.5), numbers(k), numbers(n, dtype=dtype)
    folded = fused_product.fold_norm(w.to(dtype), norm_weight.to(dtype))
    got = op.skinny_gemm(x, folded, bias, norm_eps=EPS)
    normed = F.rms_norm(x.float(), (k,), None, EPS)
    assert_close(got, normed @ folded.float().T + bias.float(), limit(dtype))


def test_the_largest_numbers_of_float16_are_normed() -> None:
    x = torch.full((2, 896), 60000.0, dtype=FP16, device="cuda")
    w = numbers(64, 896, dtype=FP16, scale=1 / 30)
    got = op.skinny_gemm(x, w, norm_eps=EPS)
    assert_close(got, w.float().sum(1).expand(2, -1), limit(FP16))


@pytest.mark.parametrize(("n", "k"), [(896, 4864), (4608, 3584), (144, 1000), (9728, 896)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_row_is_the_same_in_every_batch(n: int, k: int, fused: bool) -> None:
    x, w = numbers(32, k), numbers(n, k, scale=k**-0.5)
    residual = numbers(32, n // 2) if fused else None

    def product(rows: slice) -> Tensor:
        added = None if residual is None else residual[rows]
        return op.skinny_gemm(
            x[rows], w, gated=fused, norm_eps=EPS if fused else None, residual=added
        )

    want = product(slice(0, 32))
    for m in range(1, 32):
        start = 7 * m % (33 - m)
        rows = slice(start, start + m)
        same = (product(rows) == want[rows]).all(1)
        assert same.all(), f"M = {m}: rows {(~same).nonzero().flatten().tolist()} differ"


def test_other_rows_and_their_nan_do_not_matter() -> None:
    w = numbers(896, 896, scale=1 / 30)
    x = numbers(5, 896)
    want = op.skinny_gemm(x, w, norm_eps=EPS)
    x[[0, 2, 4]] = NAN
    got = op.skinny_gemm(x, w, norm_eps=EPS)
    assert torch.equal(got[[1, 3]], want[[1, 3]])
    assert got[[0, 2, 4]].isnan().all()


def test_strided_rows() -> None:
    wide, hidden = numbers(6, 2000), numbers(6, 512)
    w = numbers(256, 896, scale=1 / 30)
    x, residual, out = wide[:, 40 : 40 + 896], hidden[:, :256], torch.full_like(hidden, NAN)
    op.skinny_gemm(x, w, residual=residual, out=out[:, :256])
    assert_close(out[:, :256], x.float() @ w.float().T + residual.float(), limit(BF16))
    assert out[:, 256:].isnan().all()


@pytest.mark.parametrize("m", [1, 4, 8])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("hidden_size", "inner"), [(896, 4864), (3584, 1024)])
def test_a_graph_of_layers_sees_new_data_at_replay(
    graph_replay: Record,
    m: int,
    early: bool,
    hidden_size: int,
    inner: int,
) -> None:
    """Each product needs the one before. With and without an early start of the kernels, the same bits."""
    hidden, start = numbers(m, hidden_size), numbers(m, hidden_size)
    gate_up = numbers(2 * inner, hidden_size, scale=hidden_size**-0.5)
    down = numbers(hidden_size, inner, scale=inner**-0.5)
    bias = numbers(2 * inner)

    def three_layers() -> None:
        torch.mul(start, 1, out=hidden)  # a kernel, as in a model's graph; not a copy
        for _ in range(3):
            gated = op.skinny_gemm(hidden, gate_up, bias, norm_eps=EPS, gated=True)
            op.skinny_gemm(gated, down, out=hidden, residual=hidden)

    three_layers()  # loads the kernels
    with jit.dependent_launches() if early else nullcontext():
        replay = graph_replay(three_layers)
    for _ in range(3):
        start.copy_(numbers(m, hidden_size))
        gate_up.copy_(numbers(2 * inner, hidden_size, scale=hidden_size**-0.5))
        bias.copy_(numbers(2 * inner))
        three_layers()
        want = hidden.clone()
        for _ in range(20):
            replay()
            differs = (hidden != want).nonzero()
            assert len(differs) == 0, f"{len(differs)} differ, first at {differs[:5].tolist()}"
        wide = start.float()
        for _ in range(3):
            gated = reference(wide, gate_up, bias, norm_eps=EPS, gated=True)
            wide = wide + gated.to(BF16).float() @ down.float().T
        assert_close(hidden, wide, 8 * limit(BF16))  # rounded six times, and differences grow


def test_a_graph_in_which_every_product_reads_and_adds_to_what_the_last_one_wrote(
    graph_replay: Record,
) -> None:
    x, w, hidden = numbers(4, 3584), numbers(3584, 3584, scale=1 / 60), numbers(4, 3584)

    def three_products() -> None:
        for _ in range(3):
            op.skinny_gemm(x, w, out=hidden, residual=hidden)

    three_products()
    with jit.dependent_launches():
        replay = graph_replay(three_products)
    for _ in range(2):
        x.copy_(numbers(4, 3584))
        w.copy_(numbers(3584, 3584, scale=1 / 60))
        hidden.copy_(numbers(4, 3584))
        want = hidden.float() + 3 * (x.float() @ w.float().T)
        replay()
        assert_close(hidden, want, 3 * limit(BF16))


def test_linear_takes_the_kernel_for_few_rows() -> None:
    w, bias = numbers(896, 896, scale=1 / 30), numbers(896)
    for m in (1, op.DISPATCH_ROWS):
        x = numbers(m, 896)
        assert torch.equal(linear(x, w, bias), op.skinny_gemm(x, w, bias))
    odd = numbers(3, 900)[:, 1:897]  # rows that start between multiples of 16 bytes
    assert_close(linear(odd, w), odd.float() @ w.float().T, 2 * limit(BF16))
