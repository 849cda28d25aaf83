"""The paged attention kernels in the emulator: layouts, masks, splits and merges, without a GPU.

The emulator computes tensor core products by shuffles. tests/gpu/test_paged_attention.py has many more shapes.
"""

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.ops import jit, paged_decode, paged_prefill, plan_decode
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.paged_attention_cases import (
    FP8,
    Decoder,
    Heads,
    check_prefill,
    limits_of,
    make_context,
    make_queries,
    nan_output,
    prefill,
)

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
LENS = [1, 17, 64, 420, 0]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_90a")
    with emulated(paged_decode, paged_prefill, plan_decode):
        yield


@pytest.mark.parametrize(
    ("heads", "resident"),
    [
        (Heads(64, 7, 2), 2),
        (Heads(64, 7, 2, BF16, E4M3), 4),
        (Heads(32, 4, 2), 4),
        (Heads(128, 4, 8, BF16, E4M3), 2),
        (Heads(128, 20, 2), 2),
        (Heads(256, 2, 2), 1),
    ],
    ids=str,
)
def test_as_many_blocks_as_an_h200_runs_at_a_time(
    heads: Heads, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 228 * 1024
    h200 = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    cpu = torch.device("cpu")
    limits = paged_decode.plan_limits(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.cache_dtype, 8192, False, cpu
    )
    assert limits.slots == 132 * resident
    per_item = limits.blocks_per_item
    plan = plan_decode.DecodePlan.allocate(limits, 512, cpu)
    plan.batch = 512
    assert paged_decode.num_blocks(plan) == limits.slots // per_item
    plan.batch = 1  # which may be split among all blocks, up to the most parts of a row
    assert plan.max_items == 1 + min(2 * limits.slots // per_item, plan_decode.MAX_PARTS)
    scratch = paged_decode.DecodeScratch.allocate(limits, 512, heads.num_heads, heads.head_dim, cpu)
    assert len(scratch.part_o) == limits.max_parts(512) == 8 * limits.slots // per_item
    kinds = (heads.dtype, heads.cache_dtype, heads.head_dim, heads.group, heads.block_size)
    for angle_dtype in (None, torch.float32):
        spec = paged_decode.variant(*kinds, False, "sm_90a", angle_dtype)
        assert spec.defines["BLOCKS_PER_SM"] == resident
        assert resident * (spec.smem_bytes + 1024) <= memory


def launch_plan(decoder: Decoder, window: int | None) -> np.ndarray:
    """Plan by the kernel; it must equal the plan in numpy."""
    plan = decoder.plan
    plan.batch = len(decoder.seq_lens)
    plan_decode.launch(plan, decoder.seq_lens, decoder.rows, window)
    items = plan.items[: int(plan.num_items)].numpy()
    want = plan_decode.reference(
        decoder.seq_lens.numpy(), decoder.rows.numpy(), window, plan.limits
    )
    np.testing.assert_array_equal(items, want)
    return items


@pytest.mark.parametrize(
    ("heads", "window"),
    [
        (Heads(128, 4, 1), None),
        (Heads(64, 7, 1, FP16, block_size=64), 50),
        (Heads(80, 1, 2, softcap=5.0), None),
        (Heads(256, 2, 1, block_size=32), 100),
        (Heads(64, 20, 1), None),  # more query heads than rows of a tile
        (Heads(128, 4, 1, BF16, E4M3), None),
        (Heads(80, 3, 1, FP16, E5M2), 40),
    ],
    ids=str,
)
def test_decode(heads: Heads, window: int | None) -> None:
    decoder = Decoder(make_context(heads, LENS), limits_of(heads, slots=40, item_tokens=0))
    items = launch_plan(decoder, window)
    decoder.attend_planned()
    decoder.check(window)
    assert window or (items[:, 4] >= 0).any(), "no row was split: the merge is not tested"


@pytest.mark.parametrize(
    "heads",
    [
        Heads(128, 4, 1),
        Heads(256, 2, 1, block_size=32),
        Heads(64, 20, 1),
        Heads(64, 7, 1, BF16, E4M3, block_size=32),
    ],
    ids=str,
)
def test_a_block_of_decode_takes_several_items(heads: Heads) -> None:
    """The same bits as with a block for each item, twice: arrivals must be zero again."""
    context = make_context(heads, [1, 300, 17, 0, 520, 64, 33, 270, 5])
    few, many = (Decoder(context, limits_of(heads, slots, is_fixed=True)) for slots in (2, 200))
    for decoder in (few, many):
        launch_plan(decoder, None)
    many.q = few.q
    many.attend_planned()
    assert (few.plan.items[:, 4] >= 0).any(), "no row was split"
    for _ in range(2):
        few.out.fill_(torch.nan)
        few.attend_planned()
        few.check()
        assert torch.equal(few.out.view(torch.int16), many.out.view(torch.int16))


def test_decode_of_fewer_rows_than_the_launch_is_for() -> None:
    decoder = Decoder(make_context(Heads(128, 4, 1), LENS), limits_of(Heads(128, 4, 1), slots=4))
    for count in (0, 2, 5):
        decoder.plan_first(count)
        decoder.out.fill_(torch.nan)
        decoder.attend_planned()
        assert decoder.out[count:].isnan().all(), "rows without items were written"
        assert decoder.out[:count].isfinite().all()
    decoder.check()


@pytest.mark.parametrize("count", [0, 2, 5])
def test_the_definition_writes_only_rows_that_have_items(count: int) -> None:
    decoder = Decoder(make_context(Heads(128, 4, 1), LENS), limits_of(Heads(128, 4, 1), slots=4))
    decoder.plan_first(count)
    shared = (context := decoder.context).k_cache, context.v_cache, context.block_table
    scale = context.heads.scale
    paged_decode.paged_decode(decoder.q, *shared, decoder.plan, decoder.scratch, scale, decoder.out)
    assert decoder.out[count:].isnan().all()
    for row in range(count):
        want = context.expected(row, decoder.q[row : row + 1], None)
        torch.testing.assert_close(decoder.out[row : row + 1].float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("heads", "window"),
    [
        (Heads(128, 4, 1), None),
        (Heads(64, 7, 1, FP16, block_size=128), 20),
        (Heads(96, 1, 1, softcap=5.0), None),
        (Heads(256, 2, 1, block_size=32), 40),
        (Heads(128, 2, 1, BF16, E4M3), None),
        (Heads(80, 3, 1, FP16, E5M2), None),
    ],
    ids=str,
)
def test_prefill(heads: Heads, window: int | None) -> None:
    q_lens = [5, 1, 33]
    context = make_context(heads, [5, 30, 80])
    q = make_queries(heads, sum(q_lens) + 2, "cpu")
    out = nan_output(q)
    prefill(context, q, q_lens, out, "sm_90a", window)
    check_prefill(context, q, q_lens, out, window)
    counted = nan_output(q)
    prefill(context, q, q_lens, counted, "sm_90a", window, is_counted=True)
    assert torch.equal(counted.view(torch.int16), out.view(torch.int16))


def test_prefill_of_no_items_writes_nothing() -> None:
    heads = Heads(128, 4, 1)
    context = make_context(heads, [30])
    q = make_queries(heads, 5, "cpu")
    out = nan_output(q)
    prefill(context, q, [0], out, "sm_90a", None, is_counted=True)
    assert out.isnan().all()


def test_the_definition_of_prefill_counts_items() -> None:
    heads = Heads(128, 4, 1)
    context = make_context(heads, [5, 30])
    q = make_queries(heads, 8, "cpu")
    work = torch.tensor([[1, 0, 3, 30], [0, 0, 5, 5]], dtype=torch.int32)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    for count, written in ((0, []), (1, [5, 6, 7]), (2, list(range(8)))):
        out = nan_output(q)
        paged_prefill.paged_prefill(
            q, context.k_cache, context.v_cache, context.block_table, context.rows, work, starts,
            heads.scale, out, num_items=torch.tensor([count], dtype=torch.int32),
        )  # fmt: skip
        assert out.isfinite().all(-1).all(-1).nonzero().flatten().tolist() == written


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 500])
@pytest.mark.parametrize("batch", [1, 7, 33, 250, 1024])
def test_the_device_plans_as_numpy_does(batch: int, window: int | None, is_fixed: bool) -> None:
    rng = np.random.default_rng(batch)
    heads = Heads(128, 4, 8)
    lens = rng.integers(0, rng.choice([20, 300, 8000]), batch)
    limits = limits_of(heads, slots=264, is_fixed=is_fixed)
    plan = plan_decode.DecodePlan.allocate(limits, batch, torch.device("cpu"))
    plan.batch = batch
    seq_lens = torch.from_numpy(lens.astype(np.int32))
    rows = torch.from_numpy(rng.integers(0, 5000, batch).astype(np.int32))
    plan_decode.launch(plan, seq_lens, rows, window)
    want = plan_decode.reference(seq_lens.numpy(), rows.numpy(), window, limits)
    assert int(plan.num_items) == len(want)
    np.testing.assert_array_equal(plan.items[: len(want)].numpy(), want)
