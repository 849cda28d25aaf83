"""A step that cannot be launched for lack of memory: its requests fail, the others notice nothing."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.api.config import ConfigError
from engine.api.messages import FinishReason
from engine.loop import StepLoop
from engine.memory import is_out_of_memory, memory_for
from engine.plan import StepPlan, StepResult
from tests.unit.test_scheduler_properties import random_job
from tests.unit.toy_engine import MODEL_LEN, VOCAB, ToyEngine, undisturbed


@dataclass
class Done:
    result: StepResult
    held: bool = True  # it is to be finished

    def wait(self) -> StepResult:
        return self.result


NO_CONSTRAINTS = SimpleNamespace(grammars=None)


class FullRunner:
    """A toy runner that runs out of memory in some steps, once their rows are set up, or in sampling."""

    constraints = NO_CONSTRAINTS

    def __init__(self, toy, failing: set[int], in_sampling: bool) -> None:
        self.toy = toy
        self.failing = failing
        self.in_sampling = in_sampling
        self.latest: StepPlan | None = None
        self.failed: list[StepPlan] = []
        self.releases = 0

    def launch(self, plan: StepPlan) -> Done:
        self.latest = plan
        if plan.step_id in self.failing and not self.in_sampling:
            self.toy._apply_changes(plan)
            self.run_out()
        return Done(self.toy.launch(plan))

    def finish(self, handle: Done) -> None:
        assert self.latest is not None
        if self.latest.step_id in self.failing:
            self.run_out()

    def run_out(self) -> None:
        assert self.latest is not None
        self.failed.append(self.latest)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def release_unused_memory(self) -> None:
        self.releases += 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_requests_of_a_failed_step_end_and_others_go_on(seed: int, overlap: bool, caplog) -> None:
    rng = random.Random(seed)
    engine = ToyEngine(num_blocks=22, budget=16, max_num_seqs=6)
    failing = {rng.randrange(1, 40) for _ in range(6)}
    runner = FullRunner(engine.runner, failing, in_sampling=seed % 2 == 1)
    loop = StepLoop(engine.scheduler, runner, engine.receive, overlap)
    shared = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    jobs = [random_job(rng, shared) for _ in range(40)]
    for req_id, job in enumerate(jobs, 1):
        engine.add(req_id, job.prompt, job.params, priority=job.priority, salt=job.salt)
        if rng.random() < 0.4:
            loop.step()
    for _ in range(3000):
        if not loop.has_work():
            break
        loop.step()
    loop.step()
    assert loop.failed_steps == len(runner.failed) == runner.releases > 0
    assert "lower --gpu-memory-utilization or --max-num-batched-tokens" in caplog.text
    lost = {req_id for plan in runner.failed for req_id in plan.req_ids}
    for req_id, job in enumerate(jobs, 1):
        got, want = engine.completions[req_id], undisturbed(job.prompt, job.params, MODEL_LEN)
        assert got.has_ended
        if got.finish is FinishReason.ERROR:
            assert req_id in lost
            assert got.tokens == want[: len(got.tokens)]
        else:  # in overlap, a request may end with the step before the one that failed
            assert got.tokens == want
    assert any(engine.completions[req_id].finish is FinishReason.ERROR for req_id in lost)
    assert engine.kv.num_free_blocks == engine.kv.num_usable_blocks
    engine.scheduler.check_invariants()


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    engine = ToyEngine()

    class BrokenRunner:
        constraints = NO_CONSTRAINTS

        def launch(self, plan: StepPlan) -> Done:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    loop = StepLoop(engine.scheduler, BrokenRunner(), engine.receive, overlap=False)
    engine.add(1, [1, 2, 3])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        loop.step()


def test_a_lack_of_memory_is_known_in_all_its_words() -> None:
    for text in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_at_the_start_it_becomes_advice() -> None:
    cpu = torch.device("cpu")
    message = r"out of memory while loading weights: [\d.]+ GiB are free; free some"
    with (
        pytest.raises(ConfigError, match=message) as caught,
        memory_for("loading weights", "free some", cpu),
    ):
        torch.empty(2**60, dtype=torch.uint8)
    assert caught.value.exit_code == 75
    with pytest.raises(ConfigError, match="measuring"), memory_for("measuring", "lower it", cpu):
        np.empty(2**60, np.uint8)
    with pytest.raises(KeyError), memory_for("loading weights", "free some", cpu):
        raise KeyError("x")


def test_a_lack_of_memory_is_found_behind_the_error_of_a_spoilt_capture() -> None:
    cpu = torch.device("cpu")

    def capture(text: str) -> None:
        try:
            raise RuntimeError(text)
        finally:  # as the end of a capture does, on the way out
            raise RuntimeError("CUDA error: operation failed due to a previous error")

    with pytest.raises(ConfigError, match="capturing"), memory_for("capturing", "less", cpu):
        capture("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    with pytest.raises(RuntimeError, match="previous"), memory_for("capturing", "less", cpu):
        capture("shape mismatch")
