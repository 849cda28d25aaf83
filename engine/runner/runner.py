"""Execute plans: forward pass, sampling, and the last token of each row for the next step."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionSpec, StepInputs
from engine.models.base import Model
from engine.ops.logprobs import LogprobTensors
from engine.ops.prepare_inputs import prepare_inputs
from engine.plan import StepPlan, StepResult
from engine.runner.device_inputs import DeviceInputs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.graphs import DecodeGraphs
from engine.runner.request_table import RequestTable
from engine.runner.sampler import SampleOutput, Sampler


@dataclass(slots=True)
class StepHandle:
    """A launched step. `wait` gives its values; on a CPU they are there already."""

    sample: SampleOutput | None
    done: torch.cuda.Event | None = None  # recorded after the copy to the host

    def wait(self) -> StepResult:
        if self.sample is None:
            return StepResult(token_ids=np.zeros(0, np.int32))
        if self.done is not None:
            self.done.synchronize()
        return self.sample.result()


class ModelRunner:
    """Owns the device state of running requests: rows, sampling rows, KV cache (through attention).

    The same on every device. On a GPU, `device_inputs` uploads a step's inputs, and `graphs`, if
    given, replays decode steps.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler | DeviceSampler,
        table: RequestTable,
        device_inputs: DeviceInputs | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.table = table
        self.device_inputs = device_inputs
        self.graphs = graphs
        self.specs = distinct(model.attention_specs)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Run one step. Freed rows are given back first: a new request may take one in the same plan."""
        for row in plan.freed_rows:
            self.sampler.free(row)
        for init in plan.new_rows:
            self.sampler.add(init)
        self.table.apply(plan)
        if self.graphs is not None and self.graphs.can_run(plan):
            logits: Tensor | None = self.graphs.run(plan)
        else:
            logits = self.forward(plan)
        return StepHandle(None) if logits is None else self.sample(plan, logits)

    def forward(self, plan: StepPlan) -> Tensor | None:
        """One eager pass; logits [num_sampled, vocab_size] of the rows that sample, None if none does."""
        inputs = self.step_inputs(plan)
        self.attention.plan(inputs, self.specs)
        hidden = self.model.forward(inputs, self.attention)
        num_sampled = plan.batch_size if plan.is_decode else int(plan.samples.sum())
        if num_sampled == 0:
            return None
        if len(inputs.logits_indices) < len(hidden) or not plan.is_decode:
            hidden = hidden.index_select(0, inputs.logits_indices)
        return self.model.logits(hidden)[:num_sampled]

    def sample(self, plan: StepPlan, logits: Tensor) -> StepHandle:
        rows, positions = plan.rows, (plan.num_computed + plan.num_tokens).astype(np.int64)
        if not plan.is_decode:
            rows, positions = rows[plan.samples], positions[plan.samples]
        if isinstance(self.sampler, DeviceSampler):
            last_token = self.table.last_token
            sample = self.sampler.sample(logits, rows, positions, last_token=last_token)
            done = torch.cuda.Event()
            on_host = to_pinned_host(sample)
            done.record()
            return StepHandle(on_host, done)
        sample = self.sampler.sample(logits, rows, positions)
        index = torch.from_numpy(rows.astype(np.int64))
        self.table.last_token.index_copy_(0, index, sample.token_ids)
        return StepHandle(sample)

    def step_inputs(self, plan: StepPlan) -> StepInputs:
        """Inputs of an eager step."""
        block_size = self.attention.kv.block_size
        if self.device_inputs is not None:
            return self.device_inputs.make(plan, self.table, block_size)
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
            query_start=plan.query_start,
            seq_lens=seq_lens.tolist(),
            block_ids=block_ids,
        )

    @torch.inference_mode()
    def scrub(self) -> None:
        """Replace NaN and infinity in the KV cache, after a request's numbers went bad.

        Masked positions are multiplied by zero, and zero times NaN would spread to whoever gets the
        blocks next.
        """
        self.attention.kv.scrub()


def to_pinned_host(sample: SampleOutput) -> SampleOutput:
    """Start copying a device result to pinned memory; valid once the stream has got here."""

    def copy(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    logprobs = sample.logprobs
    if logprobs is not None:
        logprobs = LogprobTensors(
            sampled=copy(logprobs.sampled),
            rank=copy(logprobs.rank),
            top_ids=copy(logprobs.top_ids),
            top_logprobs=copy(logprobs.top_logprobs),
        )
    return replace(
        sample, token_ids=copy(sample.token_ids), is_bad=copy(sample.is_bad), logprobs=logprobs
    )


def distinct(specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """The different attention specs of a model's layers, in order of appearance."""
    return list(dict.fromkeys(specs))
