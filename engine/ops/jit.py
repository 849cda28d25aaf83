"""CUDA kernels from cuda/*.cu: compile ahead or on first use, load through CuPy, launch.

    spec = VariantSpec("rms_norm.cu", "rms_norm", {"SCALAR_BF16": 1})
    run = kernel(spec.source, spec.name, spec.defines)       # a Kernel, the same one every time
    run((num_rows,), (256,), (x.data_ptr(), y.data_ptr(), np.int32(n), np.float32(eps)))

Each op file lists what a model needs in `specs(config)`; `prebuild` compiles such lists in a few
processes before the first request. A kernel is compiled for the device's own architecture; Hopper's is
sm_90a, whose tensor core and copy instructions plain sm_90 lacks. We compile and CuPy only loads,
because CuPy always adds an -arch of its own, and names its cache without the text of included files.

CuPy and NVRTC are imported when a kernel is asked for, never before: this module works without them.
"""

import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.ops.dependent_launch import (
    COOPERATIVE,
    PROGRAMMATIC_STREAM_SERIALIZATION,
    launch_with,
)
from engine.ops.kernel_build import Built, Progress, build
from engine.ops.kernel_cache import Job, KernelCache, source_path
from engine.ops.nvrtc import KernelBuildError

Defines = Mapping[str, str | int | float]

ALL_ARCHS = ("sm_80", "sm_89", "sm_90a")  # what continuous integration compiles for
SCALARS = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


@dataclass(frozen=True)
class VariantSpec:
    """One kernel with its macros."""

    source: str  # file in cuda/
    name: str  # the extern "C" entry
    defines: Defines = field(default_factory=dict)
    smem_bytes: int = 0  # dynamic shared memory per block
    archs: tuple[str, ...] = ALL_ARCHS  # those it is written for, among ALL_ARCHS


@dataclass(frozen=True)
class KernelConfig:
    """What of a model, its cache and its settings selects kernel variants."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    softcaps: tuple[bool, ...] = (False,)  # is attention soft-capped? Both, if layers differ
    arch: str | None = None  # to compile for where that is not the current device's


@dataclass
class Settings:
    """Of this process; the engine sets them before it asks for a kernel."""

    cache_dir: Path | None = None  # None: $XDG_CACHE_HOME/sluice/kernels
    require_cached: bool = False  # refuse to compile
    dependent_launches: bool = False  # see `dependent_launches`


settings = Settings()

_kernels: dict[tuple[object, ...], "Kernel"] = {}
_caches: dict[Path | None, KernelCache] = {}
_report: dict[Job, Built] = {}
_lock = threading.RLock()


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Within it, kernels may start while the kernel before them ends, where both are written for that
    (cuda/common/dependent_launch.cuh). It costs the host some microseconds a launch: for captures."""
    settings.dependent_launches = torch.cuda.get_device_capability() >= (9, 0)
    try:
        yield
    finally:
        settings.dependent_launches = False


def scalar_define(dtype: torch.dtype) -> str:
    """The macro of cuda/common/dtype.cuh for `dtype`: "SCALAR_BF16", "SCALAR_FP16", "SCALAR_FP32"."""
    if dtype not in SCALARS:
        raise KernelBuildError(f"no kernels for {dtype}: use bfloat16, float16 or float32")
    return f"SCALAR_{SCALARS[dtype]}"


