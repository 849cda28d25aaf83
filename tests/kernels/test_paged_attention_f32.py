"""The float32 attention kernel in the emulator, and its reference, against the definition."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops import paged_attention_f32
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.paged_attention_cases import Context, Heads, make_context, make_queries

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

FP32 = torch.float32
LENS = [5, 1, 33, 80]
QUERIES = [5, 1, 9, 1]  # the last ones of each row: whole prompts, decodes and a chunk


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(paged_attention_f32):
        yield


def per_token(context: Context, queries: list[int]) -> tuple[Tensor, Tensor]:
    """Table row of each token, and how many tokens it sees."""
    ends = [np.arange(n - q, n) + 1 for n, q in zip(context.lens, queries, strict=True)]
    rows = context.rows.repeat_interleave(torch.tensor(queries))
    return rows, torch.from_numpy(np.concatenate(ends)).int()


@pytest.mark.parametrize("run", [paged_attention_f32.launch, paged_attention_f32.reference])
@pytest.mark.parametrize(
    ("heads", "window"),
    [
        (Heads(64, 3, 3, FP32), None),
        (Heads(128, 4, 2, FP32, block_size=64), 7),
        (Heads(80, 1, 2, FP32, softcap=5.0), None),
        (Heads(256, 2, 1, FP32, block_size=32), 1),
        (Heads(20, 2, 1, FP32, block_size=8), 40),  # no other kernel takes these
    ],
    ids=str,
)
def test_decodes_and_chunks(heads: Heads, window: int | None, run) -> None:
    context = make_context(heads, LENS)
    rows, lens = per_token(context, QUERIES)
    q = make_queries(heads, len(rows), "cpu")
    out = torch.full(q.shape, float("nan"))
    caches = (context.k_cache, context.v_cache)
    run(q, *caches, context.block_table, rows, lens, heads.scale, out, window, heads.softcap)
    ends = np.cumsum([0, *QUERIES]).tolist()
    for i in range(len(LENS)):
        want = context.expected(i, q[ends[i] : ends[i + 1]], window)
        torch.testing.assert_close(out[ends[i] : ends[i + 1]], want, rtol=1e-5, atol=1e-5)


def test_a_token_that_sees_nothing_gets_zeros_and_bad_numbers_stay_visible() -> None:
    heads = Heads(64, 2, 1, FP32)
    context = make_context(heads, [20, 20])
    rows, lens = per_token(context, [1, 1])
    rows, lens = torch.cat((rows, rows[:1])), torch.cat((lens, torch.zeros(1, dtype=torch.int32)))
    q = make_queries(heads, 3, "cpu")
    q[1, 1, 3] = torch.nan
    out = torch.full(q.shape, 7.0)
    caches = (context.k_cache, context.v_cache)
    paged_attention_f32.launch(
        q, *caches, context.block_table, rows, lens, heads.scale, out, None, 0.0
    )
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1, 0]).all()
    assert out[1, 1].isnan().all()
    assert not out[2].any()
