"""Choose one token per row: argmax, or a draw from the truncated softmax.

The draw is Gumbel-max: the token with the largest `logit + gumbel noise` is distributed as
softmax(logits). Truncation works on tokens ordered by (logit descending, id ascending) and keeps a
prefix of that order, in three stages, each relative to what the one before has left:

    min_p   logit >= max + log(min_p)                     off: 0
    top_k   the first k                                   off: k < 1 or k >= vocabulary
    top_p   while the weight of all better tokens is      off: 1
            below top_p * (weight of all that are left)

The weight of a token is exp(logit - max) in float32, in units of 2**-40 and rounded down: sums of
integers are the same in any order, and where weights are equal a nucleus may end exactly at its limit.

`sample` is the entry, for CPU tensors: it takes the shortcuts of `sample_cpu`. `reference` says what it computes,
on any device, by sorting the vocabulary and drawing noise for all of it. A GPU's way is `sample_cuda`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import sample_cpu
from engine.ops.philox import token_noise
from engine.ops.sample_cpu import MASS_UNITS

REFERENCE_ROWS = 4  # at a time: each takes about 200 bytes per token of the vocabulary


@dataclass(slots=True)
class DrawParams:
    """How to draw from each of n rows. Host arrays."""

    seeds: npt.NDArray[np.int64]  # [n] the bits of the 64-bit seed
    positions: npt.NDArray[np.int64]  # [n] of the token to be drawn, in its sequence
    top_k: npt.NDArray[np.int64]  # [n]
    top_p: npt.NDArray[np.float64]  # [n] above 0
    min_p: npt.NDArray[np.float64]  # [n]

    def rows(self, part: slice) -> "DrawParams":
        return DrawParams(
            self.seeds[part],
            self.positions[part],
            self.top_k[part],
            self.top_p[part],
            self.min_p[part],
        )


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest id of the largest logit of each row, and that logit.

    logits: float32 [S, V] on the CPU. Returns int64 [S] and float32 [S]; for a row with NaN: any id, and NaN.
    torch.argmax promises no order among equals, and is ten times slower than numpy's.
    """
    token_ids = torch.from_numpy(logits.numpy().argmax(axis=1))
    return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)


def _first_equal(values: Tensor, wanted: Tensor) -> Tensor:
    """Index of the first entry of each row equal to `wanted` [S]; 0 if there is none."""
    width = values.shape[1]
    index = torch.arange(width, device=values.device)
    found = torch.where(values == wanted.unsqueeze(1), index, width).amin(-1)
    return torch.where(found < width, found, 0)


def sample(logits: Tensor, which: npt.NDArray[np.int64], draw: DrawParams) -> Tensor:
    """Draw a token from each of the rows `which` [n] of `logits`, float32 [S, V] on the CPU, after temperature.

    Returns int64 [n]. A row whose largest logit is not finite yields an arbitrary valid id.
    """
    rows = [logits[i].numpy() for i in which.tolist()]
    token_ids = sample_cpu.sample(
        rows, draw.seeds, draw.positions, draw.top_k, draw.top_p, draw.min_p
    )
    return torch.from_numpy(token_ids)


def reference(logits: Tensor, draw: DrawParams) -> Tensor:
    """What `sample` computes, as plainly as possible, for all rows of `logits` [n, V]."""
    token_ids = []
    for first in range(0, len(logits), REFERENCE_ROWS):
        part = slice(first, first + REFERENCE_ROWS)
        scores = truncate(logits[part], draw.rows(part)).to(torch.float64)
        seeds = torch.from_numpy(draw.seeds[part]).to(logits.device).unsqueeze(1)
        positions = torch.from_numpy(draw.positions[part]).to(logits.device).unsqueeze(1)
        vocabulary = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
        scores += token_noise(seeds, positions, vocabulary)
        token_ids.append(_first_equal(scores, scores.amax(-1)))
    return torch.cat(token_ids)


def truncate(logits: Tensor, draw: DrawParams) -> Tensor:
    """`logits` [n, V] with -inf for all tokens that min_p, top_k and top_p remove."""

    def column(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device).unsqueeze(1)

    vocab_size = logits.shape[1]
    min_p, top_p = column(draw.min_p), column(draw.top_p)
    ordered, ids = torch.sort(logits, dim=1, descending=True, stable=True)
    best = ordered[:, :1]
    keep = ordered >= best + min_p.log().to(torch.float32)

    top_k = column(np.where(draw.top_k < 1, vocab_size, draw.top_k))
    keep &= torch.arange(vocab_size, device=logits.device).unsqueeze(0) < top_k

    weights = (torch.exp(ordered - best) * MASS_UNITS).to(torch.int64) * keep
    sums = weights.cumsum(-1)
    better = torch.nn.functional.pad(sums[:, :-1], (1, 0)).to(torch.float64)
    keep &= (better < top_p * sums[:, -1:].to(torch.float64)) | (top_p >= 1)

    kept_by_id = torch.zeros_like(keep).scatter_(1, ids, keep)
    return logits.masked_fill(~kept_by_id, -torch.inf)
