"""Operations against their definitions, and rows that do not depend on their neighbours."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from engine.attention.base import allocate_kv_cache
from engine.ops import activation, linear, rms_norm
from engine.ops.rope_and_cache import rope_and_cache

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")
MAX_ROWS = 200


@pytest.fixture(params=[1, 2, 5, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Also counts that do not divide the sizes, so that threads cut rows in two if they can."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(dtype)


def assert_rows_are_independent(operation: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The result of the first and of the last m rows alone equals theirs among all rows."""
    full = operation(x.clone())
    for m in (2, 3, 8, 17, 23, 32, 33, 65, 127, 199):
        if m < x.shape[0]:
            assert torch.equal(operation(x[:m].clone()), full[:m]), f"first {m} rows"
            assert torch.equal(operation(x[-m:].clone()), full[-m:]), f"last {m} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (576, 576), (1000, 60), (3072, 576), (64, 1536)])
def test_linear(n: int, k: int, dtype: torch.dtype, threads: int) -> None:
    weight = random(n, k, dtype=dtype) * k**-0.5
    bias = random(n, dtype=dtype, seed=1)
    packed = linear.pack_weight(weight.clone())
    x = random(MAX_ROWS if n * k < 10**6 else 40, k, dtype=dtype, seed=2)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    for b in (None, bias):
        want = linear.reference(x.float(), weight.float(), None if b is None else b.float())
        got = linear.linear(x, packed, b)
        assert got.dtype is dtype
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
    if packed.is_mkldnn:
        assert_rows_are_independent(lambda rows: linear.linear(rows, packed, bias), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [64, 576, 1000])
def test_rms_norm(n: int, dtype: torch.dtype, threads: int) -> None:
    x, weight = random(MAX_ROWS, n, dtype=dtype), random(n, dtype=dtype, seed=1)
    got = rms_norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(got, rms_norm.reference(x, weight, 1e-5), rtol=1e-6, atol=1e-6)
    assert_rows_are_independent(lambda rows: rms_norm.rms_norm(rows, weight, 1e-5), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [128, 1000, 1536, 40_000])
def test_silu_and_mul(n: int, dtype: torch.dtype, threads: int) -> None:
    x = random(MAX_ROWS if n < 10_000 else 20, 2 * n, dtype=dtype)
    got = activation.silu_and_mul(x)
    want = activation.reference(x)
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    assert_rows_are_independent(activation.silu_and_mul, x)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8, 64])
def test_row_groups_cover_each_row_once(num_threads: int) -> None:
    for width in (7, 1536, 14336, 40_000):
        for num_rows in (1, 2, 21, 22, 64, 511, 512):
            groups = activation.row_groups(num_rows, width, num_threads)
            covered = [row for rows in groups for row in range(rows.start, rows.stop)]
            assert covered == list(range(num_rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_cache(has_norm: bool, dtype: torch.dtype, threads: int) -> None:
    num_heads, num_kv_heads, head_dim, block_size, num_tokens = 6, 2, 16, 4, 40
    half = head_dim // 2
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = random(num_tokens, width, dtype=dtype)
    angles = random(num_tokens, half, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    spread = torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]
    norm = random(num_heads + num_kv_heads, head_dim, dtype=dtype, seed=2) if has_norm else None
    slots = torch.randperm(15 * block_size, generator=torch.Generator().manual_seed(3)) + block_size

    def run(rows: Tensor | slice) -> tuple[Tensor, Tensor, Tensor]:
        kv = allocate_kv_cache(1, 16, num_kv_heads, block_size, head_dim, dtype, CPU)
        turned = spread[0][rows], spread[1][rows]
        q = rope_and_cache(
            qkv[rows].clone(),
            *turned,
            slots[:num_tokens][rows],
            kv.k[0],
            kv.v[0],
            num_heads,
            norm,
            1e-5,
        )
        return q, kv.k[0], kv.v[0]

    q, k_cache, v_cache = run(slice(0, num_tokens))
    heads = qkv.view(num_tokens, -1, head_dim)
    for token in range(num_tokens):
        block, offset = divmod(int(slots[token]), block_size)
        for head in range(num_heads + num_kv_heads):
            x = heads[token, head]
            if norm is not None:
                x = rms_norm.reference(x, norm[head], 1e-5)
            a, b = x[:half], x[half:]
            c, s = cos[token], sin[token]
            want = torch.cat((a * c - b * s, b * c + a * s))
            got = q[token, head] if head < num_heads else k_cache[block, head - num_heads, offset]
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert torch.equal(v_cache[block, :, offset], heads[token, num_heads + num_kv_heads :])
    written = torch.zeros(16 * block_size, dtype=torch.bool)
    written[slots[:num_tokens]] = True
    untouched = k_cache.transpose(1, 2).flatten(0, 1)[~written]
    assert not untouched.any(), "a slot of no token was written"

    for m in (2, 3, 17):
        alone, k_alone, _ = run(slice(0, m))
        assert torch.equal(alone, q[:m])
        for token in range(m):
            block, offset = divmod(int(slots[token]), block_size)
            assert torch.equal(k_alone[block, :, offset], k_cache[block, :, offset])


def test_a_block_major_cache_is_written_as_well() -> None:
    """The layout of a GPU's cache, on which the reference must be able to check a kernel."""
    cos, sin = torch.ones(3, 1, 8), torch.zeros(3, 1, 8)
    qkv = random(3, 4 * 8, dtype=torch.float32)
    k_cache, v_cache = torch.zeros(4, 1, 2, 8), torch.zeros(4, 1, 2, 8)
    rope_and_cache(qkv, cos, sin, torch.tensor([2, 3, 6]), k_cache, v_cache, num_heads=2)
    assert torch.equal(k_cache[1, 0], qkv[:2, 16:24])
    assert torch.equal(v_cache[3, 0, 0], qkv[2, 24:])