def device_arch(device: int | None = None) -> str:
    """Architecture to compile for on a CUDA device (default: the current one), e.g. "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise KernelBuildError(
            f"GPU {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; "
            "kernels need 8.0 or newer (A100, RTX 30 and later)"
        )
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def kernel(
    source: str,
    name: str,
    defines: Defines | None = None,
    smem_bytes: int = 0,
    arch: str | None = None,
) -> "Kernel":
    """The kernel `name` of cuda/`source`, loaded onto the current device, the same object every time.

    With `arch` it is compiled for that architecture and not loaded, which needs no GPU.
    Raises KernelBuildError with the compiler's log.
    """
    key = (source, name, tuple(sorted((defines or {}).items())), smem_bytes, arch)
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = Kernel(source, name, defines or {}, smem_bytes, arch)
            if arch is None:
                found.load(torch.cuda.current_device())
            else:
                found.build(arch)
            _kernels[key] = found
    return found


def prebuild(
    specs: Sequence[VariantSpec],
    arch: str | None = None,
    require_cached: bool | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> list[Built]:
    """Compile what the cache lacks of `specs`, several at a time, for one architecture.

    Specs whose archs do not cover it are left out. `require_cached` (default: the settings') raises
    KernelBuildError instead of compiling; `progress` gets (done, total, what).
    """
    target = arch or device_arch()
    jobs = [Job.of(s.source, s.defines, target) for s in specs if supports(s, target)]
    refuse = settings.require_cached if require_cached is None else require_cached
    built = build(list(dict.fromkeys(jobs)), kernel_cache(), refuse, progress, workers)
    with _lock:
        _report.update((one.job, one) for one in built)
    return built


def supports(spec: VariantSpec, arch: str) -> bool:
    """Whether `spec` is written for `arch`. Newer or in-between GPUs run what sm_80 or sm_89 run."""
    if arch in ALL_ARCHS:
        return arch in spec.archs
    nearest = "sm_80" if int(arch.strip("sm_af")) < 89 else "sm_89"
    return nearest in spec.archs


def report() -> list[Built]:
    """Every source and set of macros that this process has had built or found in the cache."""
    with _lock:
        return list(_report.values())


def kernel_cache() -> KernelCache:
    with _lock:
        if settings.cache_dir not in _caches:
            _caches[settings.cache_dir] = KernelCache(settings.cache_dir)
        return _caches[settings.cache_dir]


class Kernel:
    """One kernel, on whichever device is current when it is launched."""

    def __init__(
        self, source: str, name: str, defines: Defines, smem_bytes: int = 0, arch: str | None = None
    ) -> None:
        self.source = source
        self.name = name
        self.defines = dict(defines)
        self.smem_bytes = smem_bytes
        self.arch = arch  # None: each device's own
        self._functions: dict[int, Any] = {}  # by device: a CUDA module belongs to one
        self._packers: dict[tuple[type, ...], ArgumentPacker] = {}
        self._stream = RawStream()
        self._is_dependent = "grid_dependency_wait" in source_path(source).read_text()
        self._lock = threading.Lock()  # of the packers' buffers and the stream object

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[object],
        smem_bytes: int | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch on torch's current device and stream; `cooperative`: all blocks at the same time.

        args: tensor.data_ptr() for a pointer, np.int32, np.int64, np.float32 scalars, or a numpy array
        of one element for a struct by value. Every extent of `grid` must be at least 1.
        """
        device = torch._C._cuda_getDevice()  # torch's own function makes a check first
        function = self._functions.get(device) or self.load(device)
        types = tuple(map(type, args))
        with self._lock:
            packer = self._packers.get(types)
            if packer is None:
                packer = self._packers[types] = ArgumentPacker(self.name, args)
            packer.fill(args)
            self._stream.ptr = torch._C._cuda_getCurrentRawStream(device)  # never the last call's
            size = self.smem_bytes if smem_bytes is None else smem_bytes
            attributes = [COOPERATIVE] if cooperative else []
            if self._is_dependent and settings.dependent_launches:
                attributes.append(PROGRAMMATIC_STREAM_SERIALIZATION)
            if attributes:
                stream = self._stream.ptr
                launch_with(attributes, function.ptr, grid, block, packer.addresses, size, stream)
            else:
                function(grid, block, packer.pointers, size, self._stream)

    def build(self, arch: str) -> Built:
        """Compile for `arch`, or find the result. Raises KernelBuildError."""
        job = Job.of(self.source, self.defines, arch)
        with _lock:
            if job not in _report:
                (_report[job],) = build([job], kernel_cache(), settings.require_cached)
            return _report[job]

    def load(self, device: int) -> Any:
        """Load onto a device, compiling if need be. Must not happen while a graph is captured."""
        import cupy

        arch = device_arch(device)
        if self.arch not in (None, arch):
            raise KernelBuildError(
                f"kernel {self.name} was asked for {self.arch}, but cuda:{device} is {arch}"
            )
        path = self.build(arch).entry.path
        torch.cuda.init()  # torch's context must be there first; CuPy then uses the same
        with torch.cuda.device(device), cupy.cuda.Device(device):
            raw = cupy.RawModule(path=str(path)).get_function(self.name)
            # CuPy gives kernels of one file the same function: its limit may have been raised further
            if self.smem_bytes > raw.max_dynamic_shared_size_bytes:
                raw.max_dynamic_shared_size_bytes = self.smem_bytes
            self._functions[device] = raw.kernel
        return self._functions[device]


class RawStream:
    """All that CuPy reads of a stream."""

    __slots__ = ("ptr",)

    def __init__(self) -> None:
        self.ptr = 0


class ArgumentPacker:
    """Arguments of one kernel and one choice of types, in a buffer that is written anew at each launch.

    CuPy turns every argument into a small object at every launch unless it is given such objects. These
    point into the buffer; the driver copies their values during the launch call.
    """

    FORMATS: Mapping[type, str] = {
        int: "Q",  # an address
        np.int32: "i",
        np.uint32: "I",
        np.int64: "q",
        np.uint64: "Q",
        np.float32: "f",
    }
    ALIGNMENT = 64  # a tensor map's; more than enough for the others

    def __init__(self, name: str, args: Sequence[object]) -> None:
        from cupy.cuda.function import CNumpyArray

        formats, offsets, size = ["<"], [], 0
        self.arrays: list[tuple[int, int]] = []  # places of structs among the arguments, and sizes
        sizes: list[int] = []
        for i, value in enumerate(args):
            if isinstance(value, np.ndarray) and value.size == 1:
                text, align, nbytes = f"{value.nbytes}s", self.ALIGNMENT, value.nbytes
                self.arrays.append((i, nbytes))
            elif type(value) in self.FORMATS:
                text = self.FORMATS[type(value)]
                align = nbytes = struct.calcsize("<" + text)
            else:
                raise TypeError(
                    f"kernel {name}, argument {i}: {type(value).__name__} has no certain width; pass "
                    "tensor.data_ptr(), np.int32(...), np.int64(...), np.float32(...), or an array of "
                    "one element"
                )
            start = -(-size // align) * align
            formats.append(f"{start - size}x{text}")
            offsets.append(start)
            sizes.append(nbytes)
            size = start + nbytes
        self.struct = struct.Struct("".join(formats))
        memory = np.zeros(size + self.ALIGNMENT, np.uint8)
        first = -memory.ctypes.data % self.ALIGNMENT
        self.buffer = memory[first : first + size]
        self.memory = self.buffer.data
        self.pointers = tuple(
            CNumpyArray(self.buffer[start : start + nbytes])
            for start, nbytes in zip(offsets, sizes, strict=True)
        )
        self.addresses = [self.buffer.ctypes.data + start for start in offsets]

    def fill(self, args: Sequence[object]) -> None:
        """Write the values; their types must be those of the first call."""
        if self.arrays:
            values: list[Any] = list(args)
            for i, nbytes in self.arrays:
                values[i] = values[i].tobytes()
                assert len(values[i]) == nbytes, "a struct argument changed its size"
            args = values
        self.struct.pack_into(self.memory, 0, *args)
