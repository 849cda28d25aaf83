"""Sampling on a GPU: from logits to tokens in two kernels, without a sort (cuda/sample.cu).

Contract of `launch`
    logits       float32, bfloat16 or float16 [S, V], rows contiguous, any row stride; not changed
    rows         int32 [S] row numbers, for looking up what each row asks for
    positions    int32 [S] of the new token in its sequence
    params       uint8 [num_rows, ROW_DTYPE.itemsize], ROW_DTYPE records by row number
    token_ids    int64 [S], written; 0 for bad rows
    is_bad       bool [S], written: no finite largest logit (NaN, infinity, all forbidden)
    masks        int32 [S, ceil(V / 32)] or None: bits of the allowed tokens (token_masks.py)
    last_token   int64 [num_rows] or None: the token is also written to its row's place
    rows with penalties: the new token is counted in the row's token table

Tokens are those of engine/runner/sampler.py's stages, draw for draw: edits as in penalties.py, the draw
as in sample.py. Everything but the shapes is read from device memory, so one captured graph serves any
mix of requests, up to what its SamplingClass has compiled in. Rows do not influence each other.

Tables of a row, on the device, addressed by its record:
    tokens  uint16 [padded(V)]  bit 15: in the prompt; bit 14: may not stop the row before min_length; the
                                rest: how often in the output. 16,383 counts for more, too
    biases  BIAS_DTYPE [num_biases], by token id: added to the logits
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit

SOURCE = "sample.cu"
SLICE, GROUP = 4096, 64  # tokens of a block of sample_slices; tokens whose largest logit is noted
SLICE_THREADS, ROW_THREADS, GREEDY_THREADS = 256, 512, 32
PART_BYTES = 24
MAX_VOCAB = 8192 * GROUP

IN_PROMPT, STOPS = 1 << 15, 1 << 14  # bits of a token table's entry
MOST_COUNTED = STOPS - 1

BIAS_DTYPE = np.dtype([("id", np.int32), ("value", np.float32)])

# RowParams of cuda/common/sampling_row.cuh
ROW_DTYPE = np.dtype(
    [
        ("seed", np.uint64),
        ("tokens", np.uint64),  # address of the row's table, if a flag says that it has one
        ("biases", np.uint64),
        ("top_p", np.float64),
        ("min_length", np.int32),
        ("flags", np.uint32),
        ("temperature", np.float32),
        ("log_min_p", np.float32),
        ("top_k", np.int32),  # 0: off
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("num_logprobs", np.int32),  # -1: off
        ("num_biases", np.int32),
    ],
    align=True,
)


class RowFlags(IntFlag):
    """Stages that a row enters."""

    DRAW = 1
    PENALTIES = 2
    LOGIT_BIAS = 4
    MIN_TOKENS = 8
    TRUNCATE = 32  # min_p, top_k or top_p
    MASS = 64  # top_p alone, which needs the mass of all tokens


class SamplingClass(IntEnum):
    """What the kernels can do; a smaller one is faster. Rows of a batch need not use it all."""

    GREEDY = 0  # the largest logit
    SIMPLE = 1  # temperature, min_p, top_k, top_p and the draw
    FULL = 2  # token masks, logit bias, min_tokens and penalties too


@dataclass(slots=True)
class Workspace:
    """What the first kernel notes for the second, for up to `max_rows` rows."""

    parts: Tensor  # uint8 [max_rows, num_slices, PART_BYTES]
    groups: Tensor  # int32 [max_rows, num_slices * SLICE / GROUP]

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> "Workspace":
        """Raises ValueError for a vocabulary beyond MAX_VOCAB."""
        if vocab_size > MAX_VOCAB:
            raise ValueError(f"vocab_size {vocab_size}: sampling kernels take up to {MAX_VOCAB}")
        num_slices = -(-vocab_size // SLICE)
        return cls(
            torch.zeros((max_rows, num_slices, PART_BYTES), dtype=torch.uint8, device=device),
            torch.zeros((max_rows, num_slices * SLICE // GROUP), dtype=torch.int32, device=device),
        )


def padded(vocab_size: int) -> int:
    """Entries of a row's token table: kernels read eight at a time."""
    return -(-vocab_size // 8) * 8


def launch(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    params: Tensor,
    workspace: Workspace,
    sampling_class: SamplingClass,
    token_ids: Tensor,
    is_bad: Tensor,
    masks: Tensor | None = None,
    last_token: Tensor | None = None,
) -> None:
    """See the module's contract. Everything on the current stream, nothing allocated."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    assert logits.stride(1) == 1
    assert rows.dtype == positions.dtype == torch.int32
    assert masks is None or (sampling_class is SamplingClass.FULL and masks.is_contiguous())
    num_slices = workspace.parts.shape[1]
    assert num_slices == -(-vocab_size // SLICE)
    assert num_rows <= workspace.parts.shape[0]
    row_bytes = logits.stride(0) * logits.itemsize
    is_aligned = logits.data_ptr() % 16 == 0 and row_bytes % 16 == 0
    given = (
        logits.data_ptr(),
        0 if masks is None else masks.data_ptr(),
        rows.data_ptr(),
        positions.data_ptr(),
        params.data_ptr(),
        np.int64(logits.stride(0)),
        np.int32(vocab_size),
        np.int32(is_aligned),
    )
    parts, groups = workspace.parts.data_ptr(), workspace.groups.data_ptr()
    slices_spec, rows_spec = variants(logits.dtype, sampling_class)
    jit.kernel(slices_spec.source, slices_spec.name, slices_spec.defines)(
        (num_slices, num_rows), (SLICE_THREADS,), (parts, groups, *given)
    )
    threads = GREEDY_THREADS if sampling_class is SamplingClass.GREEDY else ROW_THREADS
    jit.kernel(rows_spec.source, rows_spec.name, rows_spec.defines)(
        (num_rows,),
        (threads,),
        (
            token_ids.data_ptr(),
            is_bad.data_ptr(),
            0 if last_token is None else last_token.data_ptr(),
            parts,
            groups,
            *given,
            np.int32(num_slices),
        ),
    )


def variants(dtype: torch.dtype, sampling_class: SamplingClass) -> list[jit.VariantSpec]:
    """sample_slices and sample_rows."""
    defines = {jit.scalar_define(dtype): 1, "SAMPLING_CLASS": int(sampling_class)}
    return [jit.VariantSpec(SOURCE, name, defines) for name in ("sample_slices", "sample_rows")]


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """For logits as models give them."""
    return [
        spec for sampling_class in SamplingClass for spec in variants(torch.float32, sampling_class)
    ]
