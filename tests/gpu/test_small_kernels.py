"""Norms, activations, rotation with cache write and block copies on a GPU, against float32 references."""

import pytest
import torch
from torch import Tensor

from engine.ops import activation, copy_blocks, embed_tokens, jit, rms_norm, rope_and_cache
from tests.gpu.conftest import Record

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = (1, 2, 3, 64, 255, 4097)
HIDDEN = (64, 576, 896, 1032, 3584, 4096, 5120, 8192, 16384)
INNER = (8, 1536, 4864, 18944)
HEADS = ((14, 2, 16), (28, 4, 64), (3, 1, 16), (64, 8, 16))  # of q, of k and v, block size
HEAD_DIMS = (64, 80, 96, 128, 256)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compile what the tests below use in a few processes at once."""
    dtypes = (BF16, FP16, FP32)
    specs = [rms_norm.variant(n, dtype) for n in HIDDEN for dtype in dtypes]
    specs += [
        activation.variant(None, dtype, name)
        for dtype in (BF16, FP16)
        for name in activation.FUNCTIONS
    ]
    specs += [
        activation.variant(n, dtype, name)
        for n in INNER
        for dtype in dtypes
        for name in activation.FUNCTIONS
    ]
    specs += [
        rope_and_cache.variant(head_dim, block_size, dtype, dtype, has_norm)
        for head_dim in HEAD_DIMS
        for block_size in (16, 64)
        for dtype in dtypes
        for has_norm in (False, True)
    ]
    jit.prebuild(specs)


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


def assert_close(got: Tensor, want: Tensor, relative: float, absolute: float, what: str) -> None:
    """As torch's, with the place of the worst element in the message."""
    assert got.shape == want.shape, what
    got, want = got.float(), want.float()
    excess = (got - want).abs() - (absolute + relative * want.abs())
    same = (got == want) | (got.isnan() & want.isnan())
    excess = excess.masked_fill(got.isnan() ^ want.isnan(), torch.inf).masked_fill(same, -torch.inf)
    worst = int(excess.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)]
    assert excess.flatten()[worst] <= 0, (
        f"{what}: at {place} got {got.flatten()[worst]}, want {want.flatten()[worst]}; "
        f"{int((excess > 0).sum())} of {excess.numel()} differ, "
        f"largest difference {(got - want).abs().nan_to_num().max()}"
    )


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


# --- norms ---


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rms_norm(dtype: torch.dtype, hidden: int) -> None:
    weight = randn(hidden, dtype=dtype)
    for num_rows in ROWS:
        x = randn(num_rows, hidden, dtype=dtype, scale=3)
        assert rms_norm.has_kernel(x, weight)
        before = x.clone()
        want = rms_norm.reference(x.float(), weight.float(), 1e-5)
        got = rms_norm.rms_norm(x, weight, 1e-5)
        assert got.dtype is dtype
        assert_close(got, want, 2 * eps(dtype) + 1e-6, 1e-5, f"rms_norm of {num_rows} rows")
        assert torch.equal(x, before), "x was changed"

        want = rms_norm.reference(x.float(), None, 1e-5)
        got = rms_norm.rms_norm(x, None, 1e-5)
        assert_close(got, want, eps(dtype) + 1e-6, 1e-6, f"{num_rows} rows without a weight")


def test_norm_of_a_strided_view_and_of_more_dimensions() -> None:
    weight = randn(896, dtype=BF16)
    wide = randn(33, 2 * 896, dtype=BF16)
    x = wide[:, 896:]
    want = rms_norm.reference(x.float(), weight.float(), 1e-6)
    assert_close(rms_norm.rms_norm(x, weight, 1e-6), want, 2 * eps(BF16), 1e-5, "strided")
    deep = randn(3, 5, 896, dtype=BF16)
    want = rms_norm.reference(deep.float(), weight.float(), 1e-6)
    assert_close(rms_norm.rms_norm(deep, weight, 1e-6), want, 2 * eps(BF16), 1e-5, "3-d")


