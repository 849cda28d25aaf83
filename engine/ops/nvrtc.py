"""CUDA C++ source -> cubin, by NVRTC: no GPU, no CUDA toolkit and no header files needed.

Run as a program (`python -m engine.ops.nvrtc`) it is a worker that compiles what arrives on stdin.
NVRTC lets go of Python's lock but hardly speeds up with threads, so many kernels take processes.

    stdin   one JSON object a line: {"source": ..., "options": [...]}
    stdout  one JSON object a line: {"cubin": base64, "log": ...} or {"error": ...}
"""

import base64
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any


class KernelBuildError(RuntimeError):
    """A kernel does not compile or cannot be had; the message holds the compiler's log or a remedy."""


@dataclass(frozen=True)
class Resources:
    """What one kernel of a cubin takes on the device, by the assembler's account."""

    registers: int
    spill_bytes: int  # stores and loads together
    stack_bytes: int
    smem_bytes: int  # static shared memory


@dataclass(frozen=True)
class Binary:
    cubin: bytes
    log: str

    @property
    def resources(self) -> dict[str, Resources]:
        return parse_resources(self.log)

    @property
    def warnings(self) -> list[str]:
        return parse_warnings(self.log)


def version() -> tuple[int, int]:
    """NVRTC's version. Raises KernelBuildError where cuda-bindings or NVRTC's library is missing."""
    return load_nvrtc()[1]


def compile_cubin(source: str, options: list[str]) -> Binary:
    """Compile one self-contained source. Raises KernelBuildError with NVRTC's log."""
    nvrtc = load_nvrtc()[0]
    program = check(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        log = bytearray(check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(f"NVRTC: {status.name}, options {' '.join(options)}\n{text}")
        cubin = bytearray(check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        check(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return Binary(bytes(cubin), text)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def load_nvrtc() -> tuple[Any, tuple[int, int]]:
    """The binding and the version of the library behind it."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise KernelBuildError(
            f"kernels cannot be compiled: {error}. They need the packages cuda-bindings and "
            "nvidia-cuda-nvrtc, which torch's CUDA build brings; on a machine without a GPU install "
            "requirements-dev.txt"
        ) from error
    check(nvrtc, (status,))
    return nvrtc, (major, minor)


def check(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The value of a (status, value) pair; raises KernelBuildError unless the status is success."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC: {status.name}")
    return values[0] if values else None


def parse_resources(log: str) -> dict[str, Resources]:
    """By kernel name, from the log of a compilation with --ptxas-options=-v."""

    def number(pattern: str, text: str) -> int:
        return sum(int(match) for match in re.findall(pattern, text))

    parts = re.split(r"Compiling entry function '(\w+)'", log)
    return {
        name: Resources(
            registers=number(r"Used (\d+) registers", text),
            spill_bytes=number(r"(\d+) bytes spill", text),
            stack_bytes=number(r"(\d+) bytes stack frame", text),
            smem_bytes=number(r"(\d+) bytes smem", text),
        )
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def parse_warnings(log: str) -> list[str]:
    """Lines that warn: of the front end, and the assembler's remarks C75xx about wgmma."""
    return [line for line in log.splitlines() if re.search(r"\bwarning\b|\bC75\d\d\b", line, re.I)]


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, str]
        try:
            binary = compile_cubin(job["source"], job["options"])
            answer = {"cubin": base64.b64encode(binary.cubin).decode(), "log": binary.log}
        except KernelBuildError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
