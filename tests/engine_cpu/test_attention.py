"""The CPU attention backend against a dense float32 oracle, and its independence of the batch."""

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionSpec, KVCache, StepInputs, allocate_kv_cache
from engine.attention.reference import ReferenceAttention

BLOCK = 16
NUM_BLOCKS = 200


def make_cache(spec: AttentionSpec, dtype: torch.dtype, seed: int = 0) -> KVCache:
    kv = allocate_kv_cache(
        1, NUM_BLOCKS, spec.num_kv_heads, BLOCK, spec.head_dim, dtype, torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in (kv.k[0], kv.v[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return kv


def make_inputs(lens: list[int], queries: list[int], seed: int, runs: bool = False) -> StepInputs:
    """Rows with `lens` keys and `queries` new tokens, on shuffled (or consecutive) blocks."""
    rng = np.random.default_rng(seed)
    ids = np.arange(1, NUM_BLOCKS) if runs else rng.permutation(np.arange(1, NUM_BLOCKS))
    width = max(-(-n // BLOCK) for n in lens)
    table = np.zeros((len(lens), width), np.int32)
    taken = 0
    for i, n in enumerate(lens):
        count = -(-n // BLOCK)
        table[i, :count] = ids[taken : taken + count]
        taken += count
    positions = np.concatenate([np.arange(n - q, n) for n, q in zip(lens, queries, strict=True)])
    return StepInputs(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        logits_indices=torch.zeros(0, dtype=torch.int64),
        block_table=torch.from_numpy(table),
        rows=np.arange(1, len(lens) + 1, dtype=np.int32),
        num_decodes=sum(q == 1 for q in queries),
        query_start=[0, *np.cumsum(queries).tolist()],
        seq_lens=list(lens),
        block_ids=table,
    )


def oracle(kv: KVCache, q: torch.Tensor, spec: AttentionSpec, inputs: StepInputs) -> torch.Tensor:
    """Each query on its own, in float32."""
    out = []
    for row, seq_len in enumerate(inputs.seq_lens):
        blocks = inputs.block_ids[row][: -(-seq_len // BLOCK)]
        keys = torch.cat([kv.k[0][b] for b in blocks], 1).float()  # [Hkv, L, D]
        values = torch.cat([kv.v[0][b] for b in blocks], 1).float()
        start, end = inputs.query_start[row], inputs.query_start[row + 1]
        for token in range(start, end):
            position = seq_len - (end - token)
            low = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
            for head in range(spec.num_heads):
                kv_head = head // (spec.num_heads // spec.num_kv_heads)
                scores = keys[kv_head, low : position + 1] @ q[token, head].float() * spec.scale
                if spec.softcap:
                    scores = spec.softcap * torch.tanh(scores / spec.softcap)
                out.append(torch.softmax(scores, 0) @ values[kv_head, low : position + 1])
    return torch.stack(out).view(len(inputs.positions), -1)


CASES = [
    ([1, 16, 17, 64, 65, 200], [1, 1, 1, 1, 1, 1]),  # decode around block and group edges
    ([40, 5, 33], [40, 5, 33]),  # whole prompts
    ([1, 150, 90, 64, 63], [1, 1, 30, 17, 63]),  # mixed: decodes, then chunks over a prefix
]


@pytest.mark.parametrize(("lens", "queries"), CASES)
@pytest.mark.parametrize("window", [None, 8, 40])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 16), (9, 3, 64), (4, 1, 80), (2, 2, 128)]
)
@pytest.mark.parametrize("runs", [False, True])
def test_matches_dense_attention(lens, queries, window, heads, kv_heads, dim, runs):
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, sliding_window=window)
    kv = make_cache(spec, torch.float32)
    inputs = make_inputs(lens, queries, seed=1, runs=runs)
    attention = ReferenceAttention(kv)
    attention.plan(inputs, [spec])
    q = torch.randn(len(inputs.positions), heads, dim, generator=torch.Generator().manual_seed(2))
    got = attention.attend(0, q, spec, inputs)
    torch.testing.assert_close(got, oracle(kv, q, spec, inputs), atol=2e-6, rtol=1e-5)


def test_softcap_matches_dense_attention():
    spec = AttentionSpec(4, 2, 16, 0.25, softcap=5.0)
    kv = make_cache(spec, torch.float32)
    inputs = make_inputs([20, 33], [1, 10], seed=3)
    attention = ReferenceAttention(kv)
    attention.plan(inputs, [spec])
    q = torch.randn(len(inputs.positions), 4, 16) * 4
    torch.testing.assert_close(
        attention.attend(0, q, spec, inputs), oracle(kv, q, spec, inputs), atol=2e-6, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_decode_alone_equals_decode_in_a_batch_bitwise(dtype, window):
    spec = AttentionSpec(9, 3, 64, 0.125, sliding_window=window)
    kv = make_cache(spec, dtype)
    lens = [1, 3, 16, 17, 63, 64, 65, 100, 128, 129, 190, 190, 30, 31, 32, 33]
    inputs = make_inputs(lens, [1] * len(lens), seed=4)
    attention = ReferenceAttention(kv)
    attention.plan(inputs, [spec])
    q = torch.randn(len(lens), 9, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    together = attention.attend(0, q, spec, inputs).clone()
    for i, n in enumerate(lens):
        alone = make_inputs([n], [1], seed=0)
        alone.block_ids[0] = inputs.block_ids[i, : alone.block_ids.shape[1]]
        attention.plan(alone, [spec])
        assert torch.equal(attention.attend(0, q[i : i + 1], spec, alone)[0], together[i]), n


def test_consecutive_blocks_give_the_same_bits_as_gathered_ones():
    spec = AttentionSpec(9, 3, 64, 0.125)
    kv = make_cache(spec, torch.float32)
    attention = ReferenceAttention(kv)
    run = make_inputs([100], [1], seed=0, runs=True)
    shuffled = make_inputs([100], [1], seed=7)
    run.block_ids[0] = np.arange(190, 190 + run.block_ids.shape[1])
    assert not set(run.block_ids[0]) & set(shuffled.block_ids[0])
    keys, values = kv.k[0].clone(), kv.v[0].clone()
    for source, target in zip(run.block_ids[0], shuffled.block_ids[0], strict=True):
        kv.k[0][target] = keys[source]
        kv.v[0][target] = values[source]
    q = torch.randn(1, 9, 64)
    results = []
    for inputs in (run, shuffled):
        attention.plan(inputs, [spec])
        results.append(attention.attend(0, q, spec, inputs).clone())
    assert torch.equal(results[0], results[1])


def test_garbage_beyond_the_sequence_is_harmless():
    spec = AttentionSpec(4, 2, 16, 0.25)
    kv = make_cache(spec, torch.float32)
    attention = ReferenceAttention(kv)
    inputs = make_inputs([21, 35], [1, 5], seed=8)
    q = torch.randn(len(inputs.positions), 4, 16)
    attention.plan(inputs, [spec])
    before = attention.attend(0, q, spec, inputs).clone()
    for row, seq_len in enumerate(inputs.seq_lens):
        last = inputs.block_ids[row][(seq_len - 1) // BLOCK]
        kv.k[0][last, :, seq_len % BLOCK :] = 1e30
        kv.v[0][last, :, seq_len % BLOCK :] = 1e30
    kv.k[0][0] = 1e30
    kv.v[0][0] = -1e30
    attention.plan(inputs, [spec])
    assert torch.equal(attention.attend(0, q, spec, inputs), before)


def test_padding_tokens_stay_finite():
    spec = AttentionSpec(4, 2, 16, 0.25)
    attention = ReferenceAttention(make_cache(spec, torch.float32))
    inputs = make_inputs([21], [1], seed=9)
    inputs.positions = torch.zeros(2, dtype=torch.int64)  # one real token, one of padding
    attention.plan(inputs, [spec])
    out = attention.attend(0, torch.randn(2, 4, 16), spec, inputs)
    assert out.shape == (2, 64)
    assert torch.isfinite(out).all()