@pytest.mark.parametrize("hidden", [896, 3584])
def test_a_row_does_not_depend_on_its_neighbours(hidden: int) -> None:
    x, weight = randn(257, hidden, dtype=BF16), randn(hidden, dtype=BF16)
    full = rms_norm.rms_norm(x, weight, 1e-6)
    for count in (1, 2, 5, 64):
        assert torch.equal(rms_norm.rms_norm(x[-count:].clone(), weight, 1e-6), full[-count:])


def test_bad_rows_stay_alone() -> None:
    """A row with NaN or infinity must not spoil others."""
    x, weight = randn(9, 896, dtype=BF16), randn(896, dtype=BF16)
    good = rms_norm.rms_norm(x, weight, 1e-6)
    x[3, 17] = torch.nan
    x[5] = torch.inf
    got = rms_norm.rms_norm(x, weight, 1e-6)
    assert got[3].isnan().all()
    keep = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(got[keep], good[keep])


@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_in_a_graph(has_weight: bool, graph_replay: Record) -> None:
    weight = randn(3584, dtype=BF16) if has_weight else None
    x, out = (torch.zeros(8, 3584, dtype=BF16, device="cuda") for _ in range(2))
    replay = graph_replay(lambda: out.copy_(rms_norm.rms_norm(x, weight, 1e-6)))
    for _ in range(2):
        x.copy_(randn(8, 3584, dtype=BF16))
        replay()
        want = rms_norm.reference(x.float(), None if weight is None else weight.float(), 1e-6)
        assert_close(out, want, 2 * eps(BF16), 1e-5, "replayed rms_norm")


# --- activations ---


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", activation.FUNCTIONS)
def test_act_and_mul(dtype: torch.dtype, name: str) -> None:
    for inner in INNER:
        for num_rows in ROWS[:-1]:
            gate_up = randn(num_rows, 2 * inner, dtype=dtype, scale=4)
            gate_up[0, :5] = torch.tensor([0.0, 90.0, -90.0, 1e3, -1e3])
            got = activation.act_and_mul(gate_up, name)
            want = activation.reference(gate_up.float(), name)
            assert got.dtype is dtype
            assert_close(got, want, 2 * eps(dtype) + 2e-6, 2e-5, f"{name} of {num_rows} x {inner}")


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", activation.FUNCTIONS)
def test_act_and_mul_of_interleaved_columns(dtype: torch.dtype, name: str) -> None:
    """The same bits as of the same numbers side by side, for which there are references."""
    for inner in INNER:
        for num_rows in ROWS[:-1]:
            gate, up = (randn(num_rows, inner, dtype=dtype, scale=4) for _ in range(2))
            pairs = (gate.view(num_rows, -1, 8), up.view(num_rows, -1, 8))
            gate_up = torch.stack(pairs, 2).flatten(1)
            assert activation.has_kernel(gate_up, interleaved=True)
            got = activation.act_and_mul(gate_up, name, interleaved=True)
            want = activation.act_and_mul(torch.cat((gate, up), -1), name)
            assert torch.equal(got, want), f"{name} of {num_rows} x {inner}"


def test_activation_of_many_rows_and_in_a_graph(graph_replay: Record) -> None:
    gate_up = randn(70_000, 2 * 256, dtype=BF16)
    want = activation.reference(gate_up.float())
    assert_close(activation.silu_and_mul(gate_up), want, 2 * eps(BF16), 1e-6, "70000 rows")
    static = torch.zeros(16, 2 * 4864, dtype=BF16, device="cuda")
    out = torch.zeros(16, 4864, dtype=BF16, device="cuda")
    replay = graph_replay(lambda: out.copy_(activation.silu_and_mul(static)))
    static.copy_(randn(16, 2 * 4864, dtype=BF16))
    replay()
    assert_close(out, activation.reference(static.float()), 2 * eps(BF16), 1e-6, "replayed")


# --- rotation and cache ---


