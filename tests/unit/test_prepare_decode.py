"""The device-side decode inputs (reference) against the host-side ones."""

import numpy as np
import pytest
import torch

from engine.ops.prepare_decode import HEADER, DecodeInputs, prepare_decode, staged_size
from engine.ops.prepare_inputs import prepare_inputs


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_host_path(seed):
    rng = np.random.default_rng(seed)
    max_batch, num_rows, block_size = 8, 12, 4
    count = int(rng.integers(1, max_batch + 1))
    rows = rng.permutation(np.arange(1, num_rows))[:count].astype(np.int32)
    computed = rng.integers(0, 30, count).astype(np.int32)
    table = rng.integers(1, 50, (num_rows, 8)).astype(np.int32)
    table[0] = 0
    last = torch.from_numpy(rng.integers(3, 100, num_rows))
    updates = np.array([(rows[0], computed[0] // block_size, 49)], np.int32)
    staged = np.zeros(staged_size(max_batch, max_batch), np.int32)
    staged[:2] = count, 1
    staged[HEADER : HEADER + count] = rows
    staged[HEADER + max_batch : HEADER + max_batch + count] = computed
    staged[HEADER + 2 * max_batch :][:3] = updates[0]

    out = DecodeInputs.allocate(max_batch, torch.device("cpu"))
    device_table = torch.from_numpy(table.copy())
    prepare_decode(torch.from_numpy(staged), device_table, last, out, max_batch, block_size)

    table[updates[:, 0], updates[:, 1]] = updates[:, 2]
    assert (device_table.numpy() == table).all()
    ones = np.ones(count, np.int32)
    host = prepare_inputs(
        rows, ones, computed, ones > 0, count, np.zeros(0, np.int32), table, last, block_size, 1
    )
    assert out.input_ids[:count].tolist() == host.input_ids.tolist()
    assert out.positions[:count].tolist() == host.positions.tolist()
    assert out.slots[:count].tolist() == host.slot_mapping.tolist()
    assert out.seq_lens[:count].tolist() == (computed + 1).tolist()
    assert out.rows[:count].tolist() == rows.tolist()
    for padding in (out.rows, out.positions, out.slots, out.input_ids):
        assert not padding[count:].any()
    assert (out.seq_lens[count:] == 1).all()
