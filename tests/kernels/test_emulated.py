"""Kernels of cuda/, run on the CPU through their own launchers, against the torch references."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.ops import (
    activation,
    copy_blocks,
    embed_tokens,
    prepare_decode,
    rms_norm,
    rope_and_cache,
)
from engine.ops.fused_product import interleave
from tests.kernels import emulator
from tests.kernels.emulator import as_if_cuda, emulated

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

MODULES = (activation, copy_blocks, embed_tokens, prepare_decode, rms_norm, rope_and_cache)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.manual_seed(0)
    with emulated(*MODULES):
        yield


def assert_within_a_rounding(got: Tensor, want: Tensor) -> None:
    """Equal but for one unit in the last place here and there, as sums in another order give."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tolerance = (
        4 * torch.finfo(want.dtype).eps if want.dtype is FP32 else torch.finfo(want.dtype).eps
    )
    torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=1e-6)


# --- norms ---

NORM_SHAPES = [(BF16, 64), (FP16, 576), (BF16, 3584), (FP32, 1000), (BF16, 8200)]


@pytest.mark.parametrize(("dtype", "hidden"), NORM_SHAPES)
def test_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    weight = torch.randn(hidden).to(dtype)
    for num_rows in (1, 4, 7):
        wide = (3 * torch.randn(num_rows, 2 * hidden)).to(dtype)
        x = wide[:, :hidden]
        assert rms_norm.has_kernel(x, weight)
        before = x.clone()
        assert_within_a_rounding(
            rms_norm.launch(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5)
        )
        assert_within_a_rounding(rms_norm.launch(x, None, 1e-5), rms_norm.reference(x, None, 1e-5))
        assert torch.equal(x, before)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = torch.randn(9, 576).to(BF16), torch.randn(576).to(BF16)
    full = rms_norm.launch(x, weight, 1e-5)
    for row in (0, 4, 8):
        assert torch.equal(rms_norm.launch(x[row : row + 1], weight, 1e-5)[0], full[row])


def test_rows_that_the_kernel_cannot_read_are_refused() -> None:
    weight = torch.ones(64, dtype=BF16)
    assert rms_norm.has_kernel(torch.zeros(2, 64, dtype=BF16), weight)
    assert rms_norm.has_kernel(torch.zeros(2, 64, dtype=BF16), None)
    assert not rms_norm.has_kernel(torch.zeros(2, 68, dtype=BF16), torch.ones(68, dtype=BF16))
    assert not rms_norm.has_kernel(torch.zeros(2, 65, dtype=BF16)[:, 1:], weight)
    assert not rms_norm.has_kernel(torch.zeros(64, 2, dtype=BF16).T, weight)
    assert not rms_norm.has_kernel(torch.zeros(2, 64, dtype=BF16), torch.ones(2, 64, dtype=BF16))


# --- activations ---


@pytest.mark.parametrize(
    ("dtype", "name", "inner"),
    [(BF16, "silu", 1536), (FP16, "gelu_tanh", 104), (FP32, "gelu", 36)],
)
def test_act_and_mul(dtype: torch.dtype, name: str, inner: int) -> None:
    for num_rows in (1, 3, 8):
        gate_up = (4 * torch.randn(num_rows, 2 * inner)).to(dtype)
        gate_up[0, :5] = torch.tensor([0.0, 90.0, -90.0, 1e4, -1e4])
        got = activation.launch(gate_up, name)
        want = activation.reference(gate_up.double(), name)
        tolerance = 1e-6 if dtype is FP32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("num_rows", "inner"), [(1, 8), (3, 104), (8, 1536), (33, 264)])
def test_act_and_mul_of_interleaved_columns(dtype: torch.dtype, num_rows: int, inner: int) -> None:
    gate, up = ((4 * torch.randn(num_rows, inner)).to(dtype) for _ in range(2))
    gate_up = interleave(torch.cat((gate, up), -1).T).T.contiguous()
    assert activation.has_kernel(gate_up, interleaved=True)
    got = activation.launch(gate_up, "silu", interleaved=True)
    side_by_side = torch.cat((gate, up), -1)
    want = activation.reference(side_by_side.double())
    tolerance = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=1e-5)
    assert torch.equal(got, activation.launch(side_by_side, "silu")), (
        "the same bits in either order"
    )


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu' is not one of silu, gelu, gelu_tanh"):
        activation.launch(torch.zeros(1, 16, dtype=BF16), "relu")


