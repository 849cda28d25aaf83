"""Turn a plan (rows and counts) into the token-level inputs of a forward pass.

Contract: for row i with n = num_tokens[i] and c = num_computed[i], its tokens have positions
c .. c+n-1, slots block_ids[rows[i], pos // block_size] * block_size + pos % block_size, and ids from
last_token[rows[i]] (the first num_decodes rows, one token each) or from prompt_tokens (the other rows,
concatenated). Padding tokens up to `min_tokens` have id 0, position 0, slot 0. `logits_indices` lists
the last token of each row that samples, padded with token 0 to `min_logits` entries if there are any.

Why at least two: a matrix product with one row takes another code path on CPUs, whose sums round
differently; with two, a request's numbers do not depend on who shares its step. Why four logits: the
output head, oneDNN's largest product, takes 4.9 ms for four rows and 8.1 ms for two (49,152 tokens).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class TokenInputs:
    """All int64: input_ids, positions, slot_mapping [T], logits_indices [S]."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    logits_indices: Tensor


def prepare_inputs(
    rows: Int32Array,  # [B]
    num_tokens: Int32Array,  # [B]
    num_computed: Int32Array,  # [B]
    samples: npt.NDArray[np.bool_],  # [B]
    num_decodes: int,
    prompt_tokens: Int32Array,
    block_ids: Int32Array,  # [num_rows, max_blocks]
    last_token: Tensor,  # int64 [num_rows]
    block_size: int,
    min_tokens: int = 2,
    min_logits: int = 4,
) -> TokenInputs:
    """Reference on the host (numpy), for a CPU device."""
    row_of_token: Int32Array
    positions: npt.NDArray[np.int64]
    sampled: npt.NDArray[np.int64]
    if num_decodes == len(rows):
        row_of_token, positions, sampled = (
            rows,
            num_computed.astype(np.int64),
            np.arange(len(rows), dtype=np.int64),
        )
        ids = last_token.index_select(0, torch.from_numpy(rows))
    else:
        ends = np.cumsum(num_tokens, dtype=np.int64)
        row_of_token = np.repeat(rows, num_tokens)
        shift = num_computed.astype(np.int64) - (ends - num_tokens)
        positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(shift, num_tokens)
        sampled = ends[samples] - 1
        decode_ids = last_token.index_select(0, torch.from_numpy(rows[:num_decodes]))
        ids = torch.cat([decode_ids, torch.from_numpy(prompt_tokens).long()])
    block = positions // block_size
    # the slot's block times block_size, plus the offset positions - block * block_size
    slots = positions + (block_ids[row_of_token, block] - block) * block_size

    if len(ids) < min_tokens:
        ids = F.pad(ids, (0, min_tokens - len(ids)))
        positions = pad(positions, min_tokens)
        slots = pad(slots, min_tokens)
    if 0 < len(sampled) < min_logits:
        sampled = pad(sampled, min_logits)
    return TokenInputs(
        ids, torch.from_numpy(positions), torch.from_numpy(slots), torch.from_numpy(sampled)
    )


def pad(values: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    """`values` and zeros behind, `size` in all."""
    padded = np.zeros(size, np.int64)
    padded[: len(values)] = values
    return padded
