"""Persistent rows: a request's place in device tables for as long as it runs.

The scheduler ships row numbers and changes; block ids and the last sampled token stay here. Row 0 is
the dummy row of padding tokens: its blocks are all block 0.

On a CPU the device tensor and the numpy array of block ids are the same memory. On a GPU the host
keeps a mirror, and changes travel with the step's other inputs.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import StepPlan


class RequestTable:
    """Block tables and last tokens by row.

    block_ids: int32 [num_rows, max_blocks], host; block_table: the same as a device tensor.
    last_token: int64 [num_rows], device: the token sampled last on the row, input of its next decode.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.block_ids = np.zeros((num_rows, max_blocks), np.int32)
        self.block_table = torch.from_numpy(self.block_ids).to(device)
        self.last_token = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def apply(self, plan: StepPlan) -> None:
        """Take in what changed since the last plan: new rows, then appended blocks."""
        for init in plan.new_rows:
            self.block_ids[init.row, : len(init.block_ids)] = init.block_ids
        for row, index, block_ids in plan.appended:
            self.block_ids[row, index : index + len(block_ids)] = block_ids


def table_updates(plan: StepPlan) -> npt.NDArray[np.int32]:
    """The same changes as a list of (row, index, block), int32 [num_updates, 3], for the device."""
    parts = [(init.row, 0, init.block_ids) for init in plan.new_rows] + plan.appended
    if not parts:
        return np.zeros((0, 3), np.int32)
    counts = [len(blocks) for _, _, blocks in parts]
    updates = np.empty((sum(counts), 3), np.int32)
    updates[:, 0] = np.repeat([row for row, _, _ in parts], counts)
    updates[:, 1] = np.concatenate(
        [np.arange(index, index + len(blocks)) for _, index, blocks in parts]
    )
    updates[:, 2] = np.concatenate([np.asarray(blocks, np.int32) for _, _, blocks in parts])
    return updates
