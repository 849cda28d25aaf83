"""Decode steps as CUDA graphs: one launch instead of hundreds.

A graph holds everything from row numbers to tokens, for one padded batch size:

    host   rows, computed tokens, appended blocks ──one copy──► staged
    graph  prepare_decode ─► plan of the attention's work ─► forward ─► logits ─► sample
    host   tokens ◄──one copy── results

What changes from step to step is read from device memory, so a replay needs these two small copies and
nothing else. The graph samples as far as most requests ask for: greedily, or with temperature, top_k,
top_p and min_p. A step in which a row asks for more is sampled again from its logits, all rows at once;
that overwrites their last tokens, and is in order before the next step reads them. Padding rows up to
the graph's size are the dummy row 0. Graphs are captured largest first, so that the smaller ones fit
into the memory of the first.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import GraphAttention, StepInputs
from engine.models.base import Model
from engine.models.small_steps import SmallSteps
from engine.ops.prepare_decode import HEADER, DecodeInputs, prepare_decode, staged_size
from engine.ops.sample_cuda import SamplingClass
from engine.plan import StepPlan
from engine.runner.capture import capture_graphs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.request_table import RequestTable, table_updates
from engine.runner.step_memory import SlotSample, StepMemory


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, 16 to 256, 32 to 512, 64 beyond, up to max_batch: few padded rows."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]
    sizes += range(576, 1025, 64)
    return sorted({size for size in sizes if size < max_batch} | {max_batch})


@dataclass(slots=True)
class GraphStep:
    """A decode step that has been replayed."""

    logits: Tensor  # [batch, vocab_size] of the plan's rows, valid until the next replay
    sample: SlotSample | None  # None if a row asks for more than a graph does


class DecodeGraphs:
    """Captured decode steps by batch size, and the static buffers they read."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        sampler: DeviceSampler,
        table: RequestTable,
        max_batch: int,
        device: torch.device,
        small_steps: SmallSteps | None = None,
    ) -> None:
        self.model = model
        self.attention = attention
        self.sampler = sampler
        self.table = table
        self.max_batch = max_batch
        self.sizes = graph_sizes(max_batch)
        self.max_updates = max_batch  # a decode step appends at most one block per row
        self.memory = StepMemory(staged_size(max_batch, self.max_updates), max_batch, device)
        self.inputs = DecodeInputs.allocate(max_batch, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.small_steps = small_steps
        self.logits: Tensor | None = None  # [max_batch, vocab_size], of all sizes: they run in turn

    def can_run(self, plan: StepPlan) -> bool:
        """Pure decode steps only; a new row means a prefill row, so those never come with new rows."""
        return bool(self.graphs) and plan.num_decodes == plan.batch_size <= self.max_batch

    def run(self, plan: StepPlan) -> GraphStep:
        """Upload, replay, download: nothing waits."""
        batch = plan.batch_size
        size = self.sizes[bisect_left(self.sizes, batch)]
        slot = self.memory.next_slot()
        self.stage(plan, slot.words)
        self.sampler.flush()
        self.memory.upload(slot)
        self.replay(size)
        self.memory.download(slot)
        is_plain = self.sampler.is_plain(plan.rows)
        assert self.logits is not None
        return GraphStep(self.logits[:batch], SlotSample(slot, batch) if is_plain else None)

    def replay(self, size: int) -> None:
        self.graphs[size].replay()

    def stage(self, plan: StepPlan, words: npt.NDArray[np.int32]) -> None:
        """Write `words`, the contract of prepare_decode."""
        batch, computed = plan.batch_size, HEADER + self.max_batch
        words[0], words[1] = batch, 0
        words[HEADER : HEADER + batch] = plan.rows
        words[computed : computed + batch] = plan.num_computed
        if plan.appended:
            updates = table_updates(plan)
            assert len(updates) <= self.max_updates, (
                "a decode step appends one block per row at most"
            )
            words[1] = len(updates)
            words[computed + self.max_batch :][: updates.size] = updates.reshape(-1)

    @torch.inference_mode()
    def capture(self, progress: Callable[[float, str], None]) -> None:
        """Capture all sizes. Before it, one eager decode step must have run (kernels loaded)."""
        self.graphs = capture_graphs(self.body, self.sizes, progress, "batch {}")

    def body(self, size: int) -> Tensor:
        """From `staged` to logits, and to the tokens in `memory`."""
        prepare_decode(
            self.memory.staged,
            self.table.block_table,
            self.table.last_token,
            self.inputs,
            size,
            self.attention.kv.block_size,
        )
        inputs = self.step_inputs(size)
        if self.small_steps is not None and size in self.small_steps.sizes:
            hidden = self.small_steps.forward(inputs)
        else:
            self.attention.plan_on_device(inputs.seq_lens_device, inputs.rows_device, size)
            hidden = self.model.forward(inputs, self.attention)
        out = None if self.logits is None else self.logits[:size]
        logits = self.model.logits(hidden, out)
        if self.logits is None:  # the largest size is the first
            self.logits = logits
        self.sampler.sample_on_device(
            logits,
            self.inputs.rows[:size],
            self.inputs.seq_lens[:size],  # the place of the token to come
            SamplingClass.SIMPLE,
            last_token=self.table.last_token,
            out=(self.memory.token_ids[:size], self.memory.is_bad[:size]),
        )
        return logits

    def step_inputs(self, size: int) -> StepInputs:
        """Views of the static buffers. Host fields describe shapes only: their values are unknown."""
        buffers = self.inputs
        return StepInputs(
            input_ids=buffers.input_ids[:size],
            positions=buffers.positions[:size],
            slot_mapping=buffers.slots[:size],
            logits_indices=buffers.positions[:0],
            block_table=self.table.block_table,
            rows=np.zeros(size, np.int32),
            num_decodes=size,
            query_start=list(range(size + 1)),
            seq_lens=[1] * size,
            block_ids=self.table.block_ids[:0],
            rows_device=buffers.rows[:size],
            seq_lens_device=buffers.seq_lens[:size],
        )
