"""What decode steps of a GPU rely on (engine/ops/rotated_decode.py): the block that a row's newest token goes
to is read and written by no other row of the step."""

from pathlib import Path

import numpy as np
import pytest

from engine.attention.base import StepInputs
from engine.plan import StepPlan
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny

BLOCK = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("writes"), tokenizer=False)


class Watched(Harness):
    """Looks at the blocks of each decode step."""

    def __init__(self, model: str, **settings: object) -> None:
        super().__init__(
            Path(model), block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=64, **settings
        )
        self.num_checked = self.num_shared = 0
        runner = self.loop.runner
        make = runner.step_inputs

        def noted(plan: StepPlan) -> StepInputs:
            inputs = make(plan)
            if plan.is_decode:
                self.check(inputs)
            return inputs

        runner.step_inputs = noted  # type: ignore[method-assign]

    def check(self, inputs: StepInputs) -> None:
        newest, held = [], []
        for blocks, length in zip(inputs.block_ids, inputs.seq_lens, strict=True):
            held.append(set(blocks[: -(-length // BLOCK)].tolist()))
            newest.append(int(blocks[(length - 1) // BLOCK]))
        for row, block in enumerate(newest):
            assert block, "the reserved block is nobody's"
            others = [other for other, blocks in enumerate(held) if block in blocks]
            assert others == [row], f"rows {others} have block {block}, where row {row} writes"
            assert self.scheduler.kv.pool.name_of(block) is None, "others may find the block"
        self.num_checked += 1
        self.num_shared += len(set().union(*held)) < sum(map(len, held))


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_row_has_the_block_of_a_newest_token(
    model_dir: str, overlap: str, seed: int
) -> None:
    """Requests whose prompts are all that others have said so far, the same prompt several times at once,
    requests that are aborted, preempted and resumed."""
    harness = Watched(model_dir, overlap=overlap, num_blocks=34, admission="greedy")
    rng = np.random.default_rng(seed)
    prompts: dict[int, list[int]] = {}
    for turn in range(60):
        if turn % 3 == 0 and len(prompts) < 40:
            prompt = rng.integers(3, 500, int(rng.integers(1, 30))).tolist()
            if prompts and rng.random() < 0.7:
                other = int(rng.choice(list(prompts)))
                prompt = prompts[other] + harness.results[other].token_ids + prompt[:2]
            for _ in range(int(rng.integers(1, 4))):
                req_id = len(prompts) + 1
                prompts[req_id] = prompt[:120]
                harness.add(req_id, prompts[req_id], max_tokens=int(rng.integers(2, 60)))
        if turn % 7 == 6:
            harness.abort(int(rng.integers(1, len(prompts) + 1)))
        for _ in range(int(rng.integers(1, 6))):
            harness.step()
    harness.run()
    harness.assert_empty()
    assert harness.scheduler.preemptions, "memory was never short"
    assert harness.num_checked > 50
    assert harness.num_shared > 5, "rows shared no blocks"
