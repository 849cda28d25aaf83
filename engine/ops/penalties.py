"""Repetition, frequency and presence penalties, in place, on logits before temperature.

For a token seen in the prompt or in the output, where `count` is its number in the output:

    logit = logit / repetition   if logit > 0 else   logit * repetition
    logit = logit - frequency * count
    logit = logit - presence     if count > 0

The first is from Keskar et al., "CTRL" (2019), the others are OpenAI's. Only seen tokens change.
All operations are single float32 roundings, so that every device gives the same bits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(slots=True)
class PenaltyParams:
    """Strengths for each of n rows. Host arrays, float32 [n]."""

    repetition: npt.NDArray[np.float32]  # 1: off
    frequency: npt.NDArray[np.float32]
    presence: npt.NDArray[np.float32]


def apply_penalties(
    logits: Tensor,
    which: list[int],
    seen: Tensor,
    counts: Tensor,
    slots: list[int],
    params: PenaltyParams,
) -> None:
    """Penalise rows `which` of `logits` (float32 [S, V], on the CPU) in place.

    seen: bool [num_slots, V], in prompt or output; counts: int32 [num_slots, V], in the output.
    Row which[i] belongs to slot slots[i] and params' entry i.
    """
    logits_np, seen_np, counts_np = logits.numpy(), seen.numpy(), counts.numpy()
    for i, (row, slot) in enumerate(zip(which, slots, strict=True)):
        # seen tokens are few against the vocabulary
        ids = np.flatnonzero(seen_np[slot])
        values, count = logits_np[row, ids], counts_np[slot, ids]
        if params.repetition[i] != 1:
            scale = params.repetition[i]
            values = np.where(values > 0, values / scale, values * scale)
        values -= count.astype(np.float32) * params.frequency[i]
        values -= (count > 0) * params.presence[i]
        logits_np[row, ids] = values


def reference(logits: Tensor, seen: Tensor, counts: Tensor, params: PenaltyParams) -> Tensor:
    """The penalised copy of `logits` [n, V], given `seen` and `counts` [n, V] of the same rows."""

    def column(values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(logits.device).unsqueeze(1)

    scale = column(params.repetition)
    scaled = torch.where(logits > 0, logits / scale, logits * scale)
    result = torch.where(seen, scaled, logits)
    result = result - counts * column(params.frequency)
    return result - (counts > 0) * column(params.presence)
