"""Host to device copies that neither wait nor overtake: pinned buffers in a ring, one copy a step.

The device side is one buffer. Its reader of step n runs before the copy of step n+1, as both are on
the compute stream. The host side is a ring, since the host writes for step n+1 while the copy of
step n may still be under way; before a buffer is used again, its last copy is waited for (it ended
long ago, unless the host is `depth` steps ahead).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, for vector loads

TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Uploads small arrays in one asynchronous copy on the current stream."""

    def __init__(self, num_bytes: int, device: torch.device, depth: int = 3) -> None:
        self.device_buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.host_buffers = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(depth)
        ]
        self.host_arrays = [buffer.numpy() for buffer in self.host_buffers]
        self.events = [torch.cuda.Event() for _ in range(depth)]
        self.turn = 0

    def upload(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Copy `arrays` (int32, int64 or float32, contiguous) to the device, in the order given.

        Returns device tensors of the same shapes, valid until the next upload in stream order.
        Raises AssertionError if they do not fit.
        """
        self.events[self.turn].synchronize()
        host = self.host_arrays[self.turn]
        views: list[Tensor] = []
        end = 0
        for array in arrays:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + array.nbytes
            assert end <= len(host), f"step inputs of {end} bytes exceed the buffer of {len(host)}"
            host[start:end] = array.reshape(-1).view(np.uint8)
            view = self.device_buffer[start:end].view(TORCH_DTYPES[array.dtype])
            views.append(view.view(array.shape))
        self.device_buffer[:end].copy_(self.host_buffers[self.turn][:end], non_blocking=True)
        self.events[self.turn].record()
        self.turn = (self.turn + 1) % len(self.events)
        return views
