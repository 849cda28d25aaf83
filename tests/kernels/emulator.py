"""Runs the kernels of cuda/ on the CPU: the same sources, compiled with g++ and cuda_emu.h.

`EmulatedKernel` stands in for engine.ops.jit.Kernel, so a test drives an op's own launcher on CPU
tensors: grid, arguments and kernel are all checked. Libraries are kept in a cache by contents.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from engine.ops import jit
from engine.ops.kernel_cache import default_directory, flatten, write_file

HEADER = Path(__file__).parent / "cuda_emu.h"
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-w")

DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?(\w[\w ]*?)\s+(\w+)\[\]\s*;"
)


def shared_library(source: str, name: str, defines: Mapping[str, object]) -> Path:
    """Compile one kernel for the CPU, or find it compiled."""
    assert COMPILER is not None, "g++ is needed to emulate kernels"
    text = DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emu::dynamic_shared();", flatten(source))
    text += (
        '\nextern "C" void emulate(const unsigned* shape, size_t smem_bytes, void** args) {\n'
        f"  emu::launch({name}, shape, smem_bytes, args);\n}}\n"
    )
    macros = [f"-D{key}={value}" for key, value in sorted(defines.items())]
    parts = [COMPILER, *FLAGS, *macros, HEADER.read_text(encoding="utf-8"), text]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:40]
    directory = default_directory().parent / "emulated-kernels"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{key}.so"
    if not path.is_file():
        command = [COMPILER, *FLAGS, "-DSLUICE_EMULATE=1", *macros, "-include", str(HEADER)]
        building = directory / f"{key}.cpp"
        write_file(building, text.encode())
        built = path.with_suffix(".building")
        done = subprocess.run(
            [*command, str(building), "-o", str(built)], capture_output=True, text=True, check=False
        )
        building.unlink()
        assert done.returncode == 0, f"{source} {defines}\n{done.stderr[:4000]}"
        built.replace(path)
    return path


class EmulatedKernel:
    """A kernel whose launch takes place, and ends, on the CPU."""

    def __init__(
        self,
        source: str,
        name: str,
        defines: Mapping[str, object] | None = None,
        smem_bytes: int = 0,
        arch: str | None = None,
    ) -> None:
        library = ctypes.CDLL(str(shared_library(source, name, defines or {})))
        self.name = name
        self.smem_bytes = smem_bytes
        self.run = library.emulate
        self.run.argtypes = (
            ctypes.POINTER(ctypes.c_uint),
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
        )
        self.run.restype = None

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[object],
        smem_bytes: int | None = None,
        cooperative: bool = False,
    ) -> None:
        """As engine.ops.jit.Kernel: pointers are tensors' data_ptr(), here of CPU tensors. A cooperative
        kernel is compiled with CLUSTER, the number of its blocks."""
        shape = [*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3]]
        assert all(extent >= 1 for extent in shape), f"{self.name}: empty launch {grid} {block}"
        assert np.prod(shape[3:]) <= 1024, f"{self.name}: {block} threads are too many for a block"
        assert max(shape[1:3]) <= 65535, f"{self.name}: grid {grid} is too large in y or z"
        values = [np.array([a], np.uint64) if type(a) is int else np.array(a) for a in args]
        for value, given in zip(values, args, strict=True):
            assert value.size == 1, f"{self.name}: argument {given!r}"
            assert not isinstance(given, bool | float), (
                f"{self.name}: {given!r} has no certain width"
            )
        pointers = (ctypes.c_void_p * len(values))(*[v.ctypes.data for v in values])
        amount = self.smem_bytes if smem_bytes is None else smem_bytes
        self.run((ctypes.c_uint * 6)(*shape), amount, pointers)


class CudaLike(torch.Tensor):
    """A CPU tensor that a dispatching function takes for one on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def as_if_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for functions that choose their kernel by `is_cuda`."""
    return tensor.as_subclass(CudaLike)


@contextmanager
def emulated(*modules: ModuleType) -> Iterator[None]:
    """While it lasts, launchers of these op modules run kernels on the CPU."""
    kernels: dict[tuple[object, ...], EmulatedKernel] = {}

    def kernel(
        source: str,
        name: str,
        defines: Mapping[str, object] | None = None,
        smem_bytes: int = 0,
        arch: str | None = None,
    ) -> EmulatedKernel:
        key = (source, name, tuple(sorted((defines or {}).items())), smem_bytes)
        if key not in kernels:
            kernels[key] = EmulatedKernel(source, name, defines, smem_bytes)
        return kernels[key]

    real = jit.kernel
    importers = [m for m in modules if getattr(m, "kernel", None) is real]  # from jit import kernel
    for module in (jit, *importers):
        module.kernel = kernel
    forget(modules)
    try:
        yield
    finally:
        for module in (jit, *importers):
            module.kernel = real
        forget(modules)


def emulated_map(tensor: torch.Tensor, box: tuple[int, ...]) -> np.ndarray:
    """As TensorMap in cuda/common/sm90_emulated.cuh."""
    missing = 3 - tensor.dim()
    extents = [*tensor.shape[::-1], *[1] * missing]
    strides = [*(2 * s for s in tensor.stride()[-2::-1]), *[0] * missing]
    boxes = [*box[::-1], *[1] * missing]
    words = [tensor.data_ptr(), *extents, *strides, *boxes, *[0] * 7]
    return np.array(words, np.uint64).view("V128")


def forget(modules: Sequence[ModuleType]) -> None:
    """Empty the caches in which launchers keep kernels."""
    for module in modules:
        for value in vars(module).values():
            clear: Callable[[], None] | None = getattr(value, "cache_clear", None)
            if clear is not None:
                clear()
