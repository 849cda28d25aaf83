"""Tensor maps: descriptions of tensors that Hopper's tensor copy engine (TMA) reads boxes of.

A map is 128 opaque bytes that the driver makes (cuTensorMapEncodeTiled, CUDA driver API) and a kernel
takes by value. It holds an address, so it is right for whatever lies there while a graph replays it.
"""

import ctypes
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAP_BYTES = 128
MAP_ALIGNMENT = 64  # that the driver asks of the host's buffer
DTYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
INTERLEAVE_NONE = 0
SWIZZLE_128B = 3
L2_PROMOTION_128B = 2
FILL_ZEROS = 0  # for elements outside the tensor

Map = npt.NDArray[np.void]


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> Map:
    """Map of `tensor`, float16 or bfloat16, for loads of `box` elements per dimension into shared memory.

    The last dimension is contiguous; other strides and the address are multiples of 16 bytes. The box is
    at most 64 wide in the last dimension (128 bytes, the span of the swizzle in which it arrives, see
    cuda/common/sm90.cuh) and at most 256 in the others. Encoding takes microseconds; results are kept.
    Raises ValueError for other tensors, RuntimeError with the driver's status.
    """
    return encode(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), box)


@lru_cache(maxsize=4096)
def encode(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],  # in elements
    box: tuple[int, ...],
) -> Map:
    """The checks belong to it, so that a map that is known takes no time."""
    if dtype not in DTYPES or strides[-1] != 1:
        raise ValueError(
            f"tensor map of {dtype} with strides {strides}: it must be float16 or bfloat16, with a "
            "contiguous last dimension"
        )
    num_bytes = tuple(stride * dtype.itemsize for stride in strides)
    if address % 16 or any(stride % 16 for stride in num_bytes[:-1]):
        raise ValueError(
            f"tensor map: address and strides {num_bytes} must be multiples of 16 bytes; copy the tensor"
        )
    if len(box) != len(shape) or max(box) > 256 or box[-1] * dtype.itemsize > 128:
        raise ValueError(f"tensor map: box {box} does not suit a tensor of shape {tuple(shape)}")
    # the driver counts dimensions from the innermost, whose stride it knows
    rank = len(shape)
    memory = np.zeros(MAP_BYTES + MAP_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % MAP_ALIGNMENT
    encoded = memory[start : start + MAP_BYTES]
    status = driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(encoded.ctypes.data),
        ctypes.c_int(DTYPES[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*shape[::-1]),
        (ctypes.c_uint64 * rank)(*num_bytes[-2::-1]),
        (ctypes.c_uint32 * rank)(*box[::-1]),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(INTERLEAVE_NONE),
        ctypes.c_int(SWIZZLE_128B),
        ctypes.c_int(L2_PROMOTION_128B),
        ctypes.c_int(FILL_ZEROS),
    )
    if status:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled: status {status} for shape {shape}, strides {num_bytes} bytes, box {box}"
        )
    return encoded.view(f"V{MAP_BYTES}")


@cache
def driver() -> Any:
    """The CUDA driver's library, which is there wherever a GPU is."""
    return ctypes.CDLL("libcuda.so.1")
