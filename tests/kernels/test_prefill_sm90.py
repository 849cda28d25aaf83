"""The Hopper prefill kernel in the emulator: layouts, swizzles, masks, and that every wait ends."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from engine.attention import paged
from engine.attention.base import AttentionSpec, KVCache, StepInputs
from engine.ops import jit, nvrtc
from engine.ops import paged_prefill_sm90 as op
from engine.ops.kernel_build import build
from engine.ops.kernel_cache import Job, KernelCache
from engine.ops.paged_prefill import work_items
from tests.kernels import emulator
from tests.kernels.emulator import emulated, emulated_map
from tests.kernels.paged_attention_cases import Heads, limits_of
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


@pytest.mark.parametrize("num_sms", [1, 3, 40])
def test_items_behind_the_number_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, num_sms: int
) -> None:
    """Fewer items than blocks, and more. None at all: every wait ends, and nothing is written."""
    monkeypatch.setattr(op, "num_sms", lambda device: num_sms)
    case = make_case(64, 64, BF16, 2, 1, [(150, 150), (1, 77), (20, 20)])
    want, got = case.nan_output(), case.nan_output()
    case.run(want)
    counted = case.counted(capacity=9)
    counted.run(got)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    counted.num_items.zero_()
    got = case.nan_output()
    counted.run(got)
    assert got.isnan().all()


@pytest.mark.parametrize("window", [None, 100])
def test_heads_of_64_get_the_same_bits_with_each_tiling(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    """Items that end within, before and behind a warpgroup's rows."""
    monkeypatch.setattr(op, "num_sms", lambda device: 2)
    chunks = [(270, 400), (193, 193), (65, 449), (3, 3)]
    case = make_case(64, 64, BF16, 2, 1, chunks, window)
    two, three = op.TILINGS[64]
    assert (two.queries, three.queries) == (128, 192)
    want, got = case.nan_output(), case.nan_output()
    case.tiled(two).run(want)
    case.tiled(three).run(got)
    assert_close(got, case)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


H200 = 132


@pytest.mark.parametrize(
    ("chunks", "queries"),
    [
        ([(512, 512)] * 16, 128),  # many items, but short ones
        ([(2048, 2048)], 128),
        ([(2048, 32768)], 128),  # 154 long items of 192 on 132 multiprocessors
        ([(8192, 8192)], 192),
        ([(16384, 16384)], 192),
        ([(0, 5), (8192, 8192), (0, 77)], 192),
        ([(64, 64), (0, 5)], 128),
    ],
)
def test_the_tiling_is_the_one_that_was_faster_on_an_h200(
    chunks: list[tuple[int, int]], queries: int
) -> None:
    q_lens, kv_lens = zip(*chunks, strict=True)
    tiling, work = op.plan_items(op.tilings(64, False), q_lens, kv_lens, num_heads=14, num_sms=H200)
    assert tiling.queries == queries
    assert np.array_equal(work, work_items(q_lens, kv_lens, queries))


@pytest.mark.parametrize(("head_dim", "softcap"), [(128, False), (128, True), (64, True)])
def test_large_heads_and_soft_caps_have_one_tiling(head_dim: int, softcap: bool) -> None:
    (tiling,) = op.tilings(head_dim, softcap)
    chosen, work = op.plan_items([tiling], [8192], [8192], num_heads=28, num_sms=H200)
    assert (chosen.queries, len(work)) == (128, 64)


def test_estimated_time_is_that_of_the_busiest_block() -> None:
    """Of 3 blocks and 4 items of 1, 2, 3 and 4 tiles, the third gets the two shortest, by turning back."""
    tiling = op.Tiling(consumers=2, stages=4, tile_time=1.5)
    work = work_items([512], [512], 128)
    per_item = op.ITEM_COST
    assert tiling.time(work, 1, 3) == 1.5 * max(4 + per_item, 3 + per_item, 2 + 1 + 2 * per_item)
    assert tiling.time(work, 1, 100) == 1.5 * (4 + per_item)
    assert tiling.time(work, 2, 1) == 1.5 * 2 * (1 + 2 + 3 + 4 + 4 * per_item)


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
        tiling=case.tiling,
    )
    assert torch.equal(got[:5], want[:5])


