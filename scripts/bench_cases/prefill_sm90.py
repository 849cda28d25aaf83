"""Prefill attention on Hopper: whole prompts and a chunk behind a long prefix.

Head sizes with several tilings are timed with each: which one a step takes, `plan_items` estimates."""

from functools import partial
from itertools import accumulate

import torch

from engine.ops import jit
from engine.ops.paged_prefill import work_items
from engine.ops.paged_prefill_sm90 import TILINGS, Tiling, paged_prefill_sm90
from scripts.bench_cases import Case, Launch

Heads = tuple[int, int, int]  # query heads, KV heads, head_dim

SHAPES: dict[str, Heads] = {"7B": (28, 4, 128), "8B": (32, 8, 128), "0.5B": (14, 2, 64)}
BATCHES = {  # name: (sequences, q_len, kv_len)
    "16 x 512": (16, 512, 512),
    "4 x 2k": (4, 2048, 2048),
    "1 x 2k": (1, 2048, 2048),
    "1 x 8k": (1, 8192, 8192),
    "1 x 16k": (1, 16384, 16384),
    "2k behind 30k": (1, 2048, 32768),
}


def setup(
    heads: Heads, block_size: int, batch: tuple[int, int, int], tiling: Tiling, copies: int
) -> list[Launch]:
    """Tables point at scattered blocks. Buffers are shared: attention is bound by arithmetic."""
    num_heads, num_kv_heads, head_dim = heads
    sequences, q_len, kv_len = batch
    per_sequence = -(-kv_len // block_size)
    num_blocks = 1 + sequences * per_sequence
    cache_shape = (num_blocks, num_kv_heads, block_size, head_dim)
    keys, values = (torch.randn(cache_shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    placement = 1 + torch.randperm(num_blocks - 1, device="cuda", dtype=torch.int32)
    table = placement.view(sequences, per_sequence)
    rows = torch.arange(sequences, device="cuda", dtype=torch.int32)
    q_lens, kv_lens = [q_len] * sequences, [kv_len] * sequences
    work = torch.from_numpy(work_items(q_lens, kv_lens, tiling.queries)).cuda()
    q_start = torch.tensor([*accumulate([0, *q_lens])][:-1], device="cuda", dtype=torch.int32)
    shape = (sequences * q_len, num_heads, head_dim)
    q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    tensors = q, keys, values, table, rows, work, q_start
    launch = partial(paged_prefill_sm90, *tensors, head_dim**-0.5, out, tiling=tiling)
    return [launch] * copies


def num_flops(heads: Heads, batch: tuple[int, int, int]) -> float:
    """Of the two products, where the causal mask leaves something."""
    sequences, q_len, kv_len = batch
    return 4.0 * sequences * q_len * (kv_len - q_len / 2) * heads[0] * heads[2]


def num_bytes(heads: Heads, batch: tuple[int, int, int]) -> float:
    num_heads, num_kv_heads, head_dim = heads
    sequences, q_len, kv_len = batch
    return 4.0 * sequences * head_dim * (q_len * num_heads + kv_len * num_kv_heads)


def bench_cases() -> list[Case]:
    if torch.cuda.is_available() and jit.device_arch() != "sm_90a":
        return []
    return [
        Case(
            f"prefill_sm90 {model}, blocks of {block_size}, items of {tiling.queries}, {name}",
            partial(setup, heads, block_size, batch, tiling),
            num_bytes(heads, batch),
            num_flops(heads, batch),
        )
        for model, heads in SHAPES.items()
        for tiling in TILINGS[heads[2]]
        for block_size in (16, 64, 128)
        for name, batch in BATCHES.items()
        if block_size == 64 or name in ("1 x 8k", "2k behind 30k")
    ]
