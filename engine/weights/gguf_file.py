"""Read a GGUF file: typed metadata, and tensors as views of the memory-mapped file.

Layout (little-endian), after https://github.com/ggml-org/ggml/blob/master/docs/gguf.md:

    "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: (key string, value type u32, value) ...
    tensors:  (name string, rank u32, dims u64 x rank fastest first, ggml type u32, offset u64) ...
    padding to `general.alignment` (32) | tensor data, offsets counted from here

A string is a u64 length and UTF-8 bytes; an array is an element type, a u64 length and elements.
The header is read with `struct`, a large token list in one pass, which is some twenty times faster
than building an array per string.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from engine.api.config import ConfigError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One stored tensor: `shape` slowest dimension first, `data` the raw bytes in the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: npt.NDArray[np.uint8]

    def to_float32(self) -> Float32Array:
        """Dequantized values, float32 of `shape`. A view of the file if it is stored that way."""
        if self.type == GGMLQuantizationType.F32:
            return self.data.view(np.float32).reshape(self.shape)
        if self.type == GGMLQuantizationType.F16:
            return self.data.view(np.float16).reshape(self.shape).astype(np.float32)
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[self.type]
        row_bytes = self.shape[-1] // values_per_block * bytes_per_block
        rows = self.data.reshape(*self.shape[:-1], row_bytes)
        try:
            return dequantize(rows, self.type).reshape(self.shape)
        except NotImplementedError:
            raise ConfigError(
                f"{self.name}: GGUF type {self.type.name} cannot be read yet; "
                "use a file quantized as Q8_0, Q4_K_M or similar"
            ) from None


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata by key, tensors by name. The mapping stays open as long as a tensor is referenced."""

    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def require(self, key: str) -> Any:
        """The value of a key the file must have; raises ConfigError naming it."""
        if key not in self.metadata:
            raise ConfigError(f"{self.path}: no metadata key {key}; is this a complete model file?")
        return self.metadata[key]


class _Cursor:
    """A reading position in the mapped file."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        value = layout.unpack_from(self.buffer, self.position)[0]
        self.position += layout.size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self.buffer):
            raise struct.error("a string reaches past the end of the file")
        return self.buffer[start : self.position].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, length = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            layout = struct.Struct(f"<{length}{SCALARS[kind]}")
            values = list(layout.unpack_from(self.buffer, self.position))
            self.position += layout.size
            return values
        read: Callable[[], Any] = self.string if kind == STRING else self.array
        return [read() for _ in range(length)]


def is_gguf(path: str) -> bool:
    """Whether `path` names a file that starts like a GGUF file."""
    file = Path(path)
    if not file.is_file():
        return False
    with file.open("rb") as f:
        return f.read(len(MAGIC)) == MAGIC


def read_gguf(path: str) -> GgufFile:
    """Read the header of `path` and map its tensors. Raises ConfigError if it is no whole GGUF file."""
    if not is_gguf(path):
        raise ConfigError(
            f"{path}: not a GGUF file (it does not exist or does not start with GGUF)"
        )
    with open(path, "rb") as f:
        buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read(path, _Cursor(buffer))
    except (struct.error, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: damaged or truncated GGUF file ({error}); compare its size with the "
            "publisher's and fetch it again"
        ) from error


def _read(path: str, cursor: _Cursor) -> GgufFile:
    cursor.position = len(MAGIC)
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ConfigError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(num_tensors):
        name = cursor.string()
        dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        infos.append(
            (name, tuple(dims[::-1]), GGMLQuantizationType(cursor.scalar("I")), cursor.scalar("Q"))
        )
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    base = -(-cursor.position // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[kind]
        num_values = 1
        for size in shape:
            num_values *= size
        num_bytes = num_values // values_per_block * bytes_per_block
        data = np.frombuffer(cursor.buffer, np.uint8, num_bytes, base + offset)
        tensors[name] = GgufTensor(name, shape, kind, data)
    return GgufFile(path, metadata, tensors)
