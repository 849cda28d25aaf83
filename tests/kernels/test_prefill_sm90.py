"""The Hopper prefill kernel in the emulator: layouts, swizzles, masks, and that every wait ends."""

from collections.abc import Iterator

import pytest
import torch

from engine.ops import paged_prefill_sm90 as op
from engine.ops.paged_prefill import work_items
from tests.kernels import emulator
from tests.kernels.emulator import emulated, emulated_map
from tests.kernels.prefill_sm90_cases import assert_close, make_case

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(op, "tensor_map", emulated_map)
    with emulated(op):
        yield


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "heads", "chunks", "window", "softcap", "num_sms"),
    [
        (128, 64, BF16, (2, 1), [(3, 3)], None, 0.0, 2),
        (128, 16, BF16, (4, 2), [(130, 300), (1, 77), (20, 20)], None, 0.0, 3),
        (64, 32, FP16, (2, 1), [(150, 400)], 90, 0.0, 1),
        (64, 128, BF16, (1, 1), [(40, 200)], None, 5.0, 1),
    ],
)
def test_prefill_sm90(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    chunks: list[tuple[int, int]],
    window: int | None,
    softcap: float,
    num_sms: int,
) -> None:
    monkeypatch.setattr(op, "num_sms", lambda device: num_sms)
    case = make_case(head_dim, block_size, dtype, *heads, chunks, window, softcap)
    out = case.nan_output()
    case.run(out)
    assert_close(out, case)


@pytest.mark.parametrize(
    "tiling",
    [
        op.Tiling(2, 128, 4, polynomial=4),
        op.Tiling(2, 192, 3),
        op.Tiling(3, 128, 2, q_stages=2),
    ],
    ids=str,
)
def test_candidates(monkeypatch: pytest.MonkeyPatch, tiling: op.Tiling) -> None:
    """Items that end within, before and behind a warpgroup's rows."""
    monkeypatch.setattr(op, "TILINGS", {64: tiling})
    monkeypatch.setattr(op, "num_sms", lambda device: 2)
    case = make_case(64, 64, BF16, 2, 1, [(270, 700), (193, 193), (65, 449), (3, 3)])
    out = case.nan_output()
    case.run(out)
    assert_close(out, case)


def test_caches_in_other_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that lie in the cache halved and doubled."""
    monkeypatch.setattr(op, "num_sms", lambda device: 2)
    case = make_case(64, 64, BF16, 1, 1, [(5, 70)])
    want, got = case.nan_output(), case.nan_output()
    case.run(want)
    op.paged_prefill_sm90(
        case.q,
        case.k_cache / 2,
        case.v_cache * 2,
        case.block_table,
        case.rows,
        case.work,
        case.q_start,
        case.scale,
        got,
        k_scale=2.0,
        v_scale=0.5,
    )
    assert torch.equal(got[:5], want[:5])


def test_a_token_does_not_depend_on_how_its_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "num_sms", lambda device: 2)
    case = make_case(64, 64, BF16, 1, 1, [(270, 300)], padding=0)
    want, got = case.nan_output(), case.nan_output()
    case.run(want)
    for begin, end in ((0, 120), (120, 270)):
        items = work_items([end - begin], [30 + end], op.queries_per_item(64))
        case.work, case.q_start = torch.from_numpy(items), torch.tensor([begin], dtype=torch.int32)
        case.run(got)
    assert torch.equal(got, want)
