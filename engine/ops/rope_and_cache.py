"""Rotate queries and keys by their positions, and store keys and values in the KV cache.

Contract
    qkv       [T, (Hq + 2 * Hkv) * D] bfloat16 or float32, contiguous: the heads of q, k, v in turn;
              its contents are arbitrary afterwards
    cos, sin  [T, 1, D] of qkv's dtype, as layers/rotary.py makes them: cos twice over the two halves
              of a head, sin negated in the first half
    slots     int64 [T] block * block_size + offset: where each token's key and value go; slots of
              different tokens differ, but for padding tokens, which share slot 0
    k_cache, v_cache  [num_blocks, Hkv, block_size, D] of qkv's dtype, written at `slots`. On a CPU
              laid out head first, so that [Hkv, num_blocks * block_size, D] is a view
    num_heads Hq
    qk_norm   [Hq + Hkv, D] weights of a per-head RMS norm of q and k before rotation, or None
    returns   q [T, Hq, D], rotated; a view with D contiguous

Rotation (https://arxiv.org/abs/2104.09864, halves instead of neighbouring pairs): with x = (a, b),
out = (a cos - b sin, b cos + a sin) = x * cos + swap(x) * sin for the signed sin above.
"""

from torch import Tensor

from engine.ops.rms_norm import rms_norm


def rope_and_cache(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """See the module's contract."""
    return reference(qkv, cos, sin, slots, k_cache, v_cache, num_heads, qk_norm, eps)


def reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """In torch: one rotation for q and k together, one scatter each for k and v."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_rotated = num_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], num_rotated + num_kv_heads, head_dim)
    qk = heads[:, :num_rotated]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    # product and sum apart: a fused multiply-add would round differently here and there
    swapped = qk.roll(head_dim // 2, -1)
    rotated = (qk * cos).add_(swapped.mul_(sin))
    scatter(k_cache, slots, rotated[:, num_heads:])
    scatter(v_cache, slots, heads[:, num_rotated:])
    return rotated[:, :num_heads]


def scatter(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """cache[slot // block_size, :, slot % block_size] = values [T, Hkv, D] for each token's slot."""
    by_head = cache.transpose(0, 1)
    if by_head.is_contiguous():
        by_head.flatten(1, 2).index_copy_(1, slots, values.transpose(0, 1))
    else:
        block_size = cache.shape[2]
        cache[slots // block_size, :, slots % block_size] = values