# --- rotation and cache ---


def angles(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Rows of one table, as a GPU gets them: [T, 1, head_dim / 2] each."""
    theta = 10 * torch.randn(num_tokens, head_dim // 2)
    table = torch.cat((theta.cos(), theta.sin()), -1).unsqueeze(1)
    return table.chunk(2, -1)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "head_dim", "num_heads", "num_kv_heads", "block_size", "has_norm"),
    [
        (BF16, BF16, 128, 28, 4, 16, False),
        (BF16, BF16, 64, 3, 1, 64, True),
        (FP16, FP16, 80, 4, 4, 16, True),
        (FP16, FP16, 96, 6, 2, 32, False),
        (BF16, BF16, 256, 8, 4, 16, True),
        (BF16, torch.float8_e4m3fn, 128, 8, 2, 16, False),
        (FP16, torch.float8_e5m2, 64, 5, 1, 32, True),
        (FP32, FP32, 64, 9, 3, 16, False),
        (FP32, FP32, 80, 4, 2, 32, True),
        (BF16, BF16, 16, 7, 1, 16, True),
        (BF16, torch.float8_e4m3fn, 48, 17, 5, 16, True),
        (FP16, FP16, 176, 2, 1, 16, True),
        (BF16, BF16, 512, 20, 4, 16, False),  # a token's heads fill two thread blocks
    ],
)
def test_rope_and_cache(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    has_norm: bool,
) -> None:
    num_blocks, k_scale, v_scale = 6, 0.5, 2.0
    loose = 1e-5 if dtype is FP32 else 0.02
    norm = torch.randn(num_heads + num_kv_heads, head_dim).to(dtype) if has_norm else None
    for num_tokens in (1, 5, 8):
        qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
        cos, sin = angles(num_tokens, head_dim)
        slots = torch.randperm((num_blocks - 1) * block_size)[:num_tokens] + block_size
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        got, want = ([torch.full(shape, 7.0).to(kv_dtype) for _ in range(2)] for _ in range(2))
        common = (num_heads, norm, 1e-5, k_scale, v_scale)
        q = rope_and_cache.launch(qkv, cos, sin, slots, *got, *common)
        q_want = rope_and_cache.reference(qkv.clone(), cos, sin, slots, *want, *common)
        assert q.is_contiguous()
        # rotation subtracts: what was rounded before it may show as much as the operands are large
        torch.testing.assert_close(
            q.float(), q_want.float(), rtol=2 * torch.finfo(dtype).eps, atol=loose
        )
        k, k_want, v, v_want = (t.float() for t in (got[0], want[0], got[1], want[1]))
        step = torch.finfo(kv_dtype).eps
        torch.testing.assert_close(k, k_want, rtol=2 * step, atol=loose)
        if kv_dtype is dtype:
            assert torch.equal(v, v_want)
        else:
            assert (v == v_want).float().mean() > 0.999  # but for ties of the product by 1 / scale
            torch.testing.assert_close(v, v_want, rtol=2 * step, atol=0.01)
        written = torch.zeros(num_blocks * block_size, dtype=torch.bool)
        written[slots] = True
        untouched = k.transpose(1, 2).flatten(0, 1)[~written]
        assert (untouched == 7).all(), "a slot of no token was written"


def test_a_tokens_heads_do_not_depend_on_the_tokens_beside_it() -> None:
    """Nor on whether it is the last of a thread block; 21 heads leave some lanes without any."""
    num_heads, num_kv_heads, head_dim, num_tokens = 15, 3, 64, 7
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(BF16)
    norm = torch.randn(num_heads + num_kv_heads, head_dim).to(BF16)
    cos, sin = angles(num_tokens, head_dim)
    slots = 16 + torch.arange(num_tokens)
    shape = (3, num_kv_heads, 16, head_dim)
    alone, together = ([torch.zeros(shape, dtype=BF16) for _ in range(2)] for _ in range(2))
    q = rope_and_cache.launch(qkv, cos, sin, slots, *together, num_heads, norm)
    for token in range(num_tokens):
        one = slice(token, token + 1)
        inputs = (qkv[one], cos[one], sin[one], slots[one])
        assert torch.equal(q[one], rope_and_cache.launch(*inputs, *alone, num_heads, norm))
    for cache, want in zip(together, alone, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "want"),
    [
        (18, 64, (4, 1, 1)),  # 8 heads at once, 24 in three rounds: a warp has a token
        (36, 128, (1, 3, 1)),
        (192, 128, (1, 8, 2)),
        (28, 512, (1, 5, 2)),
        (3, 16, (4, 1, 1)),
    ],
)
def test_thread_blocks_of_the_rotation_cover_all_heads(
    num_heads: int, head_dim: int, want: tuple[int, int, int]
) -> None:
    tokens, warps, parts = rope_and_cache.geometry(num_heads, head_dim)
    assert (tokens, warps, parts) == want
    lanes = max(2, 1 << (head_dim // 16 - 1).bit_length())
    assert warps * parts * rope_and_cache.HEADS_PER_LANE * (32 // lanes) >= num_heads
    assert 32 * warps * tokens <= 256


def test_spread_angles_of_the_models_type_work_as_well() -> None:
    head_dim, num_tokens = 64, 3
    qkv = torch.randn(num_tokens, 4 * head_dim).to(BF16)
    cos, sin = (t.to(BF16) for t in angles(num_tokens, head_dim))
    spread = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    slots = torch.tensor([16, 17, 40])
    caches = [torch.zeros(4, 1, 16, head_dim, dtype=BF16) for _ in range(4)]
    q = rope_and_cache.launch(qkv, *spread, slots, *caches[:2], 2)
    want = rope_and_cache.reference(qkv, *spread, slots, *caches[2:], 2)
    torch.testing.assert_close(q.float(), want.float(), rtol=0.02, atol=0.03)
    torch.testing.assert_close(caches[0].float(), caches[2].float(), rtol=0.02, atol=0.03)


def test_padding_tokens_share_slot_0() -> None:
    num_tokens, head_dim = 4, 64
    qkv = torch.randn(num_tokens, 4 * head_dim).to(BF16)
    slots = torch.tensor([20, 0, 0, 0])
    k_cache, v_cache = (torch.zeros(4, 1, 16, head_dim, dtype=BF16) for _ in range(2))
    cos, sin = angles(num_tokens, head_dim)
    rope_and_cache.launch(qkv, cos, sin, slots, k_cache, v_cache, 2)
    assert torch.equal(v_cache[1, 0, 4], qkv[0, 3 * head_dim :])
    used = v_cache.flatten(0, 2).any(1)
    assert used.nonzero().flatten().tolist() == [0, 20]


# --- conversions to 8 bits, every case of the format ---


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversion_to_8_bits_equals_torchs(kv_dtype: torch.dtype) -> None:
    """All float16 values, infinities as well, through v, which is copied without rotation."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(FP16)
    values = torch.where(values.isnan(), torch.zeros_like(values), values)
    num_kv_heads, head_dim, block_size = 16, 64, 16
    num_tokens = values.numel() // (num_kv_heads * head_dim)
    qkv = torch.zeros(num_tokens, 3 * num_kv_heads, head_dim, dtype=FP16)
    qkv[:, 2 * num_kv_heads :] = values.view(num_tokens, num_kv_heads, head_dim)
    shape = (num_tokens // block_size, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = (torch.zeros(shape).to(kv_dtype) for _ in range(2))
    cos, sin = angles(num_tokens, head_dim)
    slots = torch.arange(num_tokens)
    rope_and_cache.launch(qkv.flatten(1), cos, sin, slots, k_cache, v_cache, num_kv_heads)
    got = v_cache.view(torch.uint8).transpose(1, 2).flatten()
    limit = torch.finfo(kv_dtype).max
    want = values.float().clamp(-limit, limit).to(kv_dtype).view(torch.uint8)
    wrong = (got != want).nonzero().flatten()
    assert wrong.numel() == 0, (values[wrong][:8], got[wrong][:8], want[wrong][:8])


# --- block copies ---


@pytest.mark.parametrize("shape", [(5, 2, 16, 64), (4, 1, 16, 8), (3, 3, 16, 72)])
def test_copy_blocks(shape: tuple[int, ...]) -> None:
    caches = [torch.randn(shape).to(BF16) for _ in range(6)]
    want = [one.clone() for one in caches]
    pairs = torch.tensor([[1, 0], [1, 2]])
    copy_blocks.reference(want, want, pairs)
    addresses = copy_blocks.cache_addresses(caches, pairs.device)
    copy_blocks.launch(caches, caches, pairs, addresses, addresses)
    for got, expected in zip(caches, want, strict=True):
        assert torch.equal(got, expected)
    copy_blocks.launch(caches, caches, pairs[:0], addresses, addresses)


def test_copy_blocks_between_two_memories() -> None:
    caches = [torch.randn(5, 2, 16, 64).to(BF16) for _ in range(4)]
    hosts = [torch.zeros(9, 2, 16, 64, dtype=BF16) for _ in range(4)]
    want = [one.clone() for one in hosts]
    pairs = torch.tensor([[1, 8], [4, 0], [2, 3]])
    copy_blocks.reference(caches, want, pairs)
    here, there = (copy_blocks.cache_addresses(all_, pairs.device) for all_ in (caches, hosts))
    copy_blocks.launch(caches, hosts, pairs, here, there)
    for got, expected in zip(hosts, want, strict=True):
        assert torch.equal(got, expected)


# --- inputs of a decode step ---


def test_prepare_decode() -> None:
    batch, max_batch, num_rows, num_table_rows, max_blocks, block_size = 8, 16, 5, 12, 6, 16
    rows = torch.randperm(num_table_rows - 1)[:num_rows] + 1
    computed = torch.tensor([0, 15, 16, 17, 95])
    updates = torch.tensor([[int(rows[2]), 1, 77], [int(rows[0]), 0, 78]])
    staged = torch.zeros(prepare_decode.staged_size(max_batch, 4), dtype=torch.int32)
    staged[:2] = torch.tensor([num_rows, len(updates)])
    header = prepare_decode.HEADER
    staged[header : header + num_rows] = rows.int()
    staged[header + max_batch : header + max_batch + num_rows] = computed.int()
    staged[header + 2 * max_batch : header + 2 * max_batch + 6] = updates.flatten().int()
    last_token = torch.randint(1, 1000, (num_table_rows,))
    table = torch.randint(1, 60, (num_table_rows, max_blocks), dtype=torch.int32)
    table[0] = 0
    want_table = table.clone()
    got, want = (prepare_decode.DecodeInputs.allocate(max_batch, torch.device("cpu")) for _ in "ab")
    prepare_decode.reference(staged, want_table, last_token, want, batch, block_size)
    prepare_decode.prepare_decode(as_if_cuda(staged), table, last_token, got, batch, block_size)
    assert torch.equal(table, want_table)
    for name in ("input_ids", "positions", "slots", "rows", "seq_lens"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.slots[2] == 77 * block_size
    assert got.slots[num_rows:batch].tolist() == [0, 0, 0]


@pytest.mark.parametrize("hidden_size", [64, 2056])
def test_embed_tokens(hidden_size: int) -> None:
    table, angle_table = torch.randn(50, hidden_size).to(BF16), torch.randn(30, 80)
    token_ids, positions = torch.tensor([49, 0, 7, 7]), torch.tensor([0, 29, 3, 11])
    assert embed_tokens.has_kernel(table)
    hidden, angles = embed_tokens.embed_tokens(as_if_cuda(token_ids), positions, table, angle_table)
    assert torch.equal(hidden, table[token_ids])
    assert torch.equal(angles, angle_table[positions])
    assert not embed_tokens.has_kernel(torch.zeros(50, 12, dtype=BF16)), "24 bytes a row"


# --- the emulator itself ---


def test_a_barrier_that_some_threads_skip_is_reported() -> None:
    code = (
        "from tests.kernels import emulator\n"
        "emulator.flatten = lambda source: '''extern \"C\" __global__ void stuck(int* x) {\n"
        "  if (threadIdx.x == 3) __shfl_xor_sync(0xffffffffu, 1, 1); else __syncthreads(); }'''\n"
        "emulator.EmulatedKernel('stuck.cu', 'stuck')((1,), (32,), (0,))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert "threads wait at barriers or shuffles that others never reach" in done.stderr
