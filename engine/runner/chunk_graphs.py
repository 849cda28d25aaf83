"""Steps with prompt chunks as CUDA graphs: from token ids to the last layer's attention.

    host   ids, positions, slots ──one copy──► inputs        rows, chunks, work items ──one copy──► attention
    graph  embedding ─► every layer, up to the attention of the last ─► hidden, attended
    eager  what the tokens that sample need besides ─► logits ─► sample

One graph serves all steps up to its number of tokens: how many decode rows and chunks there are, and of
which lengths, is read from device memory. The host would launch some 200 kernels otherwise, which takes it
7 to 14 ms: more than a 0.5B model's step of 2,048 tokens (4 ms) or a large one's of 512 takes the GPU. Steps that
hide their launches (WORTH_FLOP) are not captured.
"""

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import GraphAttention, StepInputs
from engine.models.base import Model
from engine.runner.capture import capture_graphs
from engine.runner.device_inputs import DeviceInputs
from engine.runner.request_table import RequestTable

WORTH_FLOP = 15e12  # of a step: 20 ms of an H100's, and more of others'
QUANTUM = 16  # tokens; sizes are multiples of it


def most_graph_tokens(max_tokens: int, num_weights: int) -> int:
    """Tokens of the largest step with chunks that is worth a graph; `max_tokens` is the step's budget."""
    worth = int(WORTH_FLOP / (2 * max(1, num_weights)))
    return min(-(-max_tokens // QUANTUM) * QUANTUM, max(QUANTUM, -(-worth // 256) * 256))


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens that steps are padded to, `most` the last: 16 to 64 apart, from 1,024 on an eighth."""
    sizes = [16, 32, 48, 64, *range(96, 257, 32), *range(320, 1025, 64)]
    for low in range(10, most.bit_length()):  # 1,024 to 2,048, and so on
        sizes += range((1 << low) * 9 // 8, (2 << low) + 1, 1 << (low - 3))
    return [size for size in sizes if size < most] + [most]


def padded_tokens(num_tokens: int, sizes: list[int]) -> int:
    """The least of `sizes` that holds a step; the step's own size if none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else num_tokens


class ChunkGraphs:
    """Captured steps by number of tokens, and what they leave behind."""

    def __init__(
        self,
        model: Model,
        attention: GraphAttention,
        device_inputs: DeviceInputs,
        table: RequestTable,
        sizes: list[int],
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.attention = attention
        self.device_inputs = device_inputs
        self.table = table
        self.sizes = sizes
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        # hidden states and attention of the largest size; others' are in front
        self.results: tuple[Tensor, Tensor] | None = None
        attention.allocate_chunks(sizes[-1], dtype)

    def can_run(self, num_tokens: int) -> bool:
        """A step of `num_tokens`, padding included."""
        return num_tokens in self.graphs

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Model.attend_all of `inputs`, which DeviceInputs has put in place. Valid until the next run."""
        size = len(inputs.input_ids)
        self.attention.plan_chunks(inputs)
        self.replay(size)
        assert self.results is not None
        hidden, attended = self.results
        return hidden[:size], attended[:size]

    def replay(self, size: int) -> None:
        self.graphs[size].replay()

    @torch.inference_mode()
    def capture(self, progress: Callable[[float, str], None]) -> None:
        """Capture all sizes, the largest first: the others fit into its memory."""
        for part in self.device_inputs.tokens(self.sizes[-1]):
            part.zero_()  # an earlier step's inputs lie elsewhere: as ids they could be anything
        torch.cuda.synchronize()
        self.graphs = capture_graphs(self.body, self.sizes, progress, "{} tokens")

    def body(self, size: int) -> None:
        """From the inputs' places to `results`."""
        self.attention.capture_chunks(size)
        hidden, attended = self.model.attend_all(self.step_inputs(size), self.attention)
        if self.results is None:  # the largest size is the first
            self.results = hidden.clone(), attended
        self.results[0][:size].copy_(hidden)

    def step_inputs(self, size: int) -> StepInputs:
        """The places of a step's inputs. Host fields say nothing: attention knows where to look."""
        ids, positions, slots = self.device_inputs.tokens(size)
        return StepInputs(
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            logits_indices=positions[:0],
            block_table=self.table.block_table,
            rows=np.zeros(0, np.int32),
            num_decodes=0,
            query_start=[0],
            seq_lens=[],
            block_ids=self.table.block_ids[:0],
        )
