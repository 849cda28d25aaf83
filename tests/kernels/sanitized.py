"""Tests of kernels on the CPU emulator with g++'s address and undefined-behaviour sanitizers compiled in.

    python -m tests.kernels.sanitized tests/kernels/test_emulated_sampling.py -k hard

Arguments are pytest's. What a kernel reads or writes outside of a tensor or of shared memory, and shifts, conversions
and signed sums that C++ leaves undefined, end the run with a report: what compute-sanitizer's memcheck would find on a
GPU, but for what only happens there. Some five times as slow as without.
"""

import os
import subprocess
import sys

import pytest

from tests.kernels import emulator

FLAGS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g1",
)
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")  # in front of what Python loads
# Python frees nothing at its end, and warps' stacks are not the ones that the sanitizer knows
OPTIONS = "detect_leaks=0:detect_stack_use_after_return=0"


def path_of(library: str) -> str:
    assert emulator.COMPILER is not None, "g++ is needed to emulate kernels"
    command = [emulator.COMPILER, f"-print-file-name={library}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # read when a process starts
        os.environ |= {
            "LD_PRELOAD": " ".join(path_of(library) for library in RUNTIMES),
            "ASAN_OPTIONS": OPTIONS,
        }
        os.execv(sys.executable, [sys.executable, "-m", "tests.kernels.sanitized", *sys.argv[1:]])
    emulator.FLAGS = (*emulator.FLAGS, *FLAGS)
    return pytest.main(["-s", "-q", *sys.argv[1:]])  # the report would stay in what pytest captures


if __name__ == "__main__":
    sys.exit(main())
