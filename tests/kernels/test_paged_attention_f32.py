"""The float32 attention kernel in the emulator, and its reference, against the definition."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import paged_f32
from engine.attention.base import AttentionSpec, KVCache
from engine.ops import paged_attention_f32
from tests.engine_cpu.test_attention import make_cache, make_inputs, oracle
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


@pytest.mark.parametrize("window", [None, 9])
def test_the_backend_tells_the_kernel_rows_and_positions(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the emulator: as if the CPU were a GPU."""
    monkeypatch.setattr(
        paged_f32, "upload", lambda arrays, device: [torch.from_numpy(a) for a in arrays]
    )
    monkeypatch.setattr(paged_f32, "paged_attention_f32", paged_attention_f32.launch)
    spec = AttentionSpec(4, 2, 32, 32**-0.5, window)
    stored = make_cache(spec, FP32)
    kv = KVCache([stored.k[0].contiguous()], [stored.v[0].contiguous()], stored.block_size)
    attention = paged_f32.PagedAttentionF32(kv, spec.num_heads, torch.device("cpu"))
    for lens, queries in (([40, 17, 3], [1, 1, 1]), ([30, 44], [30, 5]), ([20, 1, 33], [1, 1, 12])):
        inputs = make_inputs(lens, queries, seed=2)
        total = sum(queries)
        q = torch.randn(total + 2, 4, 32)  # two padding tokens
        attention.plan(inputs, [spec])
        got = attention.attend(0, q, spec, inputs)
        want = oracle(kv, q[:total], spec, inputs)
        torch.testing.assert_close(got[:total], want.flatten(1), rtol=1e-5, atol=1e-5)
        assert not got[total:].any()
        # the same rows in a table of their own order, as the engine has it
        inputs.rows = np.array([2, 0, 1][: len(lens)], np.int32)
        inputs.rows_device = torch.from_numpy(inputs.rows)
        table = torch.zeros((3, inputs.block_table.shape[1]), dtype=torch.int32)
        table[inputs.rows_device.long()] = inputs.block_table
        inputs.block_table = table
        attention.plan(inputs, [spec])
        assert torch.equal(attention.attend(0, q, spec, inputs)[:total], got[:total])
