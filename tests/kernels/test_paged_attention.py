"""The paged attention kernels in the emulator: layouts, masks, splits and merges, without a GPU.

The emulator computes tensor core products by shuffles and copies at once; what it cannot show is a
missing wait. tests/gpu/test_paged_attention.py has many more shapes.
"""

from collections.abc import Iterator

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
