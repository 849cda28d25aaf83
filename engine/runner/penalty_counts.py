"""Which tokens a row has seen, kept on the device so that no host need know the sampled tokens."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class PenaltyCounts:
    """Tables [num_slots, V] for the rows with penalties; slots are made when first needed.

    seen: bool, the token is in the prompt or the output. counts: int32, how often in the output.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.seen = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self.slot_of: dict[int, int] = {}  # row -> slot
        self.free_slots: list[int] = []

    def add(self, row: int, prompt: npt.NDArray[np.int32], output: npt.NDArray[np.int32]) -> None:
        """Take a slot for `row` and count the tokens known so far (ids beyond V have no logit)."""
        self.free(row)
        if not self.free_slots:
            self._grow()
        slot = self.slot_of[row] = self.free_slots.pop()
        output = output[output < self.vocab_size]
        counts = np.bincount(output, minlength=self.vocab_size).astype(np.int32)
        seen = counts > 0
        seen[prompt[prompt < self.vocab_size]] = True
        self.counts[slot] = torch.from_numpy(counts)
        self.seen[slot] = torch.from_numpy(seen)

    def free(self, row: int) -> None:
        slot = self.slot_of.pop(row, None)
        if slot is not None:
            self.free_slots.append(slot)

    def slots(self, rows: npt.NDArray[np.int32]) -> list[int]:
        return [self.slot_of[row] for row in rows.tolist()]

    def update(self, slots: list[int], token_ids: Tensor) -> None:
        """Count `token_ids` (int64 [n]) just sampled for `slots`, which are distinct."""
        index = torch.tensor(slots, device=self.device)
        self.counts[index, token_ids] += 1
        self.seen[index, token_ids] = True

    def _grow(self) -> None:
        """Double the tables (4 slots at first)."""
        old = self.seen.shape[0]
        added = max(4, old)
        pad = (0, 0, 0, added)
        self.seen = torch.nn.functional.pad(self.seen, pad)
        self.counts = torch.nn.functional.pad(self.counts, pad)
        self.free_slots.extend(range(old + added - 1, old - 1, -1))
