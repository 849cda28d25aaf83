"""Token-level inputs against a row-by-row oracle."""

import numpy as np
import pytest
import torch

from engine.ops.prepare_inputs import prepare_inputs

BLOCK = 4


def oracle(rows, num_tokens, num_computed, samples, num_decodes, prompt_tokens, block_ids, last):
    ids, positions, slots, logits = [], [], [], []
    prompt = list(prompt_tokens)
    for i, row in enumerate(rows):
        for j in range(num_tokens[i]):
            position = int(num_computed[i]) + j
            ids.append(int(last[row]) if i < num_decodes else int(prompt.pop(0)))
            positions.append(position)
            slots.append(int(block_ids[row, position // BLOCK]) * BLOCK + position % BLOCK)
        if samples[i]:
            logits.append(len(ids) - 1)
    assert not prompt
    return ids, positions, slots, logits


@pytest.mark.parametrize("seed", range(20))
def test_matches_the_oracle(seed):
    rng = np.random.default_rng(seed)
    batch, decodes = int(rng.integers(1, 9)), 0
    decodes = int(rng.integers(0, batch + 1))
    rows = rng.permutation(np.arange(1, 12))[:batch].astype(np.int32)
    num_tokens = np.where(np.arange(batch) < decodes, 1, rng.integers(1, 9, batch)).astype(np.int32)
    num_computed = rng.integers(0, 20, batch).astype(np.int32)
    samples = (np.arange(batch) < decodes) | (rng.random(batch) < 0.5)
    prompt_tokens = rng.integers(3, 100, int(num_tokens[decodes:].sum())).astype(np.int32)
    block_ids = rng.integers(1, 50, (12, 8)).astype(np.int32)
    last = torch.from_numpy(rng.integers(3, 100, 12))
    args = (rows, num_tokens, num_computed, samples, decodes, prompt_tokens, block_ids, last)
    ids, positions, slots, logits = oracle(*args)
    got = prepare_inputs(*args, BLOCK)
    total = len(ids)
    assert len(got.input_ids) == max(2, total)
    assert got.input_ids[:total].tolist() == ids
    assert got.positions[:total].tolist() == positions
    assert got.slot_mapping[:total].tolist() == slots
    assert got.logits_indices[: len(logits)].tolist() == logits
    assert len(got.logits_indices) == (max(4, len(logits)) if logits else 0)
    assert got.slot_mapping[total:].tolist() == [0] * (len(got.slot_mapping) - total)