def test_a_token_does_not_depend_on_how_its_prompt_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "num_sms", lambda device: 2)
    case = make_case(64, 64, BF16, 1, 1, [(270, 300)], padding=0)
    want, got = case.nan_output(), case.nan_output()
    case.run(want)
    for begin, end in ((0, 120), (120, 270)):
        case.part(begin, end).run(got)
    assert torch.equal(got, want)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("num_sms", "queries"), [(1, 192), (132, 128)])
def test_a_step_takes_the_tiling_that_its_plan_chose(
    monkeypatch: pytest.MonkeyPatch, num_sms: int, queries: int, captured: bool
) -> None:
    """Or, if it is captured, the one that its size chose: items are cut for the kernel that is there."""
    launched = []
    monkeypatch.setattr(op, "num_sms", lambda device: num_sms)
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_90a")
    monkeypatch.setattr(paged, "upload", lambda arrays, _: [torch.from_numpy(a) for a in arrays])
    monkeypatch.setattr(paged, "plan_limits", lambda *_: limits_of(Heads(64, 2, 1), 4))
    kernel = op.paged_prefill_sm90

    def record(*args: object, tiling: op.Tiling, **counts: object) -> None:
        launched.append(tiling.queries)
        kernel(*args, tiling=tiling, **counts)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "paged_prefill_sm90", record)
    case = make_case(64, 64, BF16, 4, 2, [(130, 300), (5, 70), (220, 220)], padding=13)
    size = len(case.q)
    spec = AttentionSpec(4, 2, 64, case.scale)
    kv = KVCache([case.k_cache], [case.v_cache], 64)
    attention = paged.PagedAttention(kv, [spec], 4, 512, torch.device("cpu"))
    none = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(
        input_ids=torch.zeros(size, dtype=torch.int64),
        positions=none,
        slot_mapping=none,
        logits_indices=none,
        block_table=case.block_table,
        rows=case.rows.numpy(),
        num_decodes=0,
        query_start=[*case.q_start.tolist(), case.num_tokens],
        seq_lens=case.kv_lens,
        block_ids=np.zeros((0, 0), np.int32),
        rows_device=case.rows,
        seq_lens_device=torch.tensor(case.kv_lens, dtype=torch.int32),
    )
    if captured:
        attention.allocate_chunks(512, BF16)
        attention.capture_chunks(size)
        attention.plan_chunks(inputs)
        attention.capture_chunks(size)  # what a replay does is what was captured
    else:
        attention.plan(inputs, [spec])
    out = attention.attend(0, case.q, spec, inputs)
    assert launched == [queries]
    assert not out[case.num_tokens :].any(), "padding tokens attend to nothing"
    out = out.view(case.q.shape).clone()
    out[case.num_tokens :] = torch.nan  # as if nobody had written there
    assert_close(out, case)


@pytest.mark.parametrize("softcap", [False, True])
def test_every_tiling_compiles_without_spills(softcap: bool) -> None:
    """With soft-caps, too, which no model of test_compile.py has at these head sizes."""
    try:
        nvrtc.version()
    except nvrtc.KernelBuildError as error:
        pytest.skip(str(error))
    specs = [
        op.variant(tiling, head_dim, BF16, 64, softcap)
        for head_dim in op.TILINGS
        for tiling in op.tilings(head_dim, softcap)
    ]
    for spec, built in zip(
        specs,
        build([Job.of(s.source, s.defines, "sm_90a") for s in specs], KernelCache(), workers=1),
        strict=True,
    ):
        resources = built.entry.resources[spec.name]
        assert not resources.spill_bytes, built.lines()
        assert not built.entry.warnings
        assert spec.smem_bytes <= 227 * 1024
