"""Copy whole blocks of the KV cache to other blocks, in all layers.

Contract
    caches    tensors [num_blocks, ...] of one shape and dtype: k and v of each layer. On a GPU a block
              is contiguous, and a multiple of 16 bytes; on a CPU the layout is free
    pairs     int64 [n, 2] from, to. No block is in two pairs, but that one may be the source of many
    addresses `cache_addresses(caches)`, made once: the caches stay where they are
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from engine.ops import jit

SOURCE, NAME = "copy_blocks.cu", "copy_blocks"
THREADS = 256


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor, addresses: Tensor) -> None:
    """See the module's contract."""
    if caches[0].is_cuda:
        launch(caches, pairs, addresses)
    else:
        reference(caches, pairs)


def cache_addresses(caches: Sequence[Tensor]) -> Tensor:
    """int64 [number of caches] addresses of the caches, on their device."""
    return torch.tensor([one.data_ptr() for one in caches], dtype=torch.int64).to(caches[0].device)


def reference(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """In torch, cache by cache."""
    for one in caches:
        one[pairs[:, 1]] = one[pairs[:, 0]]


# --- CUDA: cuda/copy_blocks.cu ---


def launch(caches: Sequence[Tensor], pairs: Tensor, addresses: Tensor) -> None:
    if pairs.shape[0] == 0:
        return
    first = caches[0]
    block_bytes = first[0].numel() * first.element_size()
    assert first.is_contiguous(), "blocks of a GPU's cache are contiguous"
    assert block_bytes % 16 == 0, f"a block of {block_bytes} bytes is no multiple of 16"
    kernel()(
        (pairs.shape[0], len(caches)),
        (THREADS,),
        (addresses.data_ptr(), pairs.data_ptr(), np.int64(block_bytes // 16)),
    )


@cache
def kernel() -> jit.Kernel:
    return jit.kernel(SOURCE, NAME)


def specs(config: jit.KernelConfig) -> list[jit.VariantSpec]:
    """One kernel for every model: it moves bytes."""
    return [jit.VariantSpec(SOURCE, NAME)]
