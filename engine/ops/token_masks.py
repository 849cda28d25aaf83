"""Which tokens may come next, one bit for each, and logits without the others.

Contract
    masks    int32 [S, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t is allowed; bits
             beyond V are not read
    apply    sets logits (float32 [S, V], in place) of forbidden tokens to minus infinity

On a GPU the sampling kernels read the masks themselves (cuda/common/sampling_row.cuh): a bit more for
each logit, where writing the logits would double the traffic.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALL = -1  # a word that allows 32 tokens


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack(allowed: Tensor) -> Tensor:
    """Masks of bool [S, V] on the CPU."""
    num_rows, vocab_size = allowed.shape
    bits = np.zeros((num_rows, num_words(vocab_size) * 32), np.bool_)
    bits[:, :vocab_size] = allowed.numpy()
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def unpack(masks: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [S, V]."""
    octets = np.ascontiguousarray(masks).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def apply(logits: Tensor, masks: Tensor) -> None:
    """See the module's contract; CPU tensors. Rows that allow everything are not touched."""
    words = masks.numpy()
    for row in np.flatnonzero((words != ALL).any(axis=1)).tolist():
        allowed = unpack(words[row : row + 1], logits.shape[1])[0]
        logits[row].masked_fill_(torch.from_numpy(~allowed), -torch.inf)
