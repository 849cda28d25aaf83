"""Inputs of steps on a GPU, with a stand-in for the copy to it."""

import numpy as np
import pytest
import torch

from engine.api.sampling import SamplingParams
from engine.plan import RowInit, StepPlan
from engine.runner import device_inputs
from engine.runner.chunk_graphs import most_graph_tokens, padded_tokens, token_sizes
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


class NoEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("rows", "budget"), [(1, 1), (16, 16), (17, 17), (1, 95), (300, 8190)])
def test_inputs_lie_where_a_captured_step_reads_them(
    rows: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step at its limits: each row samples, and starts with as many blocks as fit into one copy."""
    monkeypatch.setattr(torch.cuda, "Event", NoEvent)
    inputs = DeviceInputs(budget, rows, CPU)
    lengths = np.full(rows, budget // rows, np.int32)
    lengths[-1] += budget - lengths.sum()
    num_blocks = (budget + rows) // rows
    table = RequestTable(rows + 1, num_blocks, CPU)
    table.block_table = table.block_table.clone()
    tokens = np.arange(3, 3 + budget, dtype=np.int32)
    plan = StepPlan(
        step_id=1,
        num_decodes=0,
        rows=np.arange(1, rows + 1, dtype=np.int32),
        num_tokens=lengths,
        num_computed=np.zeros(rows, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_tokens=tokens,
        new_rows=[
            RowInit(row, SamplingParams(), tokens, len(tokens), 0, [row] * num_blocks)
            for row in range(1, rows + 1)
        ],
        req_ids=[1] * rows,
    )
    table.apply(plan)
    size = padded_tokens(budget, token_sizes(most_graph_tokens(budget, 1)))
    assert budget <= size < budget + 16
    made = inputs.make(plan, table, 16, size)
    ids, positions, slots = inputs.tokens(size)
    for part, place in (
        (made.input_ids, ids),
        (made.positions, positions),
        (made.slot_mapping, slots),
    ):
        assert part.data_ptr() == place.data_ptr()
        assert part.shape == place.shape == (size,)
        assert not place[budget:].any(), "padding is token 0 at the reserved slot 0"
    assert ids[:budget].tolist() == tokens.tolist()
    assert made.logits_indices.tolist() == (np.cumsum(lengths) - 1).tolist()
    assert torch.equal(table.block_table, torch.from_numpy(table.block_ids))


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
