"""Attention in float32 over a paged KV cache, decode rows and prompt chunks alike.

For comparing a GPU's numbers with a CPU's: plain and exact, a tenth as fast as the other kernels or less.

Contract
    q            [T, num_heads, D] float32; heads contiguous
    k_cache      [num_blocks, num_kv_heads, block_size, D] float32, contiguous. Query head h reads KV head
    v_cache      h // (num_heads // num_kv_heads)
    block_table  int32 [table rows, max_blocks]; what lies behind a token is not read
    rows         int32 [T] row of the block table that each token belongs to
    lens         int32 [T] each token's position + 1: it sees that many tokens of its row; 0 gives zeros
    out          [T, num_heads, D] float32, contiguous; overwritten
    window       a token sees itself and window - 1 tokens before it; None: all before it
    softcap      0: none; else scores become softcap * tanh(score / softcap)

    out = softmax(q K^T * scale) V

A token's result does not depend on the other tokens of the call. Within a CUDA graph all tensors stay and
their contents change.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.paged_decode import gather

THREADS = 128


def paged_attention_f32(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
) -> None:
    """See the module's contract."""
    run = launch if q.is_cuda else reference
    run(q, k_cache, v_cache, block_table, rows, lens, scale, out, window, softcap)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    out: Tensor,
    window: int | None = None,
    softcap: float = 0.0,
) -> None:
    """Token by token."""
    group = q.shape[1] // k_cache.shape[1]
    for token, (row, end) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        begin = max(0, end - window) if window else 0
        keys, values = (
            gather(tensor, block_table[row], begin, end).repeat_interleave(group, 0)
            for tensor in (k_cache, v_cache)
        )  # [num_heads, visible, D]
        scores = (keys @ q[token, :, :, None])[..., 0] * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        out[token] = (torch.softmax(scores, -1)[:, None] @ values)[:, 0]


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    rows: Tensor,
    lens: Tensor,
    scale: float,
    out: Tensor,
    window: int | None,
    softcap: float,
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    assert q.dtype is k_cache.dtype is out.dtype is torch.float32
    assert rows.dtype is lens.dtype is torch.int32
    assert q.stride()[1:] == (head_dim, 1), "heads must be contiguous"
    assert k_cache.is_contiguous(), "a GPU's cache is contiguous"
    assert v_cache.is_contiguous(), "a GPU's cache is contiguous"
    assert out.is_contiguous()
    if num_tokens == 0:
        return
    kernel(head_dim)(
        (num_tokens, num_heads),
        (THREADS,),
        (
            out.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            block_table.data_ptr(),
            rows.data_ptr(),
            lens.data_ptr(),
            np.int64(q.stride(0)),
            np.int32(block_table.stride(0)),
            np.int32(num_kv_heads),
            np.int32(block_size),
            np.int32(window or 0),
            np.float32(scale),
            np.float32(softcap),
        ),
    )


@cache
def kernel(head_dim: int) -> jit.Kernel:
    spec = variant(head_dim)
    return jit.kernel(spec.source, spec.name, spec.defines)


def variant(head_dim: int) -> jit.VariantSpec:
    return jit.VariantSpec("paged_attention_f32.cu", "paged_attention_f32", {"HEAD_DIM": head_dim})


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    return [variant(config.head_dim)] if config.dtype is torch.float32 else []
