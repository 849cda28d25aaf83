"""y = f(gate) * up, the middle of a gated MLP (https://arxiv.org/abs/2002.05202).

Contract
    gate_up     [T, 2 * N] bfloat16, float16 or float32, contiguous: gate in the first N columns, up in
                the rest; not changed
    activation  f: "silu", "gelu" or "gelu_tanh" (its approximation by tanh)
    interleaved columns are those of engine/ops/fused_product.py instead: eight of gate, eight of up, ...
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
from engine.ops.fused_product import GROUP, can_interleave, split_interleaved

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


def silu_and_mul(gate_up: Tensor, interleaved: bool = False) -> Tensor:
    """silu(gate) * up: see the module's contract."""
    return act_and_mul(gate_up, "silu", interleaved)


def act_and_mul(gate_up: Tensor, activation: str, interleaved: bool = False) -> Tensor:
    """See the module's contract."""
    if gate_up.is_cuda and has_kernel(gate_up, interleaved):
        return launch(gate_up, activation, interleaved)
    gate, up = split_interleaved(gate_up) if interleaved else gate_up.chunk(2, -1)
    if gate_up.is_cuda or gate.numel() < GRAIN:
        return FUNCTIONS[activation](gate).mul_(up)
    out = torch.empty(gate.shape, dtype=gate.dtype)
    for rows in row_groups(gate.shape[0], gate.shape[1], torch.get_num_threads()):
        OUT_FUNCTIONS[activation](gate[rows], out=out[rows])
    return out.mul_(up)


def reference(gate_up: Tensor, activation: str = "silu", interleaved: bool = False) -> Tensor:
    """The definition, without regard to how torch splits the work."""
    gate, up = split_interleaved(gate_up) if interleaved else gate_up.chunk(2, -1)
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


def has_kernel(gate_up: Tensor, interleaved: bool) -> bool:
    """Whether gate and up consist of 16-byte vectors: a group is one in 16-bit types."""
    if interleaved:
        return GROUP * gate_up.element_size() == 16
    return gate_up.shape[1] // 2 * gate_up.element_size() % 16 == 0


def launch(gate_up: Tensor, activation: str, interleaved: bool = False) -> Tensor:
    num_rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, inner)
    num_vectors = num_rows * inner * gate_up.element_size() // 16
    kernel(None if interleaved else inner, gate_up.dtype, activation)(
        (-(-num_vectors // VECTORS_PER_BLOCK),),
        (THREADS,),
        (gate_up.data_ptr(), out.data_ptr(), np.int64(num_vectors)),
    )
    return out


@cache
def kernel(inner: int | None, dtype: torch.dtype, activation: str) -> jit.Kernel:
    spec = variant(inner, dtype, activation)
    return jit.kernel(spec.source, spec.name, spec.defines)


def variant(inner: int | None, dtype: torch.dtype, activation: str) -> jit.VariantSpec:
    """For rows of `inner` outputs; None: for interleaved gate and up, of any number."""
    if activation not in FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(FUNCTIONS)}")
    defines: jit.Defines = {jit.scalar_define(dtype): 1, "ACTIVATION": activation}
    layout: jit.Defines = {"INTERLEAVED": 1} if inner is None else {"INNER": inner}
    return jit.VariantSpec(SOURCE, "act_and_mul", {**defines, **layout})


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """What the models served so far use: interleaved in 16-bit types, where that is possible."""
    inner, dtype = config.intermediate_size, config.dtype
    if dtype.itemsize == 2 and can_interleave(2 * inner):
        return [variant(None, dtype, "silu")]
    return [variant(inner, dtype, "silu")] if inner * dtype.itemsize % 16 == 0 else []
