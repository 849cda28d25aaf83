"""Paged attention on a GPU: decode rows through one kernel, prompt chunks through another.

    tokens     d0 d1 d2 ... dn   p p p p p p p   p p p p ...      decode rows first, one token each
    kernel     paged_decode      paged_prefill or its Hopper version
    work list  made on the       made on the host with the plan, as steps with chunks are never
               device            captured in a CUDA graph

In steps without chunks, paged_decode also does what rope_and_cache does ahead of it in others.

Work lists are made once per step and read by every layer. The decode list lives in static buffers, so
that a captured step can make a new one at each replay (`plan_on_device`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import (
    AttentionSpec,
    GraphAttention,
    KVCache,
    NewTokens,
    StepInputs,
)
from engine.ops import jit, paged_prefill_sm90
from engine.ops.paged_decode import DecodeScratch, paged_decode, plan_limits
from engine.ops.paged_prefill import paged_prefill, queries_per_item, work_items
from engine.ops.plan_decode import DecodePlan, plan_decode
from engine.ops.rotated_decode import rotated_decode

# Shorter chunks leave most of the Hopper kernel's rows of one head empty; the other packs heads.
MIN_HOPPER_QUERIES = 64


@dataclass(slots=True)
class PrefillPlan:
    """Chunks of a step, on the device. Row i of them is batch row num_decodes + i."""

    rows: Tensor  # int32 [rows] of the block table
    q_start: Tensor  # int32 [rows]
    work: list[
        tuple[Callable[..., None], Tensor]
    ]  # kernels to launch, and the int32 [items, 4] of each


class PagedAttention(GraphAttention):
    """GraphAttention for 16-bit dtypes on CUDA devices. Not for use by two steps at once (it owns scratch).

    deterministic: a row's result does not depend on the other rows of the step. Costs speed when few
    rows with long contexts share the device.
    """

    def __init__(
        self,
        kv: KVCache,
        specs: Sequence[AttentionSpec],
        max_batch: int,
        max_model_len: int,
        device: torch.device,
        deterministic: bool = False,
    ) -> None:
        """Raises ValueError for head sizes or groups that kernels do not take."""
        spec = specs[0]
        self.kv = kv
        self.device = device
        self.num_heads = spec.num_heads
        arch = jit.device_arch(device.index)
        kv_dtype = kv.k[0].dtype
        self.queries_per_item = queries_per_item(
            spec.head_dim, spec.num_heads // spec.num_kv_heads, arch
        )
        limits = plan_limits(
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            kv_dtype,
            max_model_len,
            deterministic,
            device,
        )
        self.decode_plans = {
            window: DecodePlan.allocate(limits, max_batch, device)
            for window in dict.fromkeys(s.sliding_window for s in specs)
        }
        self.scratch = DecodeScratch.allocate(
            limits, max_batch, spec.num_heads, spec.head_dim, device
        )
        self.min_hopper_queries = 1 << 30  # never
        self.hopper_tilings: tuple[paged_prefill_sm90.Tiling, ...] = ()
        self.kernels = "paged_decode, paged_prefill"
        if paged_prefill_sm90.supports(spec.head_dim, kv_dtype, kv.block_size, arch):
            self.min_hopper_queries = 1 if deterministic else MIN_HOPPER_QUERIES
            capped = {s.softcap > 0 for s in specs}
            self.hopper_tilings = paged_prefill_sm90.tilings(spec.head_dim, any(capped))
            for tiling, softcap in product(self.hopper_tilings, capped):  # ahead of the first need
                paged_prefill_sm90.load(
                    tiling, spec.head_dim, kv_dtype, kv.block_size, softcap, device.index
                )
            self.kernels += f", from {self.min_hopper_queries} tokens on paged_prefill_sm90"
        elif arch == "sm_90a":
            self.kernels += (
                f" (paged_prefill_sm90 takes no head size {spec.head_dim} over a cache of {kv_dtype} "
                f"in blocks of {kv.block_size})"
            )
        self.num_decodes = 0
        self.num_tokens = 0  # without padding
        self.prefill: PrefillPlan | None = None

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        """Work lists of an eager step; one small copy to the device if it has chunks."""
        decodes, batch = inputs.num_decodes, len(inputs.seq_lens)
        rows, seq_lens = inputs.rows_device, inputs.seq_lens_device
        if rows is None:  # then the block table has the rows of the batch
            (rows,) = upload([np.arange(batch, dtype=np.int32)], self.device)
        if seq_lens is None:
            (seq_lens,) = upload([np.array(inputs.seq_lens, np.int32)], self.device)
        if decodes:
            self.plan_on_device(seq_lens, rows, decodes)
        self.num_decodes, self.num_tokens = decodes, inputs.query_start[-1]
        self.prefill = None
        if decodes < batch:
            starts = np.array(inputs.query_start[decodes:], np.int32)
            kv_lens = np.array(inputs.seq_lens[decodes:], np.int32)
            self.prefill = self.plan_prefill(rows[decodes:], starts, kv_lens)

    def plan_prefill(
        self, rows: Tensor, starts: npt.NDArray[np.int32], kv_lens: npt.NDArray[np.int32]
    ) -> PrefillPlan:
        """starts: first token of each chunk, then the end. Long chunks go to the Hopper kernel, all with
        the tiling that suits them best together: results do not depend on it."""
        q_lens = np.diff(starts)
        is_long = q_lens >= self.min_hopper_queries
        kernels: list[Callable[..., None]] = []
        items = []
        # a chunk that the other kernel takes has no queries, hence no items
        if is_long.any():
            tiling, long = paged_prefill_sm90.plan_items(
                self.hopper_tilings,
                np.where(is_long, q_lens, 0),
                kv_lens,
                self.num_heads,
                paged_prefill_sm90.num_sms(self.device.index),
            )
            kernels.append(partial(paged_prefill_sm90.paged_prefill_sm90, tiling=tiling))
            items.append(long)
        if not is_long.all():
            kernels.append(paged_prefill)
            items.append(work_items(np.where(is_long, 0, q_lens), kv_lens, self.queries_per_item))
        q_start, *work = upload([starts[:-1], *items], self.device)
        return PrefillPlan(rows, q_start, list(zip(kernels, work, strict=True)))

    def plan_on_device(self, seq_lens: Tensor, rows: Tensor, batch: int) -> None:
        """See GraphAttention. A captured plan is made anew at each replay."""
        for window, plan in self.decode_plans.items():
            plan_decode(plan, seq_lens[:batch], rows[:batch], window)
        self.num_decodes = self.num_tokens = batch
        self.prefill = None

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """See AttentionBackend.attend. Under capture, what it reads from the host is the batch size."""
        out = q.new_empty(*q.shape)
        k_cache, v_cache = self.kv.k[layer], self.kv.v[layer]
        k_scale, v_scale = self.kv.scales_of(layer)
        if self.num_decodes:
            paged_decode(
                q[: self.num_decodes],
                k_cache,
                v_cache,
                inputs.block_table,
                self.decode_plans[spec.sliding_window],
                self.scratch,
                spec.scale,
                out[: self.num_decodes],
                spec.softcap,
                k_scale,
                v_scale,
            )
        if self.prefill is not None:
            self.attend_chunks(self.prefill, layer, q, spec, inputs.block_table, out)
        if self.num_tokens < q.shape[0]:
            out[self.num_tokens :].zero_()
        return out.flatten(1)

    def attend_new(
        self, layer: int, new: NewTokens, spec: AttentionSpec, inputs: StepInputs
    ) -> Tensor:
        """See AttentionBackend.attend_new. Decode steps take one kernel."""
        count = self.num_decodes
        if self.prefill is not None or count == 0:
            return super().attend_new(layer, new, spec, inputs)
        out = new.qkv.new_empty(new.qkv.shape[0], spec.num_heads, spec.head_dim)
        cos, sin = new.rotation
        rotated_decode(
            new.qkv[:count],
            cos[:count],
            sin[:count],
            self.kv.k[layer],
            self.kv.v[layer],
            inputs.block_table,
            self.decode_plans[spec.sliding_window],
            self.scratch,
            spec.scale,
            out[:count],
            spec.softcap,
            *self.kv.scales_of(layer),
            new.qk_norm,
            spec.qk_norm_eps,
        )
        if count < out.shape[0]:
            out[count:].zero_()
        return out.flatten(1)

    def attend_chunks(
        self,
        plan: PrefillPlan,
        layer: int,
        q: Tensor,
        spec: AttentionSpec,
        block_table: Tensor,
        out: Tensor,
    ) -> None:
        for kernel, work in plan.work:
            kernel(
                q,
                self.kv.k[layer],
                self.kv.v[layer],
                block_table,
                plan.rows,
                work,
                plan.q_start,
                spec.scale,
                out,
                spec.sliding_window,
                spec.softcap,
                *self.kv.scales_of(layer),
            )


def upload(arrays: Sequence[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """int32 arrays on the device, in one asynchronous copy. torch's pinned memory is reused only once
    the copy is done."""
    aligned = [-(-array.size // 4) * 4 for array in arrays]  # 16 bytes, for vector loads
    host = torch.empty(sum(aligned), dtype=torch.int32, pin_memory=True)
    values = host.numpy()
    for array, piece in zip(arrays, np.split(values, np.cumsum(aligned)[:-1]), strict=True):
        piece[: array.size] = array.reshape(-1)
    pieces = host.to(device, non_blocking=True).split(aligned)
    return [
        piece[: array.size].view(array.shape) for array, piece in zip(arrays, pieces, strict=True)
    ]
