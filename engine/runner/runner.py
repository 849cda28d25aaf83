"""Execute plans: forward pass, sampling, and the last token of each row for the next step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionSpec, StepInputs
from engine.models.base import Model
from engine.models.small_steps import SmallSteps
from engine.ops.prepare_inputs import prepare_inputs
from engine.plan import StepPlan, StepResult
from engine.runner.chunk_graphs import ChunkGraphs, padded_tokens
from engine.runner.constraints import RowConstraints
from engine.runner.decode_graphs import DecodeGraphs, GraphStep
from engine.runner.device_inputs import DeviceInputs
from engine.runner.device_sampler import DeviceSampler, spread_masks
from engine.runner.host_blocks import HostBlocks
from engine.runner.prompt_logprobs import PromptOutput, score_prompts
from engine.runner.request_table import RequestTable
from engine.runner.sampler import SampleOutput, Sampler
from engine.runner.step_memory import SlotSample


@dataclass(slots=True)
class HeldStep:
    """A step up to its logits."""

    plan: StepPlan
    logits: Tensor
    prompt: PromptOutput | None


@dataclass(slots=True)
class StepHandle:
    """A launched step. `wait` gives its values; on a CPU they are there already."""

    sample: SampleOutput | SlotSample | None
    done: torch.cuda.Event | None = None  # recorded after the copy to the host
    prompt: PromptOutput | None = None
    held: HeldStep | None = None  # sampling waits for `finish`
    advance: Callable[[StepResult], None] | None = None  # constraints of rows take in the tokens

    def wait(self) -> StepResult:
        """Call it once."""
        if self.done is not None:
            self.done.synchronize()
        if self.sample is None:
            result = StepResult(token_ids=np.zeros(0, np.int32))
        else:
            result = self.sample.result()
        if self.prompt is not None:
            result.prompt_logprobs = self.prompt.result()
        if self.advance is not None:
            self.advance(result)
        return result


class ModelRunner:
    """Owns the device state of running requests: rows, sampling rows, KV cache (through attention).

    The same on every device. On a GPU, `device_inputs` uploads a step's inputs, and where there
    are `decode_graphs` and `chunk_graphs`, steps are replayed.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler | DeviceSampler,
        table: RequestTable,
        device_inputs: DeviceInputs | None = None,
        decode_graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.table = table
        self.device_inputs = device_inputs
        self.decode_graphs = decode_graphs
        self.host_blocks: HostBlocks | None = None  # with --swap-space
        self.token_sizes: list[int] = []  # that steps with chunks are padded to
        self.chunk_graphs: ChunkGraphs | None = None
        self.small_steps: SmallSteps | None = None  # decode steps without a graph take it, too
        self.specs = distinct(model.attention_specs)
        self.constraints = RowConstraints(sampler.table.vocab_size, sampler.table.eos_token_ids)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Run one step. Freed rows are given back first: a new request may take one in the same plan.

        If a row's next token depends on its last one by constraints, `finish` has to do the rest.
        """
        if plan.swap_out or plan.swap_in:
            assert self.host_blocks is not None, "a plan swaps blocks without memory for them"
            self.host_blocks.copy(plan)
        for row in plan.freed_rows:
            self.sampler.free(row)
            self.constraints.free(row)
        for init in plan.new_rows:
            self.sampler.add(init)
            self.constraints.add(init)
        self.table.apply(plan)
        logits: Tensor | None
        prompt: PromptOutput | None = None
        graph_step: GraphStep | None = None
        if self.decode_graphs is not None and self.decode_graphs.can_run(plan):
            graph_step = self.decode_graphs.run(plan)
            logits = graph_step.logits
        else:
            logits, prompt = self.forward(plan)
        if logits is not None and self.constraints.among(sampling_rows(plan)):
            return StepHandle(None, held=HeldStep(plan, logits, prompt))
        if graph_step is not None and graph_step.sample is not None:
            return StepHandle(graph_step.sample, graph_step.sample.slot.done)
        sample = None if logits is None else self.sample(plan, logits)
        return self.to_host(sample, prompt)

    @torch.inference_mode()
    def finish(self, handle: StepHandle) -> None:
        """Sample a step that was held, now that the tokens before its own are committed."""
        held, handle.held = handle.held, None
        if held is None:
            return
        rows = sampling_rows(held.plan)
        constrained = self.constraints.among(rows)
        places, given = self.constraints.masks(constrained)
        masks = spread_masks(places, given, len(rows), held.logits.device)
        done = self.to_host(self.sample(held.plan, held.logits, masks), held.prompt)
        handle.sample, handle.done, handle.prompt = done.sample, done.done, done.prompt
        handle.advance = partial(self.constraints.advance, constrained)

    def to_host(self, sample: SampleOutput | None, prompt: PromptOutput | None) -> StepHandle:
        """Results on their way to the host."""
        if not isinstance(self.sampler, DeviceSampler) or (sample is None and prompt is None):
            return StepHandle(sample, prompt=prompt)
        on_host = StepHandle(
            None if sample is None else to_pinned_host(sample),
            torch.cuda.Event(),
            None if prompt is None else prompt_to_pinned_host(prompt),
        )
        assert on_host.done is not None
        on_host.done.record()
        return on_host

    def forward(self, plan: StepPlan) -> tuple[Tensor | None, PromptOutput | None]:
        """One pass, but for a captured decode step.

        Returns logits [num_sampled, vocab_size] of the rows that sample, None if none does, and the
        log-probabilities of prompt tokens, None if nobody wants them.
        """
        hidden, indices = self.hidden_states(plan)
        prompt: PromptOutput | None = None
        if plan.prompt_spans:
            prompt = score_prompts(hidden, plan.prompt_spans, self.model, self.sampler)
            hidden = hidden.index_select(0, indices)
        num_sampled = plan.batch_size if plan.is_decode else int(plan.samples.sum())
        if num_sampled == 0:
            return None, prompt
        return self.model.logits(hidden)[:num_sampled], prompt

    def hidden_states(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Of the tokens that logits are wanted of, or of all if prompts are scored; and which the former are."""
        inputs = self.step_inputs(plan)
        takes_all = plan.is_decode or bool(plan.prompt_spans)
        wanted = None if takes_all else inputs.logits_indices
        steps = self.small_steps
        if steps is not None and plan.is_decode and len(inputs.input_ids) in steps.sizes:
            return steps.forward(inputs), inputs.logits_indices
        graphs = self.chunk_graphs
        if graphs is None or plan.is_decode or not graphs.can_run(len(inputs.input_ids)):
            self.attention.plan(inputs, self.specs)
            return self.model.forward(inputs, self.attention, wanted), inputs.logits_indices
        hidden, attended = graphs.run(inputs)
        if wanted is not None and len(wanted) == 0:
            return hidden[:0], wanted
        return self.model.finish(hidden, attended, wanted), inputs.logits_indices

    def sample(self, plan: StepPlan, logits: Tensor, masks: Tensor | None = None) -> SampleOutput:
        rows, positions = plan.rows, (plan.num_computed + plan.num_tokens).astype(np.int64)
        if not plan.is_decode:
            rows, positions = rows[plan.samples], positions[plan.samples]
        if isinstance(self.sampler, DeviceSampler):
            last_token = self.table.last_token
            return self.sampler.sample(logits, rows, positions, masks, last_token)
        sample = self.sampler.sample(logits, rows, positions, masks)
        index = torch.from_numpy(rows.astype(np.int64))
        self.table.last_token.index_copy_(0, index, sample.token_ids)
        return sample

    def step_inputs(self, plan: StepPlan) -> StepInputs:
        """Inputs of a step, but for a captured decode step. On a GPU padded as a captured one would be."""
        block_size = self.attention.kv.block_size
        if self.device_inputs is not None:
            sizes = self.token_sizes
            if plan.is_decode:
                sizes = [] if self.small_steps is None else self.small_steps.sizes
            size = padded_tokens(plan.total_tokens, sizes)
            return self.device_inputs.make(plan, self.table, block_size, size)
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

    def release_unused_memory(self) -> None:
        """Give back what torch keeps for later, after an allocation failed: it may be in useless pieces."""
        if self.device_inputs is not None:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def scrub(self) -> None:
        """Replace NaN and infinity in the KV cache, after a request's numbers went bad.

        Masked positions are multiplied by zero, and zero times NaN would spread to whoever gets the
        blocks next.
        """
        self.attention.kv.scrub()


def sampling_rows(plan: StepPlan) -> npt.NDArray[np.int32]:
    return plan.rows if plan.is_decode else plan.rows[plan.samples]


def pinned_copy(tensor: Tensor) -> Tensor:
    """Start copying a device result to pinned memory; valid once the stream has got here."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_pinned_host(sample: SampleOutput) -> SampleOutput:
    logprobs = sample.logprobs
    return replace(
        sample,
        token_ids=pinned_copy(sample.token_ids),
        is_bad=pinned_copy(sample.is_bad),
        logprobs=None if logprobs is None else logprobs.apply(pinned_copy),
    )


def prompt_to_pinned_host(prompt: PromptOutput) -> PromptOutput:
    logprobs, is_bad = prompt.logprobs.apply(pinned_copy), pinned_copy(prompt.is_bad)
    return replace(prompt, logprobs=logprobs, is_bad=is_bad)


def distinct(specs: list[AttentionSpec]) -> list[AttentionSpec]:
    """The different attention specs of a model's layers, in order of appearance."""
    return list(dict.fromkeys(specs))
