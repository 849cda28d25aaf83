"""Rotate queries and keys by their positions, and store keys and values in the KV cache.

Contract
    qkv       [T, (Hq + 2 * Hkv) * D] bfloat16, float16 or float32, contiguous: the heads of q, k, v in
              turn; its contents are arbitrary afterwards
    cos, sin  of each token's angles, as layers/rotary.py makes them. On a CPU [T, 1, D] of qkv's dtype:
              cos twice over the two halves of a head, sin negated in the first half. On a GPU
              [T, 1, D / 2] float32 or of qkv's dtype, once and plain
    slots     int64 [T] block * block_size + offset: where each token's key and value go; slots of
              different tokens differ, but for padding tokens, which share slot 0
    k_cache, v_cache  [num_blocks, Hkv, block_size, D] of qkv's dtype, or float8_e4m3fn or float8_e5m2,
              written at `slots`. On a CPU laid out head first, so that [Hkv, num_blocks * block_size, D]
              is a view; on a GPU contiguous
    num_heads Hq
    qk_norm   [Hq + Hkv, D] weights of a per-head RMS norm of q and k before rotation, or None
    k_scale, v_scale  8-bit caches hold k / k_scale and v / v_scale, what is too large as the largest
    returns   q [T, Hq, D], rotated; a view with D contiguous

Rotation (https://arxiv.org/abs/2104.09864, halves instead of neighbouring pairs): with x = (a, b),
out = (a cos - b sin, b cos + a sin) = x * cos + swap(x) * sin for the signed sin above.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit
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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See the module's contract."""
    run = launch if qkv.is_cuda and has_kernel(qkv.dtype, k_cache.shape[3]) else reference
    return run(qkv, cos, sin, slots, k_cache, v_cache, num_heads, qk_norm, eps, k_scale, v_scale)


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
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """In torch: one rotation for q and k together, one scatter each for k and v."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    num_rotated = num_heads + num_kv_heads
    heads = qkv.view(qkv.shape[0], num_rotated + num_kv_heads, head_dim)
    qk = heads[:, :num_rotated]
    if qk_norm is not None:
        qk = rms_norm(qk, qk_norm, eps)
    if cos.shape[-1] != head_dim:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    # product and sum apart: a fused multiply-add would round differently here and there
    swapped = qk.roll(head_dim // 2, -1).to(cos.dtype)
    rotated = (qk * cos).add_(swapped.mul_(sin)).to(qk.dtype)
    scatter(k_cache, slots, quantized(rotated[:, num_heads:], k_cache.dtype, k_scale))
    scatter(v_cache, slots, quantized(heads[:, num_rotated:], v_cache.dtype, v_scale))
    return rotated[:, :num_heads]


def quantized(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """values / scale, clamped to what `dtype` holds, if that has 8 bits; else the values."""
    if dtype.itemsize != 1:
        return values
    limit = torch.finfo(dtype).max
    return (values.float() * np.float32(1 / scale)).clamp(-limit, limit).to(dtype)


def scatter(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    """cache[slot // block_size, :, slot % block_size] = values [T, Hkv, D] for each token's slot."""
    if cache.dtype.itemsize == 1:
        # indexing lacks 8-bit floats
        cache, values = cache.view(torch.uint8), values.view(torch.uint8)
    by_head = cache.transpose(0, 1)
    if by_head.is_contiguous():
        by_head.flatten(1, 2).index_copy_(1, slots, values.transpose(0, 1))
    else:
        block_size = cache.shape[2]
        cache[slots // block_size, :, slots % block_size] = values


# --- CUDA: cuda/rope_and_cache.cu ---

SOURCE, NAME = "rope_and_cache.cu", "rope_and_cache"
HEADS_PER_LANE = 3  # what a lane loads before it waits for any of it
MAX_WARPS, TARGET_WARPS = 8, 4  # in a block
FP8_DEFINES = {torch.float8_e4m3fn: "KV_E4M3", torch.float8_e5m2: "KV_E5M2"}  # kv_type.cuh


def has_kernel(dtype: torch.dtype, head_dim: int) -> bool:
    return dtype in jit.SCALARS and head_dim % 16 == 0 and head_dim <= 512


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    num_tokens, half = qkv.shape[0], head_dim // 2
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return q
    if sin.shape[-1] != half:
        sin = sin[..., -half:]  # the plain half of a spread one
    angle_stride = cos.stride(0)
    assert angle_stride == sin.stride(0), "cos and sin are parts of one table, or alike"
    assert k_cache.is_contiguous(), "a GPU's cache is contiguous"
    assert v_cache.is_contiguous(), "a GPU's cache is contiguous"
    run = kernel(
        head_dim,
        block_size,
        qkv.dtype,
        k_cache.dtype,
        qk_norm is not None,
        cos.dtype == torch.float32,
    )
    tokens, warps, parts = geometry(num_heads + 2 * num_kv_heads, head_dim)
    run(
        (-(-num_tokens // tokens), parts),
        (32, warps, tokens),
        (
            qkv.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            slots.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(),
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            np.int64(qkv.stride(0)),
            np.int64(angle_stride),
            np.int32(num_tokens),
            *scalars(num_heads, num_kv_heads, eps, k_scale, v_scale),
        ),
    )
    return q


@cache
def scalars(
    num_heads: int, num_kv_heads: int, eps: float, k_scale: float, v_scale: float
) -> tuple[np.generic, ...]:
    """As the kernel takes them, made once and not for every layer anew."""
    heads = np.int32(num_heads), np.int32(num_kv_heads)
    return *heads, np.float32(eps), np.float32(1 / k_scale), np.float32(1 / v_scale)


@cache
def geometry(num_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Tokens in a block, warps that each of them has there, and blocks that it is spread over, for
    `num_heads` of q, k and v."""
    lanes = max(2, 1 << (head_dim // 16 - 1).bit_length())  # HEAD_LANES of the kernel
    all_warps = -(-num_heads // (HEADS_PER_LANE * (32 // lanes)))
    parts = -(-all_warps // MAX_WARPS)
    warps = -(-all_warps // parts)
    return max(1, TARGET_WARPS // warps), warps, parts


@cache
def kernel(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_norm: bool,
    has_float32_angles: bool,
) -> jit.Kernel:
    spec = variant(head_dim, block_size, dtype, kv_dtype, has_norm, has_float32_angles)
    return jit.kernel(spec.source, spec.name, spec.defines)


def variant(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    has_norm: bool,
    has_float32_angles: bool = True,
) -> jit.VariantSpec:
    if kv_dtype != dtype and kv_dtype not in FP8_DEFINES:
        raise ValueError(
            f"a KV cache of {kv_dtype} for a model in {dtype}: use {dtype}, float8_e4m3fn or float8_e5m2"
        )
    defines = {
        jit.scalar_define(dtype): 1,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "HEADS_PER_LANE": HEADS_PER_LANE,
        "QK_NORM": int(has_norm),
        "ROPE_FP32": int(has_float32_angles),
    }
    if kv_dtype in FP8_DEFINES:
        defines[FP8_DEFINES[kv_dtype]] = 1
    return jit.VariantSpec(SOURCE, NAME, defines)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """With and without norms of q and k: the config does not say, and one takes 0.1 s to compile."""
    if not has_kernel(config.dtype, config.head_dim):
        return []
    return [
        variant(config.head_dim, config.block_size, config.dtype, config.kv_dtype, has_norm)
        for has_norm in (False, True)
    ]
