"""What captured steps read of their prompt chunks, and where they leave their attention.

A CUDA graph reads the same addresses at each replay, so a step's rows, chunks and work items are copied to
where the capture found those of its own. Their numbers are data as well.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
ALIGNMENT = 4  # int32 numbers; 16 bytes, for vector loads


class CapturedChunks:
    """Device memory for the chunks of one step at a time. `max_items`: see PagedAttention.most_items.

    num_items  int32 [1] items of `work` that count
    rows       int32 [max_chunks] rows of the block table
    q_start    int32 [max_chunks] first token of each chunk
    work       int32 [max_items, 4] see engine/ops/paged_prefill.py
    out        [max_tokens, num_heads, head_dim] attention; padding tokens' is zero
    """

    def __init__(self, max_chunks: int, max_items: int, out: Tensor) -> None:
        self.out = out
        width = aligned(max_chunks)
        self.words = torch.zeros(
            ALIGNMENT + 2 * width + 4 * max_items, dtype=torch.int32, device=out.device
        )
        head, self.rows, self.q_start, work = self.words.split(
            [ALIGNMENT, width, width, 4 * max_items]
        )
        self.num_items, self.work = head[:1], work.view(max_items, 4)

    def fill(self, rows: Int32Array, q_start: Int32Array, items: Int32Array) -> None:
        """Copy a step's chunks and items here, in stream order and without waiting."""
        assert len(items) <= len(self.work), f"{len(items)} items for {len(self.work)} places"
        places = [ALIGNMENT, len(self.rows), len(self.q_start)]
        host = pack([np.array([len(items)], np.int32), rows, q_start, items], places)
        self.words[: len(host)].copy_(host, non_blocking=True)


def pack(arrays: list[Int32Array], places: list[int]) -> Tensor:
    """Arrays behind each other in pinned memory, which torch uses again only once it has been copied from.

    Array i gets room for `places[i]` numbers, at least its own; arrays beyond `places` for their own, aligned.
    """
    sizes = [*places, *(aligned(array.size) for array in arrays[len(places) :])]
    host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=torch.cuda.is_available())
    values = host.numpy()
    for array, piece in zip(arrays, np.split(values, np.cumsum(sizes)[:-1]), strict=True):
        piece[: array.size] = array.reshape(-1)
    return host


def upload(arrays: list[Int32Array], device: torch.device) -> list[Tensor]:
    """int32 arrays on the device, in one asynchronous copy."""
    pieces = pack(arrays, []).to(device, non_blocking=True)
    parts = pieces.split([aligned(array.size) for array in arrays])
    return [part[: array.size].view(array.shape) for array, part in zip(arrays, parts, strict=True)]


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
