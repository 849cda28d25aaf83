"""The data of the host tier: KV blocks in host memory, and the copies of a step.

All copies run on the compute stream, in order, before anything else of the step. A side stream would gain
nothing: a block is copied out at the moment when the step wants to write to it, and copied in when the
step wants to read it. And what is in order needs no events, with overlap as without.

On a GPU the memory is pinned, and one kernel a direction copies all blocks in all layers, reading and
writing host memory in place (engine/ops/copy_blocks.py).
"""

import weakref
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import KVCache
from engine.ops.copy_blocks import cache_addresses, copy_blocks
from engine.plan import StepPlan
from engine.runner.staging import Staging

PAGE_BYTES = 4096
PAIRS_PER_COPY = 4096  # more are copied in several launches
PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped


class HostBlocks:
    """`num_slots` blocks in host memory beside a KV cache.

    arrays: [num_slots, num_kv_heads, block_size, head_dim] for each of the cache's k and v, in the
    cache's dtype; a block is contiguous. What they hold before they are written is undefined.
    """

    def __init__(self, kv: KVCache, num_slots: int) -> None:
        """Raises MemoryError if there is too little memory, or if the driver does not pin it."""
        self.caches = [*kv.k, *kv.v]
        first = self.caches[0]
        self.device = first.device
        shape = (num_slots, *first.shape[1:])
        num_bytes = num_slots * first[0].numel() * first.element_size()
        memory = page_aligned(len(self.caches) * num_bytes)
        self.arrays = [part.view(first.dtype).view(shape) for part in memory.split(num_bytes)]
        self.staging: Staging | None = None
        if first.is_cuda:
            pin(memory)
            weakref.finalize(self, unpin, memory).atexit = False  # then the process ends anyway
            self.staging = Staging(PAIRS_PER_COPY * 16, self.device)
        self.cache_addresses = cache_addresses(self.caches, self.device)
        self.addresses = cache_addresses(self.arrays, self.device)
        self.copy_out([(0, 0)])  # loads the kernel; block 0 belongs to nobody
        self.copy_in([(0, 0)])

    def copy(self, plan: StepPlan) -> None:
        """The step's copies. Out comes first: copies in may overwrite its blocks, or read what it has
        just written."""
        self.copy_out(plan.swap_out)
        self.copy_in(plan.swap_in)

    def copy_out(self, pairs: list[tuple[int, int]]) -> None:
        """To the host: (device block, slot)."""
        for part in self._parts(pairs):
            copy_blocks(self.caches, self.arrays, part, self.cache_addresses, self.addresses)

    def copy_in(self, pairs: list[tuple[int, int]]) -> None:
        """To the device: (slot, device block)."""
        for part in self._parts(pairs):
            copy_blocks(self.arrays, self.caches, part, self.addresses, self.cache_addresses)

    def _parts(self, pairs: list[tuple[int, int]]) -> Iterator[Tensor]:
        """int64 [n, 2] on the device; a part is valid until the next one is asked for, in stream order."""
        for start in range(0, len(pairs), PAIRS_PER_COPY):
            part = np.array(pairs[start : start + PAIRS_PER_COPY], np.int64)
            if self.staging is None:
                yield torch.from_numpy(part)
            else:
                yield self.staging.upload([part])[0]


def page_aligned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that begins a page and is not touched yet."""
    memory = torch.from_numpy(np.empty(num_bytes + PAGE_BYTES, np.uint8))
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + num_bytes]


def pin(memory: Tensor) -> None:
    """Keep the pages in place, and let the GPU reach them at the same address."""
    code = int(
        torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE_AND_MAPPED)
    )
    if code != 0:
        raise MemoryError(f"cudaHostRegister of {memory.numel()} bytes failed with error {code}")


def unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
