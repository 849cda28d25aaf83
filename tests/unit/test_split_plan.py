"""The decode plan: every token once, parts in their places, enough items for the device."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.ops import paged_decode as paged_decode_op
from engine.ops.plan_decode import (
    FIXED_MAX_PARTS,
    ITEM_FIELDS,
    MAX_BATCH,
    MAX_PARTS,
    TILE,
    DecodePlan,
    PlanLimits,
    plan_decode,
    reference,
)

H200 = PlanLimits(blocks_per_item=8, slots=264, max_tokens=40_000)
H200_FIXED = PlanLimits(blocks_per_item=8, slots=264, is_fixed=True, max_tokens=40_000)


def make(lens: list[int], window: int | None = None, limits: PlanLimits = H200) -> list[dict]:
    """Items as dictionaries; row i has table row 1000 + i."""
    rows = np.arange(1000, 1000 + len(lens), dtype=np.int32)
    items = reference(np.array(lens, np.int32), rows, window, limits)
    return [dict(zip(ITEM_FIELDS, item.tolist(), strict=True)) for item in items]


def random_lens(seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 2, 5, 33, 100, 256]))
    return rng.integers(0, rng.choice([10, 200, 3000, 40_000]), batch).tolist()


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("window", [None, 1, 17, 1000])
@pytest.mark.parametrize("limits", [H200, H200_FIXED, PlanLimits(1, 264), PlanLimits(64, 10)])
def test_items_cover_what_each_row_sees_once(
    seed: int, window: int | None, limits: PlanLimits
) -> None:
    lens = random_lens(seed)
    items = make(lens, window, limits)
    for i, length in enumerate(lens):
        own = sorted((item for item in items if item["row"] == i), key=lambda item: item["begin"])
        assert own[0]["begin"] == (max(0, length - window) if window else 0)
        assert own[-1]["end"] == length
        assert all(a["end"] == b["begin"] for a, b in pairwise(own))
        assert all(item["begin"] < item["end"] for item in own) or length == 0
        assert all(item["begin"] % TILE == 0 for item in own[1:])
        assert all(item["table_row"] == 1000 + i for item in own)
        if len(own) == 1:
            assert own[0]["part"] == -1
        else:
            first = own[0]["first_part"]
            assert [item["part"] for item in own] == list(range(first, first + len(own)))
            assert {(item["num_parts"], item["first_part"]) for item in own} == {(len(own), first)}
        assert len(own) <= MAX_PARTS
    assert len(items) <= limits.max_items(len(lens))
    parts = [item["part"] for item in items if item["part"] >= 0]
    assert sorted(parts) == list(range(len(parts)))
    assert len(parts) <= limits.max_parts(len(lens))
    splits = {item["split"] for item in items if item["part"] >= 0}
    assert splits == set(range(len({item["row"] for item in items if item["part"] >= 0})))


def test_long_rows_of_small_batches_fill_the_device() -> None:
    items = make([32_768])
    assert len(items) * H200.blocks_per_item > 0.9 * H200.slots
    assert len(items) * H200.blocks_per_item <= H200.slots


def test_a_full_device_splits_nothing() -> None:
    assert len(make([2048] * 256)) == 256
    assert len(make([100])) == 1


def test_one_long_row_among_many_is_split() -> None:
    items = make([500] * 200 + [30_000])
    assert sum(item["row"] == 200 for item in items) >= 4
    assert sum(item["row"] < 200 for item in items) == 200


def test_long_items_start_first() -> None:
    sizes = [item["end"] - item["begin"] for item in make([1, 5000, 700, 3000, 20, 4999] * 20)]
    bucket = max(sizes) / 31
    assert all(a >= b - bucket for a, b in pairwise(sizes))


@pytest.mark.parametrize("window", [None, 700])
def test_fixed_chunks_depend_on_the_row_alone(window: int | None) -> None:
    lens = [5, 300, 9000, 39_999, 8192, 256, 257]
    together = make(lens, window, H200_FIXED)
    for i, length in enumerate(lens):
        alone = make([length], window, H200_FIXED)
        cuts = sorted((item["begin"], item["end"]) for item in together if item["row"] == i)
        assert cuts == sorted((item["begin"], item["end"]) for item in alone)
        assert len(cuts) <= FIXED_MAX_PARTS


def test_lengths_below_zero_count_as_none() -> None:
    assert [(item["begin"], item["end"]) for item in make([-3, 4])] == [(0, 4), (0, 0)]


def test_a_plan_of_too_many_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="up to 1024 rows"):
        DecodePlan.allocate(H200, MAX_BATCH + 1, torch.device("cpu"))


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("limits", [PlanLimits(2, 64), PlanLimits(2, 64, is_fixed=True)])
def test_the_reference_merges_parts_to_the_whole(limits: PlanLimits, softcap: float) -> None:
    torch.manual_seed(0)
    lens, block_size = [700, 0, 3], 16
    k_cache, v_cache = torch.randn(2, 50, 2, block_size, 32).unbind()
    table = 1 + torch.randperm(48).view(1, 48).repeat(4, 1).int()
    rows = torch.tensor([3, 1, 0], dtype=torch.int32)
    plan = DecodePlan.allocate(limits, 3, torch.device("cpu"))
    plan_decode(plan, torch.tensor(lens, dtype=torch.int32), rows, None)
    assert int(plan.num_items) > 3
    q = torch.randn(3, 4, 32)
    got = paged_decode_op.reference(q, k_cache, v_cache, table, plan, 0.2, softcap, 1.0, 2.0)
    for row, length in enumerate(lens):
        keys = paged_decode_op.gather(k_cache, table[rows[row]], 0, length).repeat_interleave(2, 0)
        values = paged_decode_op.gather(v_cache, table[rows[row]], 0, length)
        scores = (keys @ q[row, :, :, None])[..., 0] * 0.2
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores, -1)
        want = (weights[:, None] @ (2 * values.repeat_interleave(2, 0)))[:, 0]
        torch.testing.assert_close(got[row], want, atol=1e-5, rtol=1e-4)
