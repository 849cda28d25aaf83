"""Two chains of kernels on one GPU at a time: for which models, and what kernels do otherwise then.

A kernel that takes whole multiprocessors keeps the other chain's kernels from starting, so within `leaving_room`
products take half of each where that costs little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

BYTES = 2  # of a weight: kernels are for 16-bit dtypes
# A layer's weights that each chain may read by itself. By estimate: at 256 rows of 1,000 tokens what an H200 gains
# by reading weights and cache at the same time, 20 us a layer, is the time of 80 MB read once more, and the second
# chain finds a part of small layers in the L2 cache (50 MB).
MOST_LAYER_BYTES = 40 << 20


class LayerSizes(Protocol):
    """What of a DecoderSpec or a jit.KernelConfig says how large a layer is."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass
class Settings:
    """Of this process."""

    leaves_room: bool = False  # see `leaving_room`


settings = Settings()


@contextmanager
def leaving_room() -> Iterator[None]:
    """Within it, products leave room on each multiprocessor for kernels of another chain."""
    settings.leaves_room = True
    try:
        yield
    finally:
        settings.leaves_room = False


def layer_bytes(sizes: LayerSizes) -> int:
    """Of a layer's matrices."""
    heads = 2 * sizes.num_heads + 2 * sizes.num_kv_heads  # q and output, k and v
    return BYTES * sizes.hidden_size * (heads * sizes.head_dim + 3 * sizes.intermediate_size)


def is_worth(sizes: LayerSizes) -> bool:
    """Whether a layer is so small that two chains may read it in place of one."""
    return layer_bytes(sizes) <= MOST_LAYER_BYTES
