"""Rows of the embedding table, and of the table of angles: what a forward pass starts with.

Contract
    token_ids    int64 [T], rows of `table`
    positions    int64 [T], rows of `angle_table`
    table        [vocab_size, hidden_size], contiguous
    angle_table  [max_model_len, N], contiguous, of any dtype
    returns      [T, hidden_size] and [T, N], fresh tensors

Two look-ups are one kernel, because a decode step waits for each of its kernels in turn.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit

THREADS = 128


def embed_tokens(
    token_ids: Tensor, positions: Tensor, table: Tensor, angle_table: Tensor
) -> tuple[Tensor, Tensor]:
    """See the module's contract."""
    if token_ids.is_cuda and has_kernel(table) and has_kernel(angle_table):
        return launch(token_ids, positions, table, angle_table)
    return F.embedding(token_ids, table), F.embedding(positions, angle_table)


def has_kernel(table: Tensor) -> bool:
    """Whether rows are whole 16-byte words."""
    return (
        table.is_contiguous()
        and row_words(table) * 16 == table.shape[1] * table.element_size()
        and table.data_ptr() % 16 == 0
    )


def row_words(table: Tensor) -> int:
    return table.shape[1] * table.element_size() // 16


def launch(
    token_ids: Tensor, positions: Tensor, table: Tensor, angle_table: Tensor
) -> tuple[Tensor, Tensor]:
    num_tokens = len(token_ids)
    hidden = table.new_empty(num_tokens, table.shape[1])
    angles = angle_table.new_empty(num_tokens, angle_table.shape[1])
    jit.kernel("embed_tokens.cu", "embed_tokens")(
        (num_tokens,),
        (THREADS,),
        (
            hidden.data_ptr(),
            angles.data_ptr(),
            table.data_ptr(),
            angle_table.data_ptr(),
            token_ids.data_ptr(),
            positions.data_ptr(),
            np.int32(row_words(table)),
            np.int32(row_words(angle_table)),
        ),
    )
    return hidden, angles


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    return [jit.VariantSpec("embed_tokens.cu", "embed_tokens")]
