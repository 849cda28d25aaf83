"""Launch a kernel that may start before the kernel in front of it has ended, or whose blocks all run at once.

CuPy's launch has no attributes, so this calls the driver's cuLaunchKernelEx. (CUDA driver API,
"Execution Control"; the attributes are CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION and
CU_LAUNCH_ATTRIBUTE_COOPERATIVE.) In a captured graph the former makes a programmatic edge. What kernels have
to do for it: cuda/common/dependent_launch.cuh. The driver refuses the latter if so many blocks do not fit.
"""

import ctypes
from collections.abc import Sequence
from functools import cache

COOPERATIVE = 2
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a union of 64 bytes of which this one uses an int."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("unused", ctypes.c_char * 60),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def launch_with(
    attributes: Sequence[int],
    function: int,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    arguments: Sequence[int],  # addresses of the arguments' values, read before this returns
    smem_bytes: int,
    stream: int,
) -> None:
    """Launch the CUfunction with attributes. Raises RuntimeError with the driver's error number."""
    given = (Attribute * len(attributes))(*(Attribute(id=i, value=1) for i in attributes))
    config = LaunchConfig(
        grid=(*grid, 1, 1)[:3],
        block=(*block, 1, 1)[:3],
        smem_bytes=smem_bytes,
        stream=stream,
        attributes=ctypes.cast(given, ctypes.POINTER(Attribute)),
        num_attributes=len(attributes),
    )
    addresses = (ctypes.c_void_p * len(arguments))(*arguments)
    status = driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), addresses, None
    )
    if status:
        raise RuntimeError(f"cuLaunchKernelEx failed with CUDA error {status}")
