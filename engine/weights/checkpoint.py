"""Checkpoints that tensors are read from: safetensors files, or one GGUF file."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.api.config import ConfigError
from engine.models.config import LFS_MARK, find_weight_files
from engine.weights.gguf_file import read_gguf
from engine.weights.gguf_model import hf_names, hf_values
from engine.weights.slots import Shape, Source

FLOAT_TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Checkpoint(Protocol):
    """Named tensors on disk, under their Hugging Face names."""

    files: dict[str, str]  # tensor -> file that holds it

    def describe(self, name: str) -> tuple[Shape, str]:
        """Shape and dtype of a tensor, without reading it."""

    def read(self, source: Source) -> Tensor:
        """The source's region, in the stored dtype, on the CPU."""


class SafetensorsCheckpoint:
    """A directory of safetensors files, each opened once and memory-mapped."""

    def __init__(self, path: str) -> None:
        self.files: dict[str, str] = {}
        self.handles: dict[str, Any] = {}
        for file in find_weight_files(path):
            try:
                handle = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                if is_lfs_pointer(file):
                    raise ConfigError(
                        f"{file}: is a pointer of Git LFS, not the weights: run `git lfs pull` in the "
                        "folder"
                    ) from None
                raise ConfigError(
                    f"{file}: damaged or truncated safetensors file ({error}); compare its size "
                    "with the publisher's and fetch it again"
                ) from error
            self.handles[file] = handle
            for name in handle.keys():  # noqa: SIM118 (not a dict)
                self.files.setdefault(name, file)

    def describe(self, name: str) -> tuple[Shape, str]:
        stored = self.handles[self.files[name]].get_slice(name)
        kind = stored.get_dtype()
        return tuple(stored.get_shape()), FLOAT_TYPES.get(kind, kind)

    def read(self, source: Source) -> Tensor:
        handle = self.handles[self.files[source.name]]
        if not source.region:
            return handle.get_tensor(source.name)
        return handle.get_slice(source.name)[source.region]


def is_lfs_pointer(file: str) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(len(LFS_MARK)) == LFS_MARK
    except OSError:
        return False


class GgufCheckpoint:
    """A GGUF file; tensors are dequantized to float32 as they are read."""

    def __init__(self, path: str) -> None:
        self.gguf = read_gguf(path)
        self.names = hf_names(self.gguf)
        self.files = dict.fromkeys(self.names, Path(path).name)

    def describe(self, name: str) -> tuple[Shape, str]:
        return self.gguf.tensors[self.names[name]].shape, "float32"

    def read(self, source: Source) -> Tensor:
        values = hf_values(self.gguf, self.names[source.name])[source.region]
        # a tensor must own writable memory; the file's mapping is read-only
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at `path`. Raises ConfigError if files are missing or damaged."""
    return GgufCheckpoint(path) if Path(path).is_file() else SafetensorsCheckpoint(path)
