"""Log-probabilities at sampled tokens on a GPU, without writing those of the vocabulary
(cuda/logprobs.cu).

Contract of `launch`
    logits       float32, bfloat16 or float16 [S, V], rows contiguous, any row stride; not changed
    rows         int32 [S] row numbers
    params       uint8 [num_rows, ROW_DTYPE.itemsize], records of sample_cuda.py; `num_logprobs` decides
                 which rows report
    token_ids    int64 [S], is_bad bool [S]: what the sampler chose
    returns      for all S rows; rows that do not report or are bad hold zeros

Ranks and ties are those of logprobs.gather_logprobs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit
from engine.ops.logprobs import LogprobTensors
from engine.ops.sample_cuda import GROUP, ROW_THREADS, SLICE, SLICE_THREADS

SOURCE = "logprobs.cu"


@dataclass(slots=True)
class LogprobWorkspace:
    """What the first kernel notes for the second, for up to `max_rows` rows."""

    parts: Tensor  # float32 [max_rows, num_slices, 2] maximum and sum of exponentials
    groups: Tensor  # int32 [max_rows, num_slices * SLICE / GROUP]

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> "LogprobWorkspace":
        num_slices = -(-vocab_size // SLICE)
        return cls(
            torch.zeros((max_rows, num_slices, 2), dtype=torch.float32, device=device),
            torch.zeros((max_rows, num_slices * SLICE // GROUP), dtype=torch.int32, device=device),
        )


def launch(
    logits: Tensor,
    rows: Tensor,
    params: Tensor,
    token_ids: Tensor,
    is_bad: Tensor,
    workspace: LogprobWorkspace,
    num_top: int,
) -> LogprobTensors:
    """See the module's contract. The num_top best tokens of each row, or all of a smaller vocabulary."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    assert num_rows > 0
    assert logits.stride(1) == 1
    assert num_rows <= workspace.parts.shape[0]
    num_slices = workspace.parts.shape[1]
    result = LogprobTensors(
        sampled=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        rank=torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        top_ids=torch.empty((num_rows, num_top), dtype=torch.int64, device=logits.device),
        top_logprobs=torch.empty((num_rows, num_top), dtype=torch.float32, device=logits.device),
    )
    row_bytes = logits.stride(0) * logits.itemsize
    shape = (
        np.int64(logits.stride(0)),
        np.int32(vocab_size),
        np.int32(logits.data_ptr() % 16 == 0 and row_bytes % 16 == 0),
    )
    noted = (workspace.parts.data_ptr(), workspace.groups.data_ptr())
    given = (logits.data_ptr(), rows.data_ptr(), params.data_ptr())
    slices_spec, rows_spec = variants(logits.dtype)
    jit.kernel(slices_spec.source, slices_spec.name, slices_spec.defines)(
        (num_slices, num_rows), (SLICE_THREADS,), (*noted, *given, *shape)
    )
    jit.kernel(rows_spec.source, rows_spec.name, rows_spec.defines)(
        (num_rows,),
        (ROW_THREADS,),
        (
            result.sampled.data_ptr(),
            result.rank.data_ptr(),
            result.top_ids.data_ptr(),
            result.top_logprobs.data_ptr(),
            *noted,
            *given,
            token_ids.data_ptr(),
            is_bad.data_ptr(),
            *shape,
            np.int32(num_slices),
            np.int32(num_top),
        ),
    )
    return result


def variants(dtype: torch.dtype) -> list[jit.VariantSpec]:
    """logprob_slices and logprob_rows."""
    defines = {jit.scalar_define(dtype): 1}
    return [jit.VariantSpec(SOURCE, name, defines) for name in ("logprob_slices", "logprob_rows")]


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """For logits as models give them."""
    return variants(torch.float32)
