"""Paged attention in float32 on a GPU, for checking its numbers against a CPU's (--dtype float32).

One plain kernel takes decode rows and prompt chunks alike: it is told of each token which row it belongs
to and how many tokens it sees.
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionSpec, GraphAttention, KVCache, StepInputs
from engine.attention.paged import upload
from engine.ops.paged_attention_f32 import paged_attention_f32


class PagedAttentionF32(GraphAttention):
    """GraphAttention for float32 on CUDA devices."""

    def __init__(self, kv: KVCache, device: torch.device) -> None:
        self.kv = kv
        self.kernels = "paged_attention_f32, for checking numbers"
        self.device = device
        none = torch.zeros(0, dtype=torch.int32, device=device)
        self.rows, self.lens = none, none  # int32 [tokens] of the step, without padding

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        """Row and position of each token; one small copy to the device."""
        start, seq_lens = np.array(inputs.query_start), np.array(inputs.seq_lens)
        counts = np.diff(start)
        # without rows_device, the block table has the rows of the batch
        batch_rows = np.arange(len(counts)) if inputs.rows_device is None else inputs.rows
        before = np.repeat(seq_lens - start[1:], counts)  # add to a token's index: its position
        lens = before + np.arange(start[-1]) + 1
        rows = np.repeat(batch_rows, counts)
        self.rows, self.lens = upload([rows.astype(np.int32), lens.astype(np.int32)], self.device)

    def plan_on_device(self, seq_lens: Tensor, rows: Tensor, batch: int) -> None:
        """See GraphAttention."""
        self.rows, self.lens = rows[:batch], seq_lens[:batch]

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """See AttentionBackend.attend."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tokens = len(self.rows)
        paged_attention_f32(
            q[:num_tokens],
            self.kv.k[layer],
            self.kv.v[layer],
            inputs.block_table,
            self.rows,
            self.lens,
            spec.scale,
            out[:num_tokens],
            spec.sliding_window,
            spec.softcap,
        )
        out[num_tokens:].zero_()
        return out.flatten(1)
