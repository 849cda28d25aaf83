"""Paged attention on a GPU: decode rows through one kernel, prompt chunks through another.

    tokens     d0 d1 d2 ... dn   p p p p p p p   p p p p ...      decode rows first, one token each
    kernel     paged_decode      paged_prefill or its Hopper version
    work list  made on the       made on the host
               device

In steps without chunks, paged_decode also does what rope_and_cache does ahead of it in others.

Work lists are made once per step and read by every layer. The decode list lives in static buffers, so
that a captured decode step can make a new one at each replay (`plan_on_device`). In captured steps with
chunks the list of chunks does, too (`plan_chunks`), and the kernels read how long the lists are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import (
    AttentionSpec,
    GraphAttention,
    KVCache,
    NewTokens,
    StepInputs,
)
from engine.attention.captured_chunks import CapturedChunks, Int32Array, upload
from engine.ops import jit, paged_prefill_sm90
from engine.ops.paged_decode import DecodeScratch, paged_decode, plan_limits
from engine.ops.paged_prefill import paged_prefill, queries_per_item, work_items
from engine.ops.paged_prefill_sm90 import Tiling
from engine.ops.plan_decode import DecodePlan, plan_decode
from engine.ops.rotated_decode import rotated_decode


@dataclass(slots=True)
class PrefillPlan:
    """Chunks of a step, on the device. Row i of them is batch row num_decodes + i."""

    kernel: Callable[..., None]  # paged_prefill, or paged_prefill_sm90 with a tiling
    rows: Tensor  # int32 [rows] of the block table
    q_start: Tensor  # int32 [rows]
    work: Tensor  # int32 [items, 4]
    num_items: Tensor | None = None  # int32 [1] items that count; None: all


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
        self.max_batch = max_batch
        self.captured: CapturedChunks | None = None
        self.captured_tilings: dict[int, tuple[Tiling, ...]] = {}  # by tokens; one tiling, or none
        self.hopper_tilings: tuple[Tiling, ...] = ()
        self.kernels = "paged_decode, paged_prefill"
        if paged_prefill_sm90.supports(spec.head_dim, kv_dtype, kv.block_size, arch):
            capped = {s.softcap > 0 for s in specs}
            self.hopper_tilings = paged_prefill_sm90.tilings(spec.head_dim, any(capped))
            for tiling, softcap in product(self.hopper_tilings, capped):  # ahead of the first need
                paged_prefill_sm90.load(
                    tiling, spec.head_dim, kv_dtype, kv.block_size, softcap, device.index
                )
            self.kernels = "paged_decode, paged_prefill_sm90"
        elif arch == "sm_90a":
            self.kernels += (
                f" (paged_prefill_sm90 takes no head size {spec.head_dim} over a cache of {kv_dtype} "
                f"in blocks of {kv.block_size})"
            )
        self.num_decodes = 0
        self.num_tokens = 0  # without padding
        self.prefill: PrefillPlan | None = None
        self.out: Tensor | None = None  # of a captured step with chunks

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
        self.prefill = self.out = None
        if decodes < batch:
            starts, q_lens, kv_lens = chunks(inputs)
            kernel, items = self.work_of(q_lens, kv_lens, self.hopper_tilings)
            q_start, work = upload([starts, items], self.device)
            self.prefill = PrefillPlan(kernel, rows[decodes:], q_start, work)

    def work_of(
        self, q_lens: Int32Array, kv_lens: Int32Array, tilings: Sequence[Tiling]
    ) -> tuple[Callable[..., None], Int32Array]:
        """The kernel for these chunks, and its items: the Hopper kernel with the tiling that suits them
        best (results do not depend on it), or without tilings the one for every card."""
        if not tilings:
            return paged_prefill, work_items(q_lens, kv_lens, self.queries_per_item)
        num_sms = paged_prefill_sm90.num_sms(self.device.index)
        tiling, items = paged_prefill_sm90.plan_items(
            tilings, q_lens, kv_lens, self.num_heads, num_sms
        )
        return partial(paged_prefill_sm90.paged_prefill_sm90, tiling=tiling), items

    def plan_on_device(self, seq_lens: Tensor, rows: Tensor, batch: int) -> None:
        """See GraphAttention. A captured plan is made anew at each replay."""
        for window, plan in self.decode_plans.items():
            plan_decode(plan, seq_lens[:batch], rows[:batch], window)
        self.num_decodes = self.num_tokens = batch
        self.prefill = self.out = None

    def allocate_chunks(self, max_tokens: int, dtype: torch.dtype) -> None:
        """See GraphAttention."""
        shape = (max_tokens, self.num_heads, self.kv.k[0].shape[3])
        out = torch.zeros(shape, dtype=dtype, device=self.device)
        self.captured = CapturedChunks(self.max_batch, self.most_items(max_tokens), out)
        for plan in self.decode_plans.values():
            plan.num_items.zero_()  # what runs before the first plan has neither rows nor chunks

    def most_items(self, num_tokens: int) -> int:
        """Work items of the chunks of a step, each of which may leave one item incomplete."""
        sizes = [tiling.queries for tiling in self.hopper_tilings] or [self.queries_per_item]
        return -(-num_tokens // min(sizes)) + min(self.max_batch, num_tokens)

    def capture_chunks(self, num_tokens: int) -> None:
        """See GraphAttention. Of Hopper's tilings it takes the best for a single prompt."""
        assert self.captured is not None
        self.num_decodes, self.num_tokens = min(self.max_batch, num_tokens), num_tokens
        for plan in self.decode_plans.values():
            plan.batch = self.num_decodes
        whole = np.array([num_tokens], np.int32)
        tilings = self.hopper_tilings
        if tilings:
            num_sms = paged_prefill_sm90.num_sms(self.device.index)
            best, _ = paged_prefill_sm90.plan_items(tilings, whole, whole, self.num_heads, num_sms)
            tilings = (best,)
        self.captured_tilings[num_tokens] = tilings
        kernel, _ = self.work_of(whole, whole, tilings)
        static = self.captured
        work = static.work[: self.most_items(num_tokens)]
        self.prefill = PrefillPlan(kernel, static.rows, static.q_start, work, static.num_items)
        self.out = static.out[:num_tokens]
        self.out.fill_(0.0)  # by a kernel: others start early behind kernels only

    def plan_chunks(self, inputs: StepInputs) -> None:
        """See GraphAttention."""
        decodes = inputs.num_decodes
        assert self.captured is not None
        assert inputs.rows_device is not None
        assert inputs.seq_lens_device is not None
        if decodes:
            self.plan_on_device(inputs.seq_lens_device, inputs.rows_device, decodes)
        else:
            for plan in self.decode_plans.values():
                plan.num_items.zero_()
        starts, q_lens, kv_lens = chunks(inputs)
        _, items = self.work_of(q_lens, kv_lens, self.captured_tilings[len(inputs.input_ids)])
        self.captured.fill(inputs.rows[decodes:], starts, items)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """See AttentionBackend.attend. Under capture, what it reads from the host is the batch size."""
        out = self.out if self.out is not None else q.new_empty(*q.shape)
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
        plan.kernel(
            q,
            self.kv.k[layer],
            self.kv.v[layer],
            block_table,
            plan.rows,
            plan.work,
            plan.q_start,
            spec.scale,
            out,
            spec.sliding_window,
            spec.softcap,
            *self.kv.scales_of(layer),
            num_items=plan.num_items,
        )


def chunks(inputs: StepInputs) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Of each chunk of a step: its first token, its queries, the tokens of its row with KV."""
    starts = np.array(inputs.query_start[inputs.num_decodes :], np.int32)
    kv_lens = np.array(inputs.seq_lens[inputs.num_decodes :], np.int32)
    return starts[:-1], np.diff(starts), kv_lens
