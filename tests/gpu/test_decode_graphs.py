"""Tokens that a decode graph samples, bit by bit those of sampling outside of it, on real logits."""

import numpy as np
import pytest
import torch

from engine.models import small_steps
from engine.ops.token_masks import ALL, num_words
from engine.plan import StepPlan
from engine.runner.decode_graphs import GraphStep
from engine.runner.sampling_table import Needs
from engine.runner.step_memory import DEPTH, SlotSample
from tests.engine_cpu.test_decode_graphs import FULL, PLAIN
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.engine_cases import SHAPE, build, prompts


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("graphs"), **SHAPE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kinds", [PLAIN, PLAIN + FULL], ids=["plain", "mixed"])
def test_a_graph_samples_as_an_eager_step_does(model_dir, kinds, dtype):
    harness = build(model_dir, dtype=dtype, max_num_seqs=24)
    runner = harness.loop.runner
    graphs, sampler, run = runner.decode_graphs, runner.sampler, runner.decode_graphs.run
    compared = []

    def run_and_compare(plan: StepPlan) -> GraphStep:
        step = run(plan)
        torch.cuda.synchronize()
        slot = graphs.memory.slots[(graphs.memory.turn - 1) % DEPTH]
        got = SlotSample(slot, plan.batch_size).result()
        needs = sampler.table.needs[plan.rows]
        (plain,) = np.nonzero(needs & ~np.uint8(Needs.DRAW) == 0)
        assert (step.sample is not None) == (len(plain) == plan.batch_size)
        assert got.is_bad is None
        if len(plain) == 0:
            return step
        rows, positions = plan.rows[plain], plan.num_computed[plain].astype(np.int64) + 1
        logits = step.logits[torch.from_numpy(plain).cuda()]
        free = np.full((len(plain), num_words(sampler.table.vocab_size)), ALL, np.int32)
        # the smallest class that does, and the largest
        for masks in (None, torch.from_numpy(free).cuda()):
            want = sampler.sample(logits, rows, positions, masks).result()
            assert got.token_ids[plain].tolist() == want.token_ids.tolist()
        compared.append((plan.batch_size, len(plain)))
        return step

    graphs.run = run_and_compare
    for i, prompt in enumerate(prompts(40, seed=21, high=60)):
        harness.add(i + 1, prompt, max_tokens=20 + 7 * i % 30, **kinds[i % len(kinds)])
    results = harness.run()
    harness.assert_empty()
    assert all(len(result.token_ids) >= 20 for result in results.values())
    assert sum(plain for _, plain in compared) > 200
    assert any(plain < size for size, plain in compared) == (kinds is not PLAIN)


@pytest.mark.parametrize("most_rows", [0, small_steps.MOST_ROWS])
@pytest.mark.parametrize("max_num_seqs", [1, 5])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_requests_get_the_tokens_of_their_slots(
    model_dir, overlap, max_num_seqs, most_rows, monkeypatch
):
    """8 rows or fewer give a row the same bits as an eager step, layer by layer or all layers in one kernel."""
    monkeypatch.setattr(small_steps, "MOST_ROWS", most_rows)
    answers = []
    for enforce_eager in (False, True):
        harness = build(
            model_dir,
            overlap=overlap,
            enforce_eager=enforce_eager,
            max_num_seqs=max_num_seqs,
            num_blocks=64,
        )
        for i, prompt in enumerate(prompts(9, seed=22, high=80)):
            harness.add(i + 1, prompt, max_tokens=70, **(PLAIN + FULL)[i])
        answers.append({i: r.token_ids for i, r in harness.run().items()})
        harness.assert_empty()
    assert answers[0] == answers[1]
