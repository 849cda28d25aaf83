"""The order of captures, with stand-ins for what a GPU does."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from engine.ops import jit
from engine.runner.capture import capture_graphs

log: list[object] = []


class Stream:
    def synchronize(self) -> None:
        log.append("wait")


class Graph:
    """Its pool has the number of the graph that it began with."""

    count = 0

    def __init__(self) -> None:
        Graph.count += 1
        self.own = self.used = (0, Graph.count)

    def pool(self) -> tuple[int, int]:
        return self.used


@contextmanager
def within(what: str) -> Iterator[None]:
    log.append(what)
    yield
    log.append("end")


@contextmanager
def capturing(graph: Graph, pool: tuple[int, int] | None, stream: Stream) -> Iterator[None]:
    assert not gc.isenabled()
    graph.used = pool or graph.own
    with within("capture"):
        yield


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    log.clear()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("run"))
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait for all"))
    monkeypatch.setattr(jit, "dependent_launches", lambda: within("dependent"))


def test_the_largest_is_first_and_each_runs_before_its_capture() -> None:
    told: list[tuple[float, str]] = []
    graphs = capture_graphs(log.append, [1, 8], lambda *done: told.append(done), "batch {}")
    once = ["run", 8, "end", "wait", "capture", "dependent", 8, "end", "end"]
    assert log == [*once, *(1 if entry == 8 else entry for entry in once), "wait for all"]
    assert told == [(0.0, "batch 8"), (0.5, "batch 1")]
    assert list(graphs) == [8, 1]
    assert graphs[1].pool() == graphs[8].pool() == graphs[8].own, "one pool"
    assert gc.isenabled()


def test_a_failure_leaves_the_collector_on() -> None:
    def body(size: int) -> None:
        if "capture" in log:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        capture_graphs(body, [4], lambda *done: None, "{} tokens")
    assert gc.isenabled()
