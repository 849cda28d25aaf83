"""Execute plans: forward pass, sampling, and the last token of each row for the next step."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionBackend, AttentionSpec, StepInputs
from engine.models.base import Model
from engine.ops.prepare_inputs import prepare_inputs
from engine.plan import StepPlan, StepResult
from engine.runner.request_table import RequestTable
from engine.runner.sampler import SampleOutput, Sampler


@dataclass(slots=True)
class StepHandle:
    """A launched step. `wait` gives its values; on a CPU they are there already."""

    sample: SampleOutput | None

    def wait(self) -> StepResult:
        if self.sample is None:
            return StepResult(token_ids=np.zeros(0, np.int32))
        return self.sample.result()


class ModelRunner:
    """Owns the device state of running requests: rows, sampling rows, KV cache (through attention)."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        table: RequestTable,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.table = table
        self.specs = distinct(model.attention_specs)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Run one step. Freed rows are given back first: a new request may take one in the same plan."""
        for row in plan.freed_rows:
            self.sampler.free(row)
        for init in plan.new_rows:
            self.sampler.add(init)
        self.table.apply(plan)
        inputs = self.step_inputs(plan)
        self.attention.plan(inputs, self.specs)
        hidden = self.model.forward(inputs, self.attention)
        num_sampled = int(plan.samples.sum())
        if num_sampled == 0:
            return StepHandle(None)
        logits = self.model.logits(hidden.index_select(0, inputs.logits_indices))[:num_sampled]
        rows = plan.rows[plan.samples]
        positions = (plan.num_computed + plan.num_tokens)[plan.samples].astype(np.int64)
        sample = self.sampler.sample(logits, rows, positions)
        self.table.last_token[torch.from_numpy(rows.astype(np.int64))] = sample.token_ids
        return StepHandle(sample)

    def step_inputs(self, plan: StepPlan) -> StepInputs:
        block_size = self.attention.kv.block_size
        tokens = prepare_inputs(
            plan.rows,
            plan.num_tokens,
            plan.num_computed,
            plan.samples,
            plan.num_decodes,
            plan.prompt_tokens,
            self.table.block_ids,
            self.table.last_token,
            block_size,
        )
        seq_lens = plan.num_computed + plan.num_tokens
        most_blocks = -(-int(seq_lens.max()) // block_size)
        block_ids = self.table.block_ids[plan.rows, :most_blocks]
        return StepInputs(
            input_ids=tokens.input_ids,
            positions=tokens.positions,
            slot_mapping=tokens.slot_mapping,
            logits_indices=tokens.logits_indices,
            block_table=torch.from_numpy(block_ids),
            rows=plan.rows,
            num_decodes=plan.num_decodes,
            query_start=[0, *np.cumsum(plan.num_tokens).tolist()],
            seq_lens=seq_lens.tolist(),
            block_ids=block_ids,
        )

    @torch.inference_mode()
    def scrub(self) -> None:
        """Replace NaN and infinity in the KV cache, after a request's numbers went bad.

        Masked positions are multiplied by zero, and zero times NaN would spread to whoever gets the
        blocks next.
        """
        for tensor in (*self.attention.kv.k, *self.attention.kv.v):
            torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)


def distinct(specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """The different attention specs of a model's layers, in order of appearance."""
    return list(dict.fromkeys(specs))
