"""Tests on a CUDA device. Without one they are skipped; each starts from the same random seed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench_cases import measure

Record = Callable[[Callable[[], object]], Callable[[], None]]  # of `graph_replay`

HERE = Path(__file__).parent
# References are tiny; with all cores, several test processes at a time would take minutes
CPU_THREADS = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)
    if torch.cuda.is_available():
        torch.set_num_threads(min(CPU_THREADS, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def record_graph(work: Callable[[], object]) -> Callable[[], None]:
    """Run `work` once on a side stream, record it in a CUDA graph; the result replays and waits.

    Tensors that `work` returns stay valid and are overwritten by each replay.
    """
    replay = measure.record(work)

    def replay_and_wait() -> None:
        replay()
        torch.cuda.synchronize()

    return replay_and_wait


@pytest.fixture
def graph_replay() -> Record:
    """`record_graph`: graph_replay(work) records, what it returns replays."""
    return record_graph
