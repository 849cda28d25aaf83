"""Norms, activations, rotation with cache write, and block copies: bound by memory, or by latency."""

import torch

from engine.ops import activation, copy_blocks, rms_norm, rope_and_cache
from scripts.bench_cases import Case, Launch

BF16 = torch.bfloat16
FEW_TOKENS, MANY_TOKENS = (1, 64, 256), (4096, 16384)
BLOCK_SIZE = 64


def bench_cases() -> list[Case]:
    cases = []
    for tokens in (*FEW_TOKENS, *MANY_TOKENS):
        for hidden in (896, 3584, 8192):
            cases.append(norm(tokens, hidden))
        for inner in (4864, 18944):
            cases += [silu(tokens, inner, interleaved) for interleaved in (True, False)]
        cases += [
            rope(tokens, 14, 2, 64, False),
            rope(tokens, 28, 4, 128, False),
            rope(tokens, 32, 8, 128, True),
            rope(tokens, 32, 8, 128, False, torch.float8_e4m3fn),
        ]
    return [
        *cases,
        block_copy(64),
        *(swap(count, out) for count in (4, 64) for out in (True, False)),
    ]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(BF16)


def norm(tokens: int, hidden: int) -> Case:
    def setup(copies: int) -> list[Launch]:
        weight = randn(hidden)

        def one() -> Launch:
            x = randn(tokens, hidden)
            return lambda: rms_norm.rms_norm(x, weight, 1e-6)

        return [one() for _ in range(copies)]

    return Case(f"rms_norm T={tokens} N={hidden}", setup, num_bytes=2 * 2 * tokens * hidden)


def silu(tokens: int, inner: int, interleaved: bool) -> Case:
    def setup(copies: int) -> list[Launch]:
        def one() -> Launch:
            gate_up = randn(tokens, 2 * inner)
            return lambda: activation.silu_and_mul(gate_up, interleaved)

        return [one() for _ in range(copies)]

    name = f"silu_and_mul T={tokens} N={inner}{' interleaved' if interleaved else ''}"
    return Case(name, setup, num_bytes=3 * 2 * tokens * inner)


def rope(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    has_norm: bool,
    kv_dtype: torch.dtype = BF16,
) -> Case:
    width = (num_heads + 2 * num_kv_heads) * head_dim

    def setup(copies: int) -> list[Launch]:
        num_blocks = 1 + -(-tokens // BLOCK_SIZE)
        norm_weight = randn(num_heads + num_kv_heads, head_dim) if has_norm else None
        angles = torch.rand(tokens, 1, head_dim, device="cuda").chunk(2, -1)

        def one() -> Launch:
            qkv = randn(tokens, width)
            shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
            caches = [torch.zeros(shape, dtype=BF16, device="cuda").to(kv_dtype) for _ in "kv"]
            slots = BLOCK_SIZE + torch.arange(tokens, device="cuda")
            return lambda: rope_and_cache.rope_and_cache(
                qkv, *angles, slots, *caches, num_heads, norm_weight
            )

        return [one() for _ in range(copies)]

    per_token = (
        2 * (width + num_heads * head_dim)
        + 2 * num_kv_heads * head_dim * kv_dtype.itemsize
        + 4 * head_dim
        + 8
    )
    kind = f"rope_and_cache{' norm' if has_norm else ''}{' fp8' if kv_dtype.itemsize == 1 else ''}"
    return Case(
        f"{kind} T={tokens} {num_heads}/{num_kv_heads}x{head_dim}",
        setup,
        num_bytes=tokens * per_token,
    )


def block_copy(num_pairs: int) -> Case:
    num_caches, shape = 56, (2 * num_pairs + 1, 4, BLOCK_SIZE, 128)
    block_bytes = 4 * BLOCK_SIZE * 128 * 2

    def setup(copies: int) -> list[Launch]:
        caches = [torch.zeros(shape, dtype=BF16, device="cuda") for _ in range(num_caches)]
        addresses = copy_blocks.cache_addresses(caches, caches[0].device)
        blocks = 1 + torch.randperm(2 * num_pairs, device="cuda")
        pairs = blocks.view(num_pairs, 2).contiguous()
        return [lambda: copy_blocks.copy_blocks(caches, caches, pairs, addresses, addresses)]

    return Case(
        f"copy_blocks {num_pairs} pairs x {num_caches} caches",
        setup,
        num_bytes=2 * num_pairs * num_caches * block_bytes,
    )


def swap(num_pairs: int, is_out: bool) -> Case:
    """To pinned host memory or from it: compare with the bus, not with the device's memory."""
    num_caches, shape = 56, (num_pairs + 1, 4, BLOCK_SIZE, 128)
    block_bytes = 4 * BLOCK_SIZE * 128 * 2

    def setup(copies: int) -> list[Launch]:
        def one() -> Launch:
            caches = [torch.zeros(shape, dtype=BF16, device="cuda") for _ in range(num_caches)]
            hosts = list(torch.zeros((num_caches, *shape), dtype=BF16, pin_memory=True))
            here, there = (
                copy_blocks.cache_addresses(some, caches[0].device) for some in (caches, hosts)
            )
            blocks = [1 + torch.randperm(num_pairs, device="cuda") for _ in range(2)]
            pairs = torch.stack(blocks, 1)
            if is_out:
                return lambda: copy_blocks.copy_blocks(caches, hosts, pairs, here, there)
            return lambda: copy_blocks.copy_blocks(hosts, caches, pairs, there, here)

        return [one() for _ in range(copies)]

    direction = "device to host" if is_out else "host to device"
    return Case(
        f"copy_blocks {direction} {num_pairs} pairs x {num_caches} caches",
        setup,
        num_bytes=num_pairs * num_caches * block_bytes,
    )
