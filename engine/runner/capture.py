"""Capture work of several sizes as CUDA graphs that share memory."""

import gc
from collections.abc import Callable, Sequence

import torch

from engine.ops import jit


def capture_graphs(
    body: Callable[[int], object],
    sizes: Sequence[int],
    progress: Callable[[float, str], None],
    label: str,
) -> dict[int, torch.cuda.CUDAGraph]:
    """`body(size)` of each of `sizes` (ascending), the largest first: the others fit into its memory.

    Each runs once ahead of its capture, which brings cuBLAS workspaces and kernels not loaded yet. `progress`
    gets the done fraction, and what is captured: `label` with the size in place of its braces.
    """
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    stream = torch.cuda.Stream()
    pool: tuple[int, int] | None = None
    gc.collect()
    gc.disable()  # the end of some other graph, found in the middle, would invalidate a capture
    try:
        for done, size in enumerate(reversed(sizes)):
            progress(done / len(sizes), label.format(size))
            with torch.cuda.stream(stream):
                body(size)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream), jit.dependent_launches():
                body(size)
            pool = graph.pool()
            graphs[size] = graph
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return graphs