def angles(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    theta = 100 * torch.rand(num_tokens, head_dim // 2, device="cuda")
    return torch.cat((theta.cos(), theta.sin()), -1).unsqueeze(1).chunk(2, -1)


def check_rope(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    has_norm: bool,
    num_tokens: int,
) -> None:
    num_blocks, scales = 3 + -(-num_tokens // block_size), (0.5, 2.0)
    norm = randn(num_heads + num_kv_heads, head_dim, dtype=dtype) if has_norm else None
    qkv = randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    cos, sin = angles(num_tokens, head_dim)
    order = torch.randperm((num_blocks - 1) * block_size, device="cuda")
    slots = order[:num_tokens] + block_size
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    got = [torch.full(shape, torch.nan, device="cuda").to(kv_dtype) for _ in range(2)]
    want = [torch.full(shape, torch.nan, device="cuda") for _ in range(2)]
    q = rope_and_cache.rope_and_cache(qkv, cos, sin, slots, *got, num_heads, norm, 1e-5, *scales)
    q_want = rope_and_cache.reference(
        qkv.float(), cos, sin, slots, *want, num_heads, None if norm is None else norm.float(), 1e-5
    )
    what = f"{num_tokens} tokens, {num_heads}/{num_kv_heads} heads of {head_dim}"
    # the norm is rounded twice before rotation, and rotation may cancel
    loose = (32 if has_norm else 4) * eps(dtype) + (2e-5 if dtype is FP32 else 0)
    assert_close(q, q_want, 2 * eps(dtype), loose, f"q, {what}")
    for name, cache, expected, scale in zip("kv", got, want, scales, strict=True):
        values = cache.float()
        if kv_dtype is not dtype:
            limit = torch.finfo(kv_dtype).max
            expected = (expected / scale).clamp(-limit, limit)
        assert_close(
            values,
            expected,
            2 * eps(dtype) + (eps(kv_dtype) if kv_dtype is not dtype else 0),
            loose / min(scales) + (0.01 if kv_dtype is not dtype else 0),
            f"{name} cache, {what}",
        )
        if kv_dtype is dtype and name == "v":
            written = values.transpose(1, 2).flatten(0, 1)[slots]
            plain = qkv.view(num_tokens, -1, head_dim)[:, num_heads + num_kv_heads :]
            assert torch.equal(written, plain.float()), "values are copied as they are"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache(dtype: torch.dtype, head_dim: int, has_norm: bool) -> None:
    for num_heads, num_kv_heads, block_size in HEADS:
        for num_tokens in (1, 5, 301):
            check_rope(
                dtype, dtype, head_dim, num_heads, num_kv_heads, block_size, has_norm, num_tokens
            )


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_into_an_8_bit_cache(kv_dtype: torch.dtype, head_dim: int) -> None:
    for dtype, has_norm in ((BF16, False), (FP16, True)):
        for num_tokens in (1, 77):
            check_rope(dtype, kv_dtype, head_dim, 8, 2, 16, has_norm, num_tokens)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_conversion_to_8_bits_equals_torchs(kv_dtype: torch.dtype) -> None:
    """All float16 values, infinities as well, through v, which is copied without rotation."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cuda").to(torch.int16)
    values = bits.view(FP16)
    values = torch.where(values.isnan(), torch.zeros_like(values), values)
    num_kv_heads, head_dim, block_size = 16, 64, 16
    num_tokens = values.numel() // (num_kv_heads * head_dim)
    qkv = torch.zeros(num_tokens, 3 * num_kv_heads, head_dim, dtype=FP16, device="cuda")
    qkv[:, 2 * num_kv_heads :] = values.view(num_tokens, num_kv_heads, head_dim)
    shape = (num_tokens // block_size, num_kv_heads, block_size, head_dim)
    caches = [torch.zeros(shape, device="cuda").to(kv_dtype) for _ in range(2)]
    cos, sin = angles(num_tokens, head_dim)
    slots = torch.arange(num_tokens, device="cuda")
    rope_and_cache.rope_and_cache(qkv.flatten(1), cos, sin, slots, *caches, num_kv_heads)
    got = caches[1].view(torch.uint8).transpose(1, 2).flatten()
    limit = torch.finfo(kv_dtype).max
    want = values.float().clamp(-limit, limit).to(kv_dtype).view(torch.uint8)
    wrong = (got != want).nonzero().flatten()
    assert wrong.numel() == 0, (values[wrong][:8], got[wrong][:8], want[wrong][:8])


def test_padding_tokens_share_slot_0() -> None:
    head_dim, num_tokens = 128, 64
    qkv = randn(num_tokens, 12 * head_dim, dtype=BF16)
    slots = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
    slots[0] = 5 * 16 + 3
    caches = [torch.zeros(8, 2, 16, head_dim, dtype=BF16, device="cuda") for _ in range(2)]
    rope_and_cache.rope_and_cache(qkv, *angles(num_tokens, head_dim), slots, *caches, 8)
    for cache in caches:
        used = cache.transpose(1, 2).flatten(0, 1).flatten(1).any(1)
        assert used.nonzero().flatten().tolist() == [0, 83]


def test_rope_in_a_graph(graph_replay: Record) -> None:
    num_tokens, head_dim = 8, 64
    qkv = torch.zeros(num_tokens, 18 * head_dim, dtype=BF16, device="cuda")
    table = torch.cat(angles(100, head_dim), -1)
    positions, slots = (torch.zeros(num_tokens, dtype=torch.int64, device="cuda") for _ in range(2))
    caches = [torch.zeros(9, 2, 16, head_dim, dtype=BF16, device="cuda") for _ in range(2)]
    out = torch.zeros(num_tokens, 14, head_dim, dtype=BF16, device="cuda")

    def work() -> None:
        cos, sin = table[positions].chunk(2, -1)
        out.copy_(rope_and_cache.rope_and_cache(qkv, cos, sin, slots, *caches, 14))

    replay = graph_replay(work)
    for _ in range(2):
        qkv.copy_(randn(num_tokens, 18 * head_dim, dtype=BF16))
        positions.copy_(torch.randint(0, 100, (num_tokens,)))
        slots.copy_(torch.randperm(8 * 16)[:num_tokens] + 16)
        replay()
        cos, sin = table[positions].chunk(2, -1)
        want = [torch.zeros(9, 2, 16, head_dim, device="cuda") for _ in range(2)]
        q = rope_and_cache.reference(qkv.float(), cos, sin, slots, *want, 14)
        assert_close(out, q, 2 * eps(BF16), 4 * eps(BF16), "replayed q")
        for cache, expected in zip(caches, want, strict=True):
            rows = [c.transpose(1, 2).flatten(0, 1)[slots] for c in (cache, expected)]
            assert_close(*rows, 2 * eps(BF16), 4 * eps(BF16), "replayed cache")


# --- block copies ---


@pytest.mark.parametrize("dtype", [BF16, torch.uint8])
@pytest.mark.parametrize("shape", [(64, 4, 64, 128), (33, 2, 16, 64), (9, 1, 16, 80)])
def test_copy_blocks(shape: tuple[int, ...], dtype: torch.dtype, graph_replay: Record) -> None:
    caches = [torch.randint(0, 250, shape, device="cuda").to(dtype) for _ in range(10)]
    addresses = copy_blocks.cache_addresses(caches, caches[0].device)
    pairs = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    replay = graph_replay(
        lambda: copy_blocks.copy_blocks(caches, caches, pairs, addresses, addresses)
    )
    for _ in range(2):
        blocks = torch.randperm(shape[0] - 1)[:5] + 1
        sources, targets = blocks[[0, 0, 1]], blocks[[2, 3, 4]]
        pairs.copy_(torch.stack((sources, targets), 1))
        want = [one.clone() for one in caches]
        copy_blocks.reference(want, want, pairs)
        replay()
        for index, (got, expected) in enumerate(zip(caches, want, strict=True)):
            assert torch.equal(got, expected), f"cache {index}"


# --- embedding and angles ---


@pytest.mark.parametrize("num_tokens", [1, 33, 4099])
def test_embed_tokens(num_tokens: int, graph_replay: Record) -> None:
    table, angle_table = randn(1000, 896, dtype=BF16), randn(2048, 64, dtype=FP32)
    token_ids, positions = torch.zeros(2, num_tokens, dtype=torch.int64, device="cuda")
    got: list[Tensor] = []

    def work() -> None:
        got[:] = embed_tokens.embed_tokens(token_ids, positions, table, angle_table)

    replay = graph_replay(work)
    for _ in range(2):
        token_ids.copy_(torch.randint(0, 1000, (num_tokens,)))
        positions.copy_(torch.randint(0, 2048, (num_tokens,)))
        replay()
        assert torch.equal(got[0], table[token_ids])
        assert torch.equal(got[1], angle_table[positions])
