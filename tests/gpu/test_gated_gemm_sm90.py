"""The gated product of many rows on Hopper against float32: both tiles, ragged sizes, graphs, and the same bits each
time. Waits that never end are turned into errors.

Results are as exact as bfloat16 or float16 can say them: errors stay below twice what rounding costs.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.ops import fused_product, jit, linear
from engine.ops import gated_gemm_sm90 as op
from engine.ops.rms_norm import rms_norm
from tests.gpu.conftest import Record
from tests.gpu.product_cases import BF16, FP16, NAN, assert_close, limit, numbers

ROWS = (193, 257, 300, 511, 512, 1000, 2049)
EPS = 1e-6
MODELS = {"7B": (37888, 3584), "0.5B": (9728, 896)}  # rows of W, columns
SHAPES = [*MODELS.values(), (1040, 1096), (16, 8), (528, 72)]
variant_of_product = op.variant


def trapping(tile: int, dtype: torch.dtype) -> jit.VariantSpec:
    spec = variant_of_product(tile, dtype)
    return replace(spec, defines={**spec.defines, "SLUICE_TRAP": 1})


@pytest.fixture(scope="module")
def compiled() -> None:
    """In several processes, ahead of what would otherwise be one after another."""
    jit.prebuild([trapping(tile, dtype) for tile in op.TILES for dtype in (BF16, FP16)])


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if jit.device_arch() != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    request.getfixturevalue("compiled")
    monkeypatch.setattr(op, "variant", trapping)
    op.load.cache_clear()
    yield
    op.load.cache_clear()


def reference(x: Tensor, w: Tensor) -> Tensor:
    """In float32."""
    return fused_product.reference(x.float(), w, gated=True)


def product(x: Tensor, w: Tensor, tile: int) -> Tensor:
    out = torch.full((len(x), len(w) // 2), NAN, dtype=x.dtype, device="cuda")
    op.launch(x, w, out, tile)
    return out


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    differing = (got != want).nonzero()
    assert len(differing) == 0, (
        f"{what}: {len(differing)} numbers differ, first at {differing[:5].tolist()}"
    )


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_against_float32(tile: int, n: int, k: int, dtype: torch.dtype) -> None:
    w = numbers(n, k, dtype=dtype, scale=k**-0.5)
    for m in ROWS if k > 72 else (1, *ROWS):
        x = numbers(m, k, dtype=dtype)
        try:
            assert_close(product(x, w, tile), reference(x, w), limit(dtype))
        except AssertionError as error:
            raise AssertionError(f"M = {m}: {error}") from None


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("m", ROWS)
def test_nothing_beside_the_result_is_read_or_written(tile: int, m: int) -> None:
    n, k = 1040, 904
    wide_x = torch.full((m + 300, k + 48), NAN, dtype=BF16, device="cuda")
    wide_out = torch.full((m + 300, n // 2 + 24), 7.0, dtype=BF16, device="cuda")
    x, out = wide_x[1 : m + 1, 16 : 16 + k], wide_out[1 : m + 1, 8 : 8 + n // 2]
    x.copy_(numbers(m, k))
    w = numbers(n, k, scale=k**-0.5)
    op.launch(x, w, out, tile)
    assert_close(out, reference(x, w), limit(BF16))
    out.fill_(7.0)
    assert (wide_out == 7.0).all(), "wrote beside the result"


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_bits_every_time_with_both_tiles_and_in_every_batch(tile: int, model: str) -> None:
    n, k = MODELS[model]
    x, w = numbers(2049, k), numbers(n, k, scale=k**-0.5)
    want = product(x, w, op.TILES[0])
    for run in range(20):
        assert_same(product(x, w, tile), want, f"run {run}")
    for m in (193, 257, 640, 1111):
        start = 7 * m % (2049 - m)
        rows = slice(start, start + m)
        assert_same(product(x[rows], w, tile), want[rows], f"M = {m}")


@pytest.mark.parametrize("tile", op.TILES)
def test_other_rows_and_their_nan_do_not_matter(tile: int) -> None:
    n, k = MODELS["0.5B"]
    x, w = numbers(700, k), numbers(n, k, scale=k**-0.5)
    want = product(x, w, tile)
    bad = torch.arange(700, device="cuda") % 3 == 1
    x[bad] = NAN
    got = product(x, w, tile)
    assert_same(got[~bad], want[~bad], "good rows")
    assert got[bad].isnan().all()


def test_gates_that_exp_cannot_say() -> None:
    sizes = torch.tensor([1e-30, 1.0, 20.0, 60.0, 90.0, 130.0, 1e4, 3e38], device="cuda")
    x = torch.zeros(300, 8, dtype=BF16, device="cuda")
    x[:8, 0], x[8:16, 0], x[:, 1] = sizes, -sizes, 1.0
    w = torch.zeros(16, 8, dtype=BF16, device="cuda")
    w[:8, 0], w[8:, 1] = 1.0, 0.5
    for tile in op.TILES:
        got, want = product(x, w, tile).float(), reference(x, w)
        error = (got - want).abs() - 2**-8 * want.abs()
        worst = divmod(int(error.nan_to_num(torch.inf).argmax()), got.shape[1])
        assert (error < 1e-30).all(), f"{tile}: {got[worst]} instead of {want[worst]} at {worst}"


@pytest.mark.parametrize("tile", op.TILES)
@pytest.mark.parametrize("m", [193, 257, 1000])
@pytest.mark.parametrize("dependent", [False, True])
def test_in_a_graph_behind_a_kernel_that_writes_x(
    tile: int,
    m: int,
    dependent: bool,
    graph_replay: Record,
) -> None:
    """Each launch reads what a norm has just written, perhaps over what the launch before has read."""
    n, k = MODELS["0.5B"]
    sources = [numbers(m, k) for _ in range(4)]
    weights = [numbers(n, k, scale=k**-0.5) for _ in range(2)]
    outs = [torch.empty(m, n // 2, dtype=BF16, device="cuda") for _ in sources]

    def work() -> None:
        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            op.launch(rms_norm(source, None, EPS), weights[i % 2], out, tile)

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(work)
    for _ in range(5):
        for source, out in zip(sources, outs, strict=True):
            source.copy_(numbers(m, k))
            out.fill_(NAN)
        replay()
        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            assert_close(out, reference(rms_norm(source, None, EPS), weights[i % 2]), limit(BF16))


@pytest.mark.parametrize("m", [192, 200, 240, 241, 250, 256, 257, 1000])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_linear_against_float32(model: str, m: int, dtype: torch.dtype) -> None:
    n, k = MODELS[model]
    w = numbers(n, k, dtype=dtype, scale=k**-0.5)
    x, bias = numbers(m, k, dtype=dtype), numbers(n, dtype=dtype)
    got = linear.fused_linear(x, w, norm_eps=EPS, gated=True)
    want = fused_product.reference(x.float(), w, norm_eps=EPS, gated=True)
    assert_close(got, want, 6 * limit(dtype))  # x is rounded when it is normed
    if m >= (193 if model == "7B" else 241):
        normed = rms_norm(x, None, EPS)
        assert_close(got, reference(normed, w), limit(dtype))
        assert_same(got, op.gated_gemm_sm90(normed, w), "with norm")
        assert_same(linear.fused_linear(normed, w, gated=True), got, "without norm")
    want = fused_product.reference(x.float(), w, bias, norm_eps=EPS, gated=True)
    got = linear.fused_linear(x, w, bias, norm_eps=EPS, gated=True)  # which this kernel has not
    assert_close(got, want, 6 * limit(dtype))


@pytest.mark.parametrize("m", [208, 256, 272])
@pytest.mark.parametrize("model", MODELS)
def test_linear_in_a_graph_of_dependent_launches(model: str, m: int, graph_replay: Record) -> None:
    """Two layers' norms, gated products and what is behind, as decode steps and steps with prompts have them,
    against the same one by one."""
    n, k = MODELS[model]
    gate_up = [numbers(n, k, scale=k**-0.5) for _ in range(2)]
    down = [numbers(k, n // 2, scale=(n // 2) ** -0.5) for _ in range(2)]
    source, total = numbers(m, k), numbers(m, k)

    def layers(hidden: Tensor, after_each: Callable[[], object]) -> None:
        for w, v in zip(gate_up, down, strict=True):
            y = linear.fused_linear(hidden, w, norm_eps=EPS, gated=True)
            after_each()
            linear.fused_linear(y, v, residual=hidden)
            after_each()

    def work() -> None:
        torch.mul(source, 1.0, out=total)
        layers(total, lambda: None)

    with jit.dependent_launches():
        replay = graph_replay(work)
    for _ in range(5):
        source.copy_(numbers(m, k))
        replay()
        want = source.clone()
        layers(want, torch.cuda.synchronize)
        assert_close(total, want.float(), 4 * limit(BF16))
