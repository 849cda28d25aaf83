"""Timing on a GPU, and the two rates that bound every kernel, measured on the same card."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from scripts.bench_cases import Launch

REPEATS = 7
SPIN_CYCLES = 400_000  # about 0.2 ms


def time_launches(launches: Sequence[Launch], rounds: int = 1) -> float:
    """Seconds of one launch: the median over replays of a graph that has all of them `rounds` times."""
    replay = record(lambda: [launch() for _ in range(rounds) for launch in launches])
    return time_call(replay) / (rounds * len(launches))


@dataclass
class Recording:
    """A CUDA graph, and the tensors that its launches write."""

    graph: torch.cuda.CUDAGraph
    results: object

    def __call__(self) -> None:
        """Replay on the current stream."""
        self.graph.replay()


def record(work: Callable[[], object]) -> Recording:
    """Run `work` once to load and allocate what it needs, then record it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return Recording(graph, results)


def time_call(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of device time, after one call to warm up.

    The device spins first, so that all of the call's work waits there when its turn comes: else a short
    graph's time would include the host's for launching it, some 10 us.
    """
    call()
    seconds = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(seconds)


def copy_bandwidth() -> float:
    """Bytes read and written per second by torch's copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / time_call(lambda: target.copy_(source))


def matmul_rate() -> float:
    """FLOP per second of a bfloat16 product of 8192-square matrices of random numbers."""
    n = 8192
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / time_call(lambda: a @ b)


def l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)
