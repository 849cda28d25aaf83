"""The Hopper prefill kernel against the definition in float32, waits that never end turned into errors."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops import paged_prefill_sm90 as op
from tests.gpu.conftest import Record
from tests.kernels.prefill_sm90_cases import Case, assert_close, make_case

BF16, FP16 = torch.bfloat16, torch.float16
Chunks = list[tuple[int, int]]  # (q_len, kv_len)

RAGGED: Chunks = [(200, 200), (300, 1000), (1, 77), (128, 640), (257, 2049), (1, 1), (129, 129)]
EDGES: Chunks = [(n, n) for n in (1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257)]


TILED = [(head_dim, tiling) for head_dim in op.TILINGS for tiling in op.TILINGS[head_dim]]
each_tiling = pytest.mark.parametrize(
    ("head_dim", "tiling"), TILED, ids=[f"{head_dim}-{t.queries}" for head_dim, t in TILED]
)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if jit.device_arch() != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    variant = op.variant

    def trapping(*args: object) -> jit.VariantSpec:
        spec = variant(*args)  # type: ignore[arg-type]
        return replace(spec, defines={**spec.defines, "SLUICE_TRAP": 1})

    monkeypatch.setattr(op, "variant", trapping)
    op.load.cache_clear()
    yield
    op.load.cache_clear()


def check(case: Case) -> None:
    case = case.to("cuda")
    out = case.nan_output()
    case.run(out)
    torch.cuda.synchronize()
    assert_close(out, case)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    different = (got.view(torch.int16) != want.view(torch.int16)).nonzero()
    assert not len(different), (
        f"{len(different)} numbers differ, at (token, head, element) {different[:5].tolist()}"
    )


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@each_tiling
def test_ragged_chunks(
    head_dim: int, tiling: op.Tiling, block_size: int, dtype: torch.dtype
) -> None:
    check(make_case(head_dim, block_size, dtype, 8, 2, RAGGED, tiling=tiling))


@each_tiling
def test_lengths_around_the_edges_of_tiles(head_dim: int, tiling: op.Tiling) -> None:
    check(make_case(head_dim, 16, BF16, 4, 4, EDGES, tiling=tiling))
    later = [(q, kv + 300) for q, kv in EDGES]
    check(make_case(head_dim, 64, BF16, 4, 1, later, tiling=tiling))


@pytest.mark.parametrize("window", [1, 2, 64, 127, 128, 129, 500, 5000])
@each_tiling
def test_sliding_window(head_dim: int, tiling: op.Tiling, window: int) -> None:
    check(make_case(head_dim, 64, BF16, 4, 2, RAGGED, window=window, tiling=tiling))


@pytest.mark.parametrize("head_dim", op.TILINGS)
def test_softcap(head_dim: int) -> None:
    (tiling,) = op.tilings(head_dim, softcap=True)
    check(make_case(head_dim, 64, BF16, 4, 2, RAGGED, softcap=3.0, tiling=tiling))
    check(make_case(head_dim, 32, FP16, 4, 2, RAGGED, window=200, softcap=50.0, tiling=tiling))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(28, 4), (14, 2), (9, 3), (7, 7)])
@each_tiling
def test_more_items_than_multiprocessors(
    head_dim: int, tiling: op.Tiling, num_heads: int, num_kv_heads: int
) -> None:
    chunks = [(600, 2000), (700, 700), (1, 3000), (1213, 1825), (2, 2)]
    check(make_case(head_dim, 64, BF16, num_heads, num_kv_heads, chunks, tiling=tiling))


@each_tiling
def test_fewer_items_than_multiprocessors(head_dim: int, tiling: op.Tiling) -> None:
    check(make_case(head_dim, 64, BF16, 1, 1, [(5, 4000)], tiling=tiling))


def test_padding_items_alone_write_nothing() -> None:
    case = make_case(128, 64, BF16, 4, 2, [(1, 1)]).to("cuda")
    case.work.zero_()
    out = case.nan_output()
    case.run(out)
    assert out.isnan().all()


@each_tiling
def test_the_same_bits_every_time(head_dim: int, tiling: op.Tiling) -> None:
    case = make_case(head_dim, 64, BF16, 28, 4, RAGGED, tiling=tiling).to("cuda")
    first, second = case.nan_output(), case.nan_output()
    case.run(first)
    for _ in range(20):
        case.run(second)
        assert_same_bits(second, first)


@pytest.mark.parametrize("window", [None, 300])
def test_heads_of_64_get_the_same_bits_with_each_tiling(window: int | None) -> None:
    chunks = [*RAGGED, (2500, 5000)]
    case = make_case(64, 64, BF16, 14, 2, chunks, window).to("cuda")
    want, *others = (case.tiled(tiling) for tiling in op.TILINGS[64])
    expected = want.nan_output()
    want.run(expected)
    for other in others:
        got = other.nan_output()
        other.run(got)
        assert_same_bits(got[: case.num_tokens], expected[: case.num_tokens])


@each_tiling
@pytest.mark.parametrize("window", [None, 300])
def test_a_token_does_not_depend_on_how_its_prompt_is_cut(
    window: int | None, head_dim: int, tiling: op.Tiling
) -> None:
    whole = make_case(
        head_dim, 64, BF16, 8, 2, [(900, 1100)], window=window, padding=0, tiling=tiling
    ).to("cuda")
    want, got = whole.nan_output(), whole.nan_output()
    whole.run(want)
    for begin, end in pairwise((0, 1, 130, 515, 900)):
        whole.part(begin, end).run(got)
    assert_same_bits(got, want)


def test_shared_blocks() -> None:
    """Two rows whose first 128 tokens are the same blocks."""
    case = make_case(128, 64, BF16, 4, 2, [(40, 200), (30, 300)])
    first, second = case.rows.tolist()
    case.block_table[second, :2] = case.block_table[first, :2]
    check(case)


def of_one_size(cases: list[Case]) -> None:
    """Enlarge caches and block tables to those of the largest."""
    num_blocks = max(len(case.k_cache) for case in cases)
    max_blocks = max(case.block_table.shape[1] for case in cases)
    for case in cases:
        for name in ("k_cache", "v_cache"):
            cache = getattr(case, name)
            larger = torch.full((num_blocks, *cache.shape[1:]), float("nan"), dtype=cache.dtype)
            larger[: len(cache)] = cache
            setattr(case, name, larger)
        table = torch.zeros(len(case.block_table), max_blocks, dtype=torch.int32)
        table[:, : case.block_table.shape[1]] = case.block_table
        case.block_table = table


def copy_into(static: Case, case: Case) -> None:
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            getattr(static, name).copy_(value)
    static.q_lens, static.kv_lens = case.q_lens, case.kv_lens


def test_a_graph_sees_new_data_at_replay(graph_replay: Record) -> None:
    """Other lengths, blocks, rows and numbers in the same buffers; as many tokens and items."""
    cases = [
        make_case(128, 64, BF16, 8, 2, chunks, padding=1)
        for chunks in ([(130, 300), (1, 777)], [(129, 900), (2, 150)])
    ]
    of_one_size(cases)
    static = cases[0].to("cuda")
    out = static.nan_output()
    replay = graph_replay(lambda: static.run(out))
    for case in (cases[1], cases[0]):
        copy_into(static, case)
        out.fill_(float("nan"))
        replay()
        assert_close(out, static)


@each_tiling
def test_a_graph_sees_other_numbers_of_items_at_replay(
    head_dim: int, tiling: op.Tiling, graph_replay: Record
) -> None:
    """Fewer items than blocks, more, and none, with garbage behind them in the list: the bits of a list of
    their own."""
    num_tokens, capacity, num_heads = 1400, 16, 28
    chunks: list[Chunks] = [
        [(1300, 2000), (1, 777)],  # 12 items or 8, of each head
        [(1, 900), (2, 150)],
        [(130, 300), (700, 700)],
    ]
    cases = [
        make_case(
            head_dim,
            64,
            BF16,
            num_heads,
            4,
            these,
            padding=num_tokens - sum(q for q, _ in these),
            tiling=tiling,
        )
        for these in chunks
    ]
    of_one_size(cases)
    counted = [case.counted(capacity) for case in cases]
    static = counted[1].to("cuda")
    out, want = static.nan_output(), static.nan_output()
    replay = graph_replay(lambda: static.run(out))
    for i in (0, 1, 0, 2, 1):
        copy_into(static, counted[i])
        out.fill_(float("nan"))
        replay()
        assert_close(out, static)
        want.fill_(float("nan"))
        num_items = int(counted[i].num_items)
        replace(static, work=static.work[:num_items].clone(), num_items=None).run(want)
        assert_same_bits(out, want)
        static.num_items.zero_()
        out.fill_(float("nan"))
        replay()
        assert out.isnan().all()


def test_unsupported_shapes_are_refused_with_a_remedy() -> None:
    assert not op.supports(96, BF16, 64, "sm_90a")
    assert not op.supports(128, torch.float32, 64, "sm_90a")
    assert not op.supports(128, BF16, 48, "sm_90a")
    assert not op.supports(128, BF16, 64, "sm_89")
    case = make_case(64, 64, torch.float32, 2, 1, [(3, 3)]).to("cuda")
    with pytest.raises(ValueError, match="use paged_prefill"):
        case.run(case.nan_output())
