"""y = silu(gate) * up, the middle of a gated MLP (https://arxiv.org/abs/2002.05202).

Contract
    gate_up [T, 2 * N] bfloat16 or float32, contiguous: gate in the first N columns, up in the rest;
            not changed
    returns [T, N], a fresh tensor of the same dtype

Rows do not influence each other, bit for bit. That takes care on a CPU: torch computes most elements
with vector instructions and what remains at the end of a stretch with scalar ones, whose exp differs
in the last bit. A stretch is a row, or what a thread got of it, and threads cut at multiples of
(all elements / threads), which moves with T. So rows are processed in groups that torch either leaves
to one thread or cuts between rows:

    T rows   |<-- a multiple of the threads, at least GRAIN elements each -->|<-- groups < GRAIN -->|
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

GRAIN = 32768  # elements that torch gives a thread at least (at::internal::GRAIN_SIZE)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See the module's contract."""
    gate, up = gate_up.chunk(2, -1)
    if gate_up.is_cuda or gate.numel() < GRAIN:
        return F.silu(gate).mul_(up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    for rows in row_groups(gate.shape[0], gate.shape[1], torch.get_num_threads()):
        torch.ops.aten.silu.out(gate[rows], out=out[rows])
    return out.mul_(up)


def reference(gate_up: Tensor) -> Tensor:
    """The definition, without regard to how torch splits the work."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def row_groups(num_rows: int, width: int, num_threads: int) -> Iterator[slice]:
    """Slices that cover the rows, in each of which torch's threads start at the beginning of a row."""
    per_thread = -(-GRAIN // width)
    done = num_rows - num_rows % num_threads
    if num_threads > 1 and done >= per_thread * num_threads:
        yield slice(0, done)
    else:
        done = 0
    step = max(1, (GRAIN - 1) // width)
    for start in range(done, num_rows, step):
        yield slice(start, min(start + step, num_rows))
