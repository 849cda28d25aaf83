"""Inputs of eager steps on a GPU, with a stand-in for the copy to it."""

import numpy as np
import pytest
import torch

from engine.api.sampling import SamplingParams
from engine.plan import RowInit, StepPlan
from engine.runner import device_inputs
from engine.runner.device_inputs import DeviceInputs
from engine.runner.request_table import RequestTable

CPU = torch.device("cpu")


class HostStaging:
    """Arrays come out as tensors, if they fit."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes

    def upload(self, arrays: list[np.ndarray]) -> list[torch.Tensor]:
        assert sum(array.nbytes for array in arrays) <= self.num_bytes
        return [torch.from_numpy(array.copy()) for array in arrays]


@pytest.mark.parametrize("num_cached", [2, 60])
def test_the_table_takes_in_prefixes_of_any_length(
    num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows start with `num_cached` blocks found in the cache, and compute one token each."""
    monkeypatch.setattr(device_inputs, "Staging", HostStaging)
    rows, block_size = 4, 16
    inputs = DeviceInputs(max_tokens=8, max_rows=rows, device=CPU)
    assert inputs.staging.num_bytes < 2048, "the room does not grow with the longest request"
    table = RequestTable(rows + 1, 64, CPU)
    table.block_table = table.block_table.clone()  # a device's does not share the host's memory
    computed = num_cached * block_size
    tokens = np.zeros(computed + 1, np.int32)
    blocks = [[100 * row + i for i in range(num_cached + 1)] for row in range(1, rows + 1)]
    plan = StepPlan(
        step_id=1,
        num_decodes=0,
        rows=np.arange(1, rows + 1, dtype=np.int32),
        num_tokens=np.ones(rows, np.int32),
        num_computed=np.full(rows, computed, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_tokens=np.zeros(rows, np.int32),
        new_rows=[
            RowInit(row, SamplingParams(), tokens, len(tokens), computed, held)
            for row, held in enumerate(blocks, start=1)
        ],
        req_ids=[1] * rows,
    )
    table.apply(plan)
    made = inputs.make(plan, table, block_size)
    assert table.block_table[1:, : num_cached + 1].tolist() == blocks
    assert torch.equal(table.block_table, torch.from_numpy(table.block_ids))
    assert made.slot_mapping.tolist() == [held[-1] * block_size for held in blocks]
    assert made.seq_lens == [computed + 1] * rows
