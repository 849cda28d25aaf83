"""What the step loop says, and when."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from engine.loop import StepLoop
from engine.plan import StepPlan, StepResult
from tests.unit.toy_engine import ToyEngine, ToyRunner


@dataclass
class Done:
    result: StepResult
    held: None = None

    def wait(self) -> StepResult:
        return self.result


class WatchedRunner:
    """A toy runner that computes inside `launch`, as a CPU does, and notes how much was told by then."""

    constraints = SimpleNamespace(grammars=None)

    def __init__(self, toy: ToyRunner, told: list[str]) -> None:
        self.toy = toy
        self.told = told

    def launch(self, plan: StepPlan) -> Done:
        self.told += [f"computes {num_tokens}" for num_tokens in plan.num_tokens.tolist()]
        return Done(self.toy.launch(plan))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_start_is_told_before_the_prompt_is_computed(overlap: bool) -> None:
    """A client that leaves meanwhile is then counted with those whose prompt was being computed."""
    engine, told = ToyEngine(budget=8), []

    def send(output) -> None:
        told.extend(f"starts {req_id}" for req_id, _, _ in output.started)
        told.extend(
            f"token of {i}" for i, n in zip(output.req_ids, output.counts, strict=True) if n
        )
        engine.receive(output)

    loop = StepLoop(engine.scheduler, WatchedRunner(engine.runner, told), send, overlap)
    engine.add(1, list(range(2, 14)))
    loop.step()
    assert sorted(told) == ["computes 8", "starts 1"]
    if not overlap:  # where launching takes as long as computing
        assert told == ["starts 1", "computes 8"]
    while "token of 1" not in told:
        loop.step()
    assert told.count("starts 1") == 1
