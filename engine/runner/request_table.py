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
    appended = [
        (row, index, block)
        for row, first, block_ids in plan.appended
        for index, block in enumerate(block_ids, first)
    ]
    parts = [np.array(appended, np.int32).reshape(-1, 3)]
    for init in plan.new_rows:
        part = np.empty((len(init.block_ids), 3), np.int32)
        part[:, 0] = init.row
        part[:, 1] = np.arange(len(part))
        part[:, 2] = init.block_ids
        parts.append(part)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]
