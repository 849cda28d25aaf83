"""Work lists of which only the device knows how long they are, as captured steps with prompt chunks have them:
empty, longer than the grid, and others at each replay, with garbage behind them. Always the bits that a list
of just those items gives. The Hopper prefill kernel: test_prefill_sm90.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops import jit, paged_decode
from engine.ops import paged_prefill as prefill_op
from engine.ops.paged_prefill import paged_prefill, queries_per_item, work_items
from tests.gpu.conftest import Record
from tests.kernels.paged_attention_cases import (
    FP8,
    Decoder,
    Heads,
    garbage,
    limits_of,
    make_context,
    make_queries,
)

# Kernels that test_paged_attention.py has compiled, too: of 4 and 8 warps, with queries in shared memory, of
# more query heads than a tile has rows.
HEADS = [
    Heads(128, 7, 4, block_size=64),
    Heads(64, 7, 2, torch.float16, block_size=64),
    Heads(256, 2, 2),
    Heads(128, 20, 2),
    Heads(128, 4, 8, torch.bfloat16, FP8[0]),
]
UNTOUCHED = -7.0
NUM_DECODES = 3  # tokens ahead of the chunks


@pytest.fixture(scope="module", autouse=True)
def kernels_built_together() -> None:
    arch = jit.device_arch()
    specs = [
        op.variant(h.dtype, h.cache_dtype, h.head_dim, h.group, h.block_size, h.softcap > 0, arch)
        for op in (paged_decode, prefill_op)
        for h in HEADS
    ]
    jit.prebuild(specs, arch)


def assert_same_bits(got: Tensor, want: Tensor, what: str) -> None:
    different = (got.view(torch.int16) != want.view(torch.int16)).nonzero()
    assert not len(different), (
        f"{what}: {len(different)} numbers differ, at (token, head, column) {different[:5].tolist()}"
    )


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_block_of_decode_takes_many_items(heads: Heads) -> None:
    """Short rows, rows in many parts and one of no tokens, on a grid of a few blocks. Twice, as the first
    launch must leave all arrivals at zero."""
    lens = np.random.default_rng(0).integers(1, 400, 120).tolist()
    context = make_context(heads, [*lens, 2049, 0, 700, 4097, 300, 1000], "cuda")
    few, many = (Decoder(context, limits_of(heads, slots, is_fixed=True)) for slots in (8, 1 << 16))
    many.q = few.q
    many.attend()
    many.check()
    few.plan_work(None)
    assert (few.plan.items[: int(few.plan.num_items), 4] >= 0).any(), "no row was split"
    for i in range(2):
        few.out.fill_(torch.nan)
        few.attend_planned()
        assert_same_bits(few.out, many.out, f"launch {i}")
        assert not few.scratch.arrivals.any(), "arrival counters must fall back to zero"


@pytest.mark.parametrize("slots", [8, 264])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_rows_change_in_number_between_replays(
    heads: Heads, slots: int, graph_replay: Record
) -> None:
    """A launch for 12 rows, with the queries of a step of more tokens."""
    context = make_context(heads, [1, 700, 17, 4097, 65, 0, 300, 2049, 33, 1000, 129, 64], "cuda")
    decoder = Decoder(context, limits_of(heads, slots, item_tokens=0))
    batch = len(context.lens)
    decoder.q = make_queries(heads, batch + 5, "cuda")
    decoder.out = torch.empty_like(decoder.q, memory_format=torch.contiguous_format)
    decoder.plan_first(batch)
    replay = graph_replay(decoder.attend_planned)
    for count in (batch, 3, 0, 7, 1, 0, batch):
        decoder.plan_first(count)
        decoder.out.fill_(UNTOUCHED)
        replay()
        want = torch.full_like(decoder.out, UNTOUCHED)
        if count:
            rows = replace(context, lens=context.lens[:count], rows=context.rows[:count])
            alone = Decoder(rows, decoder.plan.limits)
            alone.q = decoder.q[:count]
            alone.attend()
            alone.check()
            want[:count] = alone.out
        assert_same_bits(decoder.out, want, f"{count} rows")
        assert not decoder.scratch.arrivals.any(), "arrival counters must fall back to zero"


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_chunks_change_in_number_between_replays(heads: Heads, graph_replay: Record) -> None:
    kv_lens = [200, 1000, 77, 640, 4097, 129]
    steps = [  # (row of the context, queries)
        [(0, 200), (1, 300), (3, 128)],
        [(4, 17)],
        [],
        [(2, 1), (5, 129), (0, 5), (1, 64)],
    ]
    context = make_context(heads, kv_lens, "cuda")
    size = queries_per_item(heads.head_dim, heads.group, jit.device_arch())
    q = make_queries(heads, NUM_DECODES + 700, "cuda")
    out, want = (torch.empty_like(q, memory_format=torch.contiguous_format) for _ in range(2))
    rows, starts = (torch.zeros(len(kv_lens), dtype=torch.int32, device="cuda") for _ in range(2))
    work = torch.zeros(-(-700 // size) + len(kv_lens), 4, dtype=torch.int32, device="cuda")
    num_items = torch.zeros(1, dtype=torch.int32, device="cuda")

    def attend(items: Tensor, to: Tensor, count: Tensor | None) -> None:
        paged_prefill(
            q, context.k_cache, context.v_cache, context.block_table, rows, items, starts,
            heads.scale, to, None, heads.softcap, *heads.kv_scales, num_items=count,
        )  # fmt: skip

    replay = graph_replay(lambda: attend(work, out, num_items))
    for step in (*steps, *reversed(steps)):
        chosen, q_lens = [row for row, _ in step], [count for _, count in step]
        items = work_items(q_lens, [kv_lens[row] for row in chosen], size)
        for buffer in (rows, starts, work):
            buffer.copy_(garbage(buffer))
        ends = NUM_DECODES + np.cumsum([0, *q_lens])
        rows[: len(step)] = context.rows[chosen]
        starts[: len(step)] = torch.from_numpy(ends[:-1].astype(np.int32)).cuda()
        work[: len(items)] = torch.from_numpy(items).cuda()
        num_items.fill_(len(items))
        out.fill_(UNTOUCHED)
        want.fill_(UNTOUCHED)
        replay()
        if len(items):
            attend(work[: len(items)].clone(), want, None)
            assert (want[NUM_DECODES : ends[-1]] != UNTOUCHED).any(-1).all()
        assert_same_bits(out, want, f"chunks {step}")
