"""Inputs of steps on a GPU, but for captured decode steps: made with numpy, uploaded in one copy."""

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import StepInputs
from engine.ops.prepare_inputs import TokenInputs, prepare_inputs
from engine.plan import StepPlan
from engine.runner.device_sampler import staged
from engine.runner.request_table import RequestTable, table_updates
from engine.runner.staging import Staging


class DeviceInputs:
    """Uploads what the host knows of a step; the last sampled tokens are already on the device."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        # Far more than a step's new tokens need. Prefixes found in the cache may need any number, where
        # many long ones start at once: these updates get a copy of their own.
        self.most_updates = max_tokens + max_rows
        wide = 4 * max_tokens + 2 * max_rows  # ids, positions, slots, logits, decode rows
        narrow = 2 * max_rows + 3 * self.most_updates  # rows, lengths, table updates
        self.device = device
        self.staging = Staging(8 * wide + 4 * narrow + 1024, device)

    def tokens(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where `make` puts ids, positions and slots of a step of `size` tokens, an even number: in front."""
        assert size % 2 == 0, "each would start at a multiple of 16 bytes, not where the last ends"
        ids, positions, slots = (
            self.staging.device_buffer[: 24 * size].view(torch.int64).view(3, -1)
        )
        return ids, positions, slots

    def make(
        self, plan: StepPlan, table: RequestTable, block_size: int, min_tokens: int = 1
    ) -> StepInputs:
        """Device inputs of `plan`, padded to `min_tokens`; brings the device's block table up to date, too.

        Padding tokens of a decode step are rows as prepare_decode makes them: of one token, of the dummy row 0.
        """
        decodes = plan.num_decodes
        tokens = self.host_tokens(plan, table, block_size, min_tokens)
        seq_lens = plan.num_computed + plan.num_tokens
        decode_rows = plan.rows[:decodes].astype(np.int64)
        rows, lens = plan.rows, seq_lens
        if plan.is_decode and decodes < min_tokens:
            padding = (0, min_tokens - decodes)
            rows, lens = np.pad(rows, padding), np.pad(lens, padding, constant_values=1)
        updates = table_updates(plan)
        are_few = len(updates) <= self.most_updates
        ids, positions, slots, logits, decode_ids, rows_device, lens_device, changes = (
            self.staging.upload(
                [
                    tokens.input_ids.numpy(),
                    tokens.positions.numpy(),
                    tokens.slot_mapping.numpy(),
                    tokens.logits_indices.numpy(),
                    decode_rows,
                    rows,
                    lens,
                    updates if are_few else updates[:0],
                ]
            )
        )
        if not are_few:
            changes = staged(updates, self.device).to(self.device, non_blocking=True)
        if len(updates):
            where = changes[:, :2].long()
            table.block_table.index_put_((where[:, 0], where[:, 1]), changes[:, 2])
        if decodes:
            ids[:decodes] = table.last_token.index_select(0, decode_ids)
        return StepInputs(
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            logits_indices=logits,
            block_table=table.block_table,
            rows=plan.rows,
            num_decodes=decodes,
            query_start=plan.query_start,
            seq_lens=seq_lens.tolist(),
            block_ids=table.block_ids[:0],
            rows_device=rows_device,
            seq_lens_device=lens_device,
        )

    def host_tokens(
        self, plan: StepPlan, table: RequestTable, block_size: int, min_tokens: int
    ) -> TokenInputs:
        """All but the ids of decode rows, which only the device knows."""
        unknown = torch.zeros(len(table.last_token), dtype=torch.int64)
        return prepare_inputs(
            plan.rows,
            plan.num_tokens,
            plan.num_computed,
            plan.samples,
            plan.num_decodes,
            plan.prompt_tokens,
            table.block_ids,
            unknown,
            block_size,
            min_tokens=min_tokens,
            min_logits=1,
        )
