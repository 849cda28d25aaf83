"""Attention of one new token per row, straight from the qkv product: rope_and_cache and paged_decode in one.

Contract
    qkv      [B, (num_heads + 2 * num_kv_heads) * D] as the product wrote it, contiguous
    cos, sin [B, 1, D / 2 or more] and
    qk_norm, eps    as in ops.rope_and_cache
    the other arguments as in ops.paged_decode; B is the plan's batch, and each row has an item or several

    = paged_decode(rope_and_cache(qkv, ...), ...), bit for bit: q, k and v are rounded at the same places

A row's newest token is the last one of its last item: that is where its key and value go in the caches, and
what is read in its place are these. It must be in a block that no other row writes to or reads from (padding
rows, whose results do not count, may share theirs).

On a GPU this is a variant of the kernel paged_decode: nothing but qkv comes from the kernel in front, so the
caches' tiles are on their way while that one ends.
"""

import numpy as np
import torch
from torch import Tensor

from engine.ops import paged_decode, rope_and_cache
from engine.ops.paged_decode import DecodeScratch
from engine.ops.plan_decode import ITEM_FIELDS, DecodePlan


def rotated_decode(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """See the module's contract."""
    if qkv.is_cuda:
        launch(
            qkv, cos, sin, k_cache, v_cache, block_table, plan, scratch, scale, out,
            softcap, k_scale, v_scale, qk_norm, eps,
        )  # fmt: skip
        return
    slots = newest_slots(plan, block_table, k_cache.shape[2])
    q = rope_and_cache.reference(
        qkv, cos, sin, slots, k_cache, v_cache, out.shape[1], qk_norm, eps, k_scale, v_scale
    )
    out.copy_(
        paged_decode.reference(
            q, k_cache, v_cache, block_table, plan, scale, softcap, k_scale, v_scale
        )
    )


def newest_slots(plan: DecodePlan, block_table: Tensor, block_size: int) -> Tensor:
    """int64 [B] slot of each row's newest token, by the plan; 0 for rows without tokens."""
    slots = torch.zeros(plan.batch, dtype=torch.int64)
    for values in plan.items[: int(plan.num_items)].tolist():
        item = dict(zip(ITEM_FIELDS, values, strict=True))
        is_last = item["part"] < 0 or item["part"] == item["first_part"] + item["num_parts"] - 1
        if is_last and item["end"] > item["begin"]:
            block, offset = divmod(item["end"] - 1, block_size)
            slots[item["row"]] = block_table[item["table_row"], block] * block_size + offset
    return slots.to(block_table.device)


def launch(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    plan: DecodePlan,
    scratch: DecodeScratch,
    scale: float,
    out: Tensor,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    qk_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Raises ValueError for layouts outside the contract."""
    num_heads, head_dim = out.shape[1:]
    assert qkv.is_contiguous(), "qkv is the output of a product"
    assert qkv.shape == (plan.batch, (num_heads + 2 * k_cache.shape[1]) * head_dim)
    paged_decode.check_layout(out, k_cache, v_cache, out)
    sin = sin[..., -(head_dim // 2) :]  # the plain half of a spread one
    assert cos.stride(0) == sin.stride(0), "cos and sin are parts of one table, or alike"
    paged_decode.run(
        qkv, qkv.stride(0), k_cache, v_cache, block_table, plan, scratch, scale, out,
        softcap, k_scale, v_scale, cos.dtype,
        (
            cos.data_ptr(),
            sin.data_ptr(),
            0 if qk_norm is None else qk_norm.data_ptr(),
            np.int64(cos.stride(0)),
            np.float32(eps),
            np.float32(1 / k_scale),
            np.float32(1 / v_scale),
        ),
    )  # fmt: skip
