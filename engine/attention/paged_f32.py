"""Paged attention in float32 on a GPU, for checking its numbers against a CPU's (--dtype float32).

One plain kernel takes decode rows and prompt chunks alike: it is told of each token which row it belongs
to and how many tokens it sees.
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionSpec, GraphAttention, KVCache, StepInputs
from engine.attention.captured_chunks import Int32Array, pack, upload
from engine.ops.paged_attention_f32 import paged_attention_f32


class PagedAttentionF32(GraphAttention):
    """GraphAttention for float32 on CUDA devices."""

    def __init__(self, kv: KVCache, num_heads: int, device: torch.device) -> None:
        self.kv = kv
        self.num_heads = num_heads
        self.kernels = "paged_attention_f32, for checking numbers"
        self.device = device
        none = torch.zeros(0, dtype=torch.int32, device=device)
        self.rows, self.lens = none, none  # int32 [tokens] of the step, without padding
        # the same of captured steps with chunks, one behind the other
        self.captured = torch.zeros(2, 0, dtype=torch.int32, device=device)
        self.captured_out: Tensor | None = None
        self.out: Tensor | None = None  # of a captured step with chunks

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        """Row and position of each token; one small copy to the device."""
        self.rows, self.lens = upload(list(self.tokens_of(inputs)), self.device)
        self.out = None

    def tokens_of(self, inputs: StepInputs) -> tuple[Int32Array, Int32Array]:
        """Of each token its row in the block table, and the tokens that it sees."""
        start, seq_lens = np.array(inputs.query_start), np.array(inputs.seq_lens)
        counts = np.diff(start)
        # without rows_device, the block table has the rows of the batch
        batch_rows = np.arange(len(counts)) if inputs.rows_device is None else inputs.rows
        before = np.repeat(seq_lens - start[1:], counts)  # add to a token's index: its position
        lens = before + np.arange(start[-1]) + 1
        return np.repeat(batch_rows, counts).astype(np.int32), lens.astype(np.int32)

    def plan_on_device(self, seq_lens: Tensor, rows: Tensor, batch: int) -> None:
        """See GraphAttention."""
        self.rows, self.lens = rows[:batch], seq_lens[:batch]
        self.out = None

    def allocate_chunks(self, max_tokens: int, dtype: torch.dtype) -> None:
        """See GraphAttention."""
        self.captured = self.captured.new_zeros(2, max_tokens)
        shape = (max_tokens, self.num_heads, self.kv.k[0].shape[3])
        self.captured_out = torch.zeros(shape, dtype=dtype, device=self.device)

    def capture_chunks(self, num_tokens: int) -> None:
        """See GraphAttention."""
        assert self.captured_out is not None
        self.rows, self.lens = self.captured[:, :num_tokens]
        self.out = self.captured_out[:num_tokens]

    def plan_chunks(self, inputs: StepInputs) -> None:
        """See GraphAttention. Padding tokens see nothing, which gives zeros."""
        size = len(inputs.input_ids)
        for part, values in zip(self.captured, self.tokens_of(inputs), strict=True):
            part[:size].copy_(pack([values], [size])[:size], non_blocking=True)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """See AttentionBackend.attend."""
        out = self.out if self.out is not None else q.new_empty(*q.shape)
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
