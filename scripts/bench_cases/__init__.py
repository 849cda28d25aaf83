"""Cases for scripts/bench_kernels.py: each module here has `bench_cases() -> list[Case]`."""

from collections.abc import Callable
from dataclasses import dataclass

Launch = Callable[[], object]  # what it returns is kept until all launches are recorded


@dataclass(frozen=True)
class Case:
    """One kernel at one size.

    `setup(copies)` makes that many launches of the same work, each on buffers of its own: together
    they exceed the L2 cache, so that no launch finds its data there. They are recorded into a CUDA
    graph: no allocation outside torch's, no synchronisation, no Python between them when timed.
    """

    name: str
    setup: Callable[[int], list[Launch]]
    num_bytes: float = 0.0  # that one launch must read and write at least
    flops: float = 0.0  # of tensor cores, if that is what may limit it
