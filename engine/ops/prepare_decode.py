"""Inputs of a decode step, made on the device from row numbers.

Contract
    staged       int32, device: [num_rows, num_updates, 0, 0], then row numbers [max_batch], tokens
                 computed [max_batch], and block-table updates (row, index, block) [max_updates]
    block_table  int32 [table_rows, max_blocks], updated in place
    last_token   int64 [table_rows]: the token sampled last on each row
    outputs      input_ids, positions, slots int64 [batch]; rows, seq_lens int32 [batch]. Entry i < num_rows
                 describes the next token of row i; later ones (padding up to the batch of a CUDA graph)
                 are token 0 of row 0, whose blocks are all the reserved block 0
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit

HEADER = 4  # int32 words before the row numbers
THREADS = 1024


@dataclass(slots=True)
class DecodeInputs:
    """Buffers of max_batch entries; a step of a smaller batch uses the front."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    seq_lens: Tensor

    @classmethod
    def allocate(cls, max_batch: int, device: torch.device) -> "DecodeInputs":
        wide = [torch.zeros(max_batch, dtype=torch.int64, device=device) for _ in range(3)]
        narrow = [torch.zeros(max_batch, dtype=torch.int32, device=device) for _ in range(2)]
        return cls(*wide, *narrow)


def staged_size(max_batch: int, max_updates: int) -> int:
    """int32 words of `staged`."""
    return HEADER + 2 * max_batch + 3 * max_updates


def prepare_decode(
    staged: Tensor,
    block_table: Tensor,
    last_token: Tensor,
    out: DecodeInputs,
    batch: int,
    block_size: int,
) -> None:
    """See the module's contract. `batch` is the padded batch."""
    if not staged.is_cuda:
        reference(staged, block_table, last_token, out, batch, block_size)
        return
    kernel = jit.kernel("prepare_decode.cu", "prepare_decode")
    kernel(
        (1,),
        (THREADS,),
        (
            staged.data_ptr(),
            block_table.data_ptr(),
            last_token.data_ptr(),
            out.input_ids.data_ptr(),
            out.positions.data_ptr(),
            out.slots.data_ptr(),
            out.rows.data_ptr(),
            out.seq_lens.data_ptr(),
            np.int32(batch),
            np.int32(len(out.rows)),
            np.int32(block_table.stride(0)),
            np.int32(block_size),
        ),
    )


def reference(
    staged: Tensor,
    block_table: Tensor,
    last_token: Tensor,
    out: DecodeInputs,
    batch: int,
    block_size: int,
) -> None:
    """In torch, for tensors on any device."""
    max_batch = len(out.rows)
    num_rows, num_updates = staged[:2].tolist()
    rows, computed = staged[HEADER:][: 2 * max_batch].view(2, max_batch).long()
    updates = staged[HEADER + 2 * max_batch :][: 3 * num_updates].view(-1, 3).long()
    block_table[updates[:, 0], updates[:, 1]] = updates[:, 2].int()
    is_real = torch.arange(batch, device=staged.device) < num_rows
    rows = torch.where(is_real, rows[:batch], 0)
    positions = torch.where(is_real, computed[:batch], 0)
    blocks = block_table[rows, positions // block_size].long()
    out.rows[:batch] = rows.int()
    out.seq_lens[:batch] = (positions + 1).int()
    out.positions[:batch] = positions
    out.slots[:batch] = blocks * block_size + positions % block_size
    out.input_ids[:batch] = torch.where(is_real, last_token[rows], 0)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    return [jit.VariantSpec("prepare_decode.cu", "prepare_decode")]
