"""y = f(gate) * up, the middle of a gated MLP (https://arxiv.org/abs/2002.05202).

Contract
    gate_up     [T, 2 * N] bfloat16, float16 or float32, contiguous: gate in the first N columns, up in
                the rest; not changed
    activation  f: "silu", "gelu" or "gelu_tanh" (its approximation by tanh)
    returns     [T, N], a fresh tensor of the same dtype; f's result is rounded to it before the product

Rows do not influence each other, bit for bit. That takes care on a CPU: torch computes most elements
with vector instructions and what remains at the end of a stretch with scalar ones, whose exp differs
in the last bit. A stretch is a row, or what a thread got of it, and threads cut at multiples of
(all elements / threads), which moves with T. So rows are processed in groups that torch either leaves
to one thread or cuts between rows:

    T rows   |<-- a multiple of the threads, at least GRAIN elements each -->|<-- groups < GRAIN -->|
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops import jit

GRAIN = 32768  # elements that torch gives a thread at least (at::internal::GRAIN_SIZE)

FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
OUT_FUNCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu.out,
    "gelu": torch.ops.aten.gelu.out,
    "gelu_tanh": partial(torch.ops.aten.gelu.out, approximate="tanh"),
}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: see the module's contract."""
    return act_and_mul(gate_up, "silu")


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """See the module's contract."""
    gate, up = gate_up.chunk(2, -1)
    if gate_up.is_cuda and gate.shape[-1] * gate.element_size() % 16 == 0:
        return launch(gate_up, activation)
    if gate_up.is_cuda or gate.numel() < GRAIN:
        return FUNCTIONS[activation](gate).mul_(up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    for rows in row_groups(gate.shape[0], gate.shape[1], torch.get_num_threads()):
        OUT_FUNCTIONS[activation](gate[rows], out=out[rows])
    return out.mul_(up)


def reference(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """The definition, without regard to how torch splits the work."""
    gate, up = gate_up.chunk(2, -1)
    return FUNCTIONS[activation](gate) * up


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


# --- CUDA: cuda/activation.cu ---

SOURCE = "activation.cu"
THREADS = 128
VECTORS_PER_BLOCK = 2 * THREADS  # of 16 bytes, as the kernel's PER_THREAD says


def launch(gate_up: Tensor, activation: str) -> Tensor:
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    num_vectors = num_rows * inner * gate_up.element_size() // 16
    kernel(inner, gate_up.dtype, activation)(
        (-(-num_vectors // VECTORS_PER_BLOCK),),
        (THREADS,),
        (gate_up.data_ptr(), out.data_ptr(), np.int64(num_vectors)),
    )
    return out


@cache
def kernel(inner: int, dtype: torch.dtype, activation: str) -> jit.Kernel:
    spec = variant(inner, dtype, activation)
    return jit.kernel(spec.source, spec.name, spec.defines)


def variant(inner: int, dtype: torch.dtype, activation: str) -> jit.VariantSpec:
    if activation not in FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(FUNCTIONS)}")
    defines: jit.Defines = {jit.scalar_define(dtype): 1, "INNER": inner, "ACTIVATION": activation}
    return jit.VariantSpec(SOURCE, "act_and_mul", defines)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """What the models served so far use."""
    if config.intermediate_size * config.dtype.itemsize % 16:
        return []
    return [variant(config.intermediate_size, config.dtype, "silu")]
