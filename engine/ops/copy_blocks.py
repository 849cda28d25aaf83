"""Copy whole KV blocks in all layers: within the cache, or between it and host memory.

Contract
    sources, targets  tensors [num_blocks, ...], k and v of each layer, of one dtype and alike but for
                      the number of blocks; may be the same. With a GPU they are on it or in pinned memory
                      of the host, and a block is contiguous and a multiple of 16 bytes; on a CPU the
                      layout is free
    pairs             int64 [n, 2] from, to, on the device. No target is the source or the target of
                      another pair of the same memory
    source_addresses, target_addresses
                      `cache_addresses(...)` of both, made once: they stay where they are
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit

SOURCE, NAME = "copy_blocks.cu", "copy_blocks"
THREADS = 256


def copy_blocks(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    pairs: Tensor,
    source_addresses: Tensor,
    target_addresses: Tensor,
) -> None:
    """See the module's contract."""
    if pairs.is_cuda:
        launch(sources, targets, pairs, source_addresses, target_addresses)
    else:
        reference(sources, targets, pairs)


def cache_addresses(caches: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64 [number of caches] addresses of the caches, on the device that copies."""
    return torch.tensor([one.data_ptr() for one in caches], dtype=torch.int64).to(device)


def reference(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Tensor) -> None:
    """In torch, cache by cache."""
    for source, target in zip(sources, targets, strict=True):
        if source.dtype.itemsize == 1:  # torch does not index every 8-bit type
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        target[pairs[:, 1]] = source[pairs[:, 0]]


# --- CUDA: cuda/copy_blocks.cu ---


def launch(
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
    pairs: Tensor,
    source_addresses: Tensor,
    target_addresses: Tensor,
) -> None:
    if pairs.shape[0] == 0:
        return
    source, target = sources[0], targets[0]
    block_bytes = source[0].numel() * source.element_size()
    assert source.is_contiguous(), "blocks of a GPU's cache are contiguous"
    assert target.is_contiguous(), "blocks to be copied to are contiguous"
    assert block_bytes % 16 == 0, f"a block of {block_bytes} bytes is no multiple of 16"
    kernel()(
        (pairs.shape[0], len(sources)),
        (THREADS,),
        (
            source_addresses.data_ptr(),
            target_addresses.data_ptr(),
            pairs.data_ptr(),
            np.int64(block_bytes // 16),
        ),
    )


@cache
def kernel() -> jit.Kernel:
    return jit.kernel(SOURCE, NAME)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """One kernel for every model: it moves bytes."""
    return [jit.VariantSpec(SOURCE, NAME)]
