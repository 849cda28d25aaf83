"""The product of many rows on Hopper against float32: both tiles, all that is done to the result, ragged sizes,
graphs, and the same bits each time. Waits that never end are turned into errors.

Results are as exact as bfloat16 or float16 can say them: errors stay below twice what rounding costs.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, jit, linear
from engine.ops import tall_gemm_sm90 as op
from engine.ops.rms_norm import rms_norm
from tests.gpu.test_skinny_gemm import BF16, FP16, NAN, assert_close, limit, numbers

ROWS = (257, 300, 511, 512, 1000, 2049)
EPS = 1e-6
KINDS = ("gated", "plain", "bias", "residual", "bias residual")
GATE_UP = {"7B": (37888, 3584), "0.5B": (9728, 896)}  # rows of W, columns
SHAPES = {
    "gated": [*GATE_UP.values(), (1040, 1096), (16, 8), (528, 72)],
    "plain": [(1152, 896), (520, 72)],
    "bias": [(4608, 3584), (1152, 896), (1032, 1096), (8, 8)],
    "residual": [(3584, 18944), (3584, 3584), (896, 896), (520, 72)],
    "bias residual": [(896, 4864), (1032, 1096), (8, 8)],
}
variant_of_product = op.variant


def trapping(
    tile: int, dtype: torch.dtype, gated: bool = False, residual: bool = False
) -> jit.VariantSpec:
    spec = variant_of_product(tile, dtype, gated, residual)
    return replace(spec, defines={**spec.defines, "SLUICE_TRAP": 1})


@pytest.fixture(scope="module")
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    kinds = [(True, False), (False, False), (False, True)]
    jit.prebuild([trapping(t, d, *kind) for t in op.TILES for d in (BF16, FP16) for kind in kinds])


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if not torch.cuda.is_available() or jit.device_arch() != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    request.getfixturevalue("compiled")
    monkeypatch.setattr(op, "variant", trapping)
    op.load.cache_clear()
    yield
    op.load.cache_clear()


class Case:
    """A product of one kind: its tensors but for x, and what it should give."""

    def __init__(self, kind: str, n: int, k: int, dtype: torch.dtype = BF16) -> None:
        self.gated, self.has_residual = kind == "gated", "residual" in kind
        self.w = numbers(n, k, dtype=dtype, scale=k**-0.5)
        self.bias = numbers(n, dtype=dtype) if "bias" in kind else None
        self.outputs = n // 2 if self.gated else n

    def out(self, m: int) -> Tensor:
        """What the result is written over: the residual, or no numbers."""
        out = numbers(m, self.outputs, dtype=self.w.dtype)
        return out if self.has_residual else out.fill_(NAN)

    def want(self, x: Tensor, before: Tensor) -> Tensor:
        """In float32. `before`: of `out`."""
        residual = before if self.has_residual else None
        return fused_product.reference(
            x.float(), self.w, self.bias, gated=self.gated, residual=residual
        )

    def launch(self, x: Tensor, out: Tensor, tile: int) -> Tensor:
        op.launch(x, self.w, self.bias, out, tile, self.gated, self.has_residual)
        return out


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    differing = (got != want).nonzero()
    assert len(differing) == 0, (
        f"{what}: {len(differing)} numbers differ, first at {differing[:5].tolist()}"
    )


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize(("kind", "n", "k"), [(kind, *nk) for kind in KINDS for nk in SHAPES[kind]])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_against_float32(tile: int, kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    case = Case(kind, n, k, dtype)
    for m in ROWS if k > 72 else (1, *ROWS):
        x, out = numbers(m, k, dtype=dtype), case.out(m)
        want = case.want(x, out.clone())
        try:
            assert_close(case.launch(x, out, tile), want, limit(dtype))
        except AssertionError as error:
            raise AssertionError(f"M = {m}: {error}") from None


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", ROWS)
def test_nothing_beside_the_result_is_read_or_written(tile: int, kind: str, m: int) -> None:
    case, k = Case(kind, 1040, 904), 904
    wide_x = torch.full((m + 300, k + 48), NAN, dtype=BF16, device="cuda")
    wide_out = torch.full((m + 300, case.outputs + 24), 7.0, dtype=BF16, device="cuda")
    x, out = wide_x[1 : m + 1, 16 : 16 + k], wide_out[1 : m + 1, 8 : 8 + case.outputs]
    x.copy_(numbers(m, k))
    out.copy_(case.out(m))
    want = case.want(x, out.clone())
    assert_close(case.launch(x, out, tile), want, limit(BF16))
    out.fill_(7.0)
    assert (wide_out == 7.0).all(), "wrote beside the result"


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    [
        ("gated", *GATE_UP["7B"]),
        ("gated", *GATE_UP["0.5B"]),
        ("bias", 4608, 3584),
        ("residual", 3584, 3584),
        ("bias residual", 896, 4864),
    ],
)
def test_the_same_bits_every_time_with_both_tiles_and_in_every_batch(
    tile: int, kind: str, n: int, k: int
) -> None:
    case = Case(kind, n, k)
    x, before = numbers(2049, k), case.out(2049)
    want = case.launch(x, before.clone(), op.TILES[0])
    for run in range(20):
        assert_same(case.launch(x, before.clone(), tile), want, f"run {run}")
    for m in (257, 640, 1111):
        rows = slice(7 * m % (2049 - m), 7 * m % (2049 - m) + m)
        assert_same(case.launch(x[rows], before[rows].clone(), tile), want[rows], f"M = {m}")


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_other_rows_and_their_nan_do_not_matter(tile: int, kind: str) -> None:
    case = Case(kind, 1152, 896)
    x, before = numbers(700, 896), case.out(700)
    want = case.launch(x, before.clone(), tile)
    bad = torch.arange(700, device="cuda") % 3 == 1
    x[bad] = NAN
    got = case.launch(x, before.clone(), tile)
    assert_same(got[~bad], want[~bad], "good rows")
    assert got[bad].isnan().all()


def test_gates_that_exp_cannot_say() -> None:
    sizes = torch.tensor([1e-30, 1.0, 20.0, 60.0, 90.0, 130.0, 1e4, 3e38], device="cuda")
    x = torch.zeros(300, 8, dtype=BF16, device="cuda")
    x[:8, 0], x[8:16, 0], x[:, 1] = sizes, -sizes, 1.0
    case = Case("gated", 16, 8)
    case.w.zero_()
    case.w[:8, 0], case.w[8:, 1] = 1.0, 0.5
    for tile in op.TILES:
        out = case.out(300)
        got, want = case.launch(x, out, tile).float(), case.want(x, out)
        error = (got - want).abs() - 2**-8 * want.abs()
        worst = divmod(int(error.nan_to_num(torch.inf).argmax()), got.shape[1])
        assert (error < 1e-30).all(), f"{tile}: {got[worst]} instead of {want[worst]} at {worst}"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_large_residual_keeps_its_bits(dtype: torch.dtype) -> None:
    """Thousands of products are added to numbers a thousand times as large, as some channels of models are."""
    case = Case("residual", 256, 18944, dtype)
    x, before = numbers(300, 18944, dtype=dtype), numbers(300, 256, dtype=dtype, scale=4096)
    want = case.want(x, before)
    for tile in op.TILES:
        assert_close(case.launch(x, before.clone(), tile), want, limit(dtype))


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("m", [257, 1000])
@pytest.mark.parametrize("dependent", [False, True])
def test_in_a_graph_behind_a_kernel_that_writes_x(
    tile: int,
    m: int,
    dependent: bool,
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    """Each launch reads what a norm has just written, perhaps over what the launch before has read."""
    n, k = GATE_UP["0.5B"]
    sources = [numbers(m, k) for _ in range(4)]
    cases = [Case("gated", n, k) for _ in range(2)]
    outs = [case.out(m) for case in (*cases, *cases)]

    def work() -> None:
        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            cases[i % 2].launch(rms_norm(source, None, EPS), out, tile)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(work)
    for _ in range(5):
        for source, out in zip(sources, outs, strict=True):
            source.copy_(numbers(m, k))
            out.fill_(NAN)
        replay()
        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            want = cases[i % 2].want(rms_norm(source, None, EPS), out)
            assert_close(out, want, limit(BF16))


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("m", [257, 1000])
@pytest.mark.parametrize("dependent", [False, True])
def test_in_a_graph_behind_kernels_that_write_the_residual(
    tile: int,
    m: int,
    dependent: bool,
    graph_replay: Callable[[Callable[[], object]], Callable[[], None]],
) -> None:
    """As in a decoder's layer: the hidden states are normed, multiplied, and added to; and the next launch adds
    to what the one before has just written."""
    hidden, inner = 896, 1152
    up, down, more = (
        Case("bias", inner, hidden),
        Case("residual", hidden, inner),
        Case("bias residual", hidden, inner),
    )
    source, total = numbers(m, hidden), numbers(m, hidden)
    middle = up.out(m)

    def work() -> None:
        torch.mul(source, 1.0, out=total)
        for _ in range(2):
            up.launch(rms_norm(total, None, EPS), middle, tile)
            down.launch(middle, total, tile)
            more.launch(middle, total, tile)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(work)
    for _ in range(5):
        source.copy_(numbers(m, hidden))
        middle.fill_(NAN)
        replay()
        got = total.clone()
        want = source.clone()
        for _ in range(2):  # the same steps, each known to be right, one at a time
            y = up.launch(rms_norm(want, None, EPS), up.out(m), tile)
            torch.cuda.synchronize()
            for case in (down, more):
                expected = case.want(y, want.clone())
                case.launch(y, want, tile)
                torch.cuda.synchronize()
                assert_close(want, expected, limit(BF16))
        assert_same(got, want, "the graph's result")


def test_linear_takes_the_kernel_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = (op.Shapes(m=range(257, 1 << 20)),)
    monkeypatch.setattr(op, "CHOSEN", {"gated": chosen, "other": chosen})
    n, k = GATE_UP["0.5B"]
    gate_up, qkv, down = Case("gated", n, k), Case("bias", 1152, k), Case("residual", k, n // 2)
    x = numbers(777, k)
    normed = rms_norm(x, None, EPS)
    got = linear.fused_linear(x, gate_up.w, norm_eps=EPS, gated=True)
    assert_same(got, op.tall_gemm_sm90(normed, gate_up.w, gated=True), "gate and up")
    assert_close(got, gate_up.want(normed, got), limit(BF16))
    y = linear.fused_linear(x, qkv.w, qkv.bias, norm_eps=EPS)
    assert_same(y, op.tall_gemm_sm90(normed, qkv.w, qkv.bias), "queries, keys and values")
    assert_close(y, qkv.want(normed, y), limit(BF16))
    total, other = x.clone(), x.clone()
    assert linear.fused_linear(got, down.w, residual=total) is total
    assert op.tall_gemm_sm90(got, down.w, residual=other) is other
    assert_same(total, other, "onto the residual")
    assert_close(total, down.want(got, x), limit(BF16))
    bias = numbers(n)  # which the kernel has not, gated
    want = fused_product.reference(normed.float(), gate_up.w, bias, gated=True)
    got = linear.fused_linear(x, gate_up.w, bias, norm_eps=EPS, gated=True)
    assert_close(got, want, 4 * limit(BF16))
