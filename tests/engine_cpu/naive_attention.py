"""The plainest attention there is: one sequence at a time, all scores at once, float32. An oracle."""

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import (
    AttentionBackend,
    AttentionSpec,
    KVCache,
    StepInputs,
    allocate_kv_cache,
)
from engine.models.base import Model

BLOCK_SIZE = 4


class NaiveAttention(AttentionBackend):
    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        pass

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        out = torch.zeros(q.shape[0], spec.num_heads * spec.head_dim, dtype=q.dtype)
        for row, seq_len in enumerate(inputs.seq_lens):
            start, end = inputs.query_start[row], inputs.query_start[row + 1]
            k = self.sequence(self.kv.k[layer], inputs, row, seq_len)  # [seq_len, Hkv, D]
            v = self.sequence(self.kv.v[layer], inputs, row, seq_len)
            group = spec.num_heads // spec.num_kv_heads
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * spec.scale
            distance = torch.arange(seq_len - (end - start), seq_len)[:, None] - torch.arange(
                seq_len
            )
            seen = distance >= 0
            if spec.sliding_window is not None:
                seen &= distance < spec.sliding_window
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).flatten(1).to(q.dtype)
        return out

    def sequence(self, cache: Tensor, inputs: StepInputs, row: int, seq_len: int) -> Tensor:
        """The row's keys or values in order, float32 [seq_len, Hkv, D]."""
        blocks = torch.from_numpy(inputs.block_ids[row].astype(np.int64))
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float()


class Sequences:
    """Runs a model over sequences with KV caches of their own, chunk by chunk."""

    def __init__(self, model: Model, num_sequences: int = 1, max_len: int = 256) -> None:
        spec = model.attention_specs[0]
        self.blocks_per_sequence = -(-max_len // BLOCK_SIZE)
        kv = allocate_kv_cache(
            model.num_layers,
            1 + num_sequences * self.blocks_per_sequence,
            spec.num_kv_heads,
            BLOCK_SIZE,
            spec.head_dim,
            model.norm.weight.dtype,  # type: ignore[attr-defined]
            torch.device("cpu"),
        )
        self.model = model
        self.attention = NaiveAttention(kv)
        self.lengths = [0] * num_sequences

    @torch.inference_mode()
    def run(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Feed each sequence its chunk; returns logits [len(chunk), vocab_size] by sequence."""
        rows = list(chunks)
        ids, positions, slots, starts, seq_lens = [], [], [], [0], []
        table = np.zeros((len(rows), self.blocks_per_sequence), np.int32)
        for i, row in enumerate(rows):
            table[i] = 1 + row * self.blocks_per_sequence + np.arange(self.blocks_per_sequence)
            first = self.lengths[row]
            self.lengths[row] += len(chunks[row])
            ids += chunks[row]
            for position in range(first, self.lengths[row]):
                positions.append(position)
                slots.append(
                    int(table[i, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
                )
            starts.append(len(ids))
            seq_lens.append(self.lengths[row])
        padding = max(0, 2 - len(ids))  # as the runner does: products need two rows
        inputs = StepInputs(
            input_ids=torch.tensor(ids + [0] * padding),
            positions=torch.tensor(positions + [0] * padding),
            slot_mapping=torch.tensor(slots + [0] * padding),
            logits_indices=torch.arange(len(ids)),
            block_table=torch.from_numpy(table),
            rows=np.arange(1, len(rows) + 1, dtype=np.int32),
            num_decodes=0,
            query_start=starts,
            seq_lens=seq_lens,
            block_ids=table,
        )
        self.attention.plan(inputs, self.model.attention_specs)
        logits = self.model.logits(self.model.forward(inputs, self.attention))
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(rows)}

    def greedy(self, prompt: list[int], num_tokens: int, row: int = 0) -> list[int]:
        """The most likely continuation."""
        tokens: list[int] = []
        chunk = prompt
        for _ in range(num_tokens):
            tokens.append(int(self.run({row: chunk})[row][-1].argmax()))
            chunk = tokens[-1:]
        return tokens
