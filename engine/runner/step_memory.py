"""Pinned memory of captured steps: what a step reads and what it gives back, in a ring of slots.

    host     slot.words ──copy──►                           ──copy──► slot.results, event
    device                       staged ─► graph ─► results

The device's side needs no ring, as all that touches it is in order on one stream. The host's side does:
it writes for step n+1 while step n is under way and its results are not read. One event a step serves
both directions: once it has passed, the results are there and the inputs have been read.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.plan import StepResult

DEPTH = 4  # slots; at most two steps are under way
TOKEN_BYTES = 8  # int64


class Slot:
    """One step's memory on the host, and the event behind its last copy."""

    def __init__(self, inputs: Tensor, outputs: Tensor, max_batch: int) -> None:
        """`inputs` and `outputs` are like the device's, and pinned."""
        self.inputs = inputs
        self.outputs = outputs
        self.words = self.inputs.numpy()
        self.token_ids, self.is_bad = (part.numpy() for part in split(outputs, max_batch))
        self.done = torch.cuda.Event()


@dataclass(slots=True)
class SlotSample:
    """The tokens of a step, to be read once `slot.done` has passed and within DEPTH - 1 more steps."""

    slot: Slot
    num_rows: int

    def result(self) -> StepResult:
        is_bad: npt.NDArray[np.bool_] = self.slot.is_bad[: self.num_rows]
        return StepResult(
            token_ids=self.slot.token_ids[: self.num_rows].astype(np.int32),
            is_bad=is_bad.copy() if is_bad.any() else None,
        )


class StepMemory:
    """`staged`, `token_ids` and `is_bad` on the device, and the ring of their counterparts."""

    def __init__(self, num_words: int, max_batch: int, device: torch.device) -> None:
        """num_words: of `staged`, int32."""
        self.staged = torch.zeros(num_words, dtype=torch.int32, device=device)
        self.results = torch.zeros((TOKEN_BYTES + 1) * max_batch, dtype=torch.uint8, device=device)
        self.token_ids, self.is_bad = split(self.results, max_batch)
        self.slots = [
            Slot(pinned_like(self.staged), pinned_like(self.results), max_batch)
            for _ in range(DEPTH)
        ]
        self.turn = 0

    def next_slot(self) -> Slot:
        """The slot of the next step, free to be written; its last step ended long ago."""
        slot = self.slots[self.turn]
        self.turn = (self.turn + 1) % DEPTH
        slot.done.synchronize()
        return slot

    def upload(self, slot: Slot) -> None:
        """Whole: a few kilobytes cost less than finding out how many are needed."""
        self.staged.copy_(slot.inputs, non_blocking=True)

    def download(self, slot: Slot) -> None:
        slot.outputs.copy_(self.results, non_blocking=True)
        slot.done.record()


def split(results: Tensor, max_batch: int) -> tuple[Tensor, Tensor]:
    """Views of a step's results: token ids, int64 [max_batch], and bad rows, bool [max_batch]."""
    end = TOKEN_BYTES * max_batch
    return results[:end].view(torch.int64), results[end:].view(torch.bool)


def pinned_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
