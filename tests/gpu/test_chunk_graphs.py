"""Captured steps with prompt chunks: what they leave is, bit by bit, what the eager step would have left."""

import pytest
import torch

from tests.engine_cpu.test_decode_graphs import FULL, PLAIN
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.engine_cases import SHAPE, build, prompts

VARIANTS = {
    "head64": ("llama", {"dtype": "bfloat16"}, 64),
    "head128-norms": ("qwen3", {"dtype": "float16"}, 128),
    "window": ("mistral", {"dtype": "bfloat16"}, 64),
    "head80": ("qwen2", {"dtype": "bfloat16"}, 80),
    "fp8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 64),
    "float32": ("qwen3", {"dtype": "float32"}, 64),
}
PRESSURE = {"num_blocks": 40, "admission": "greedy", "max_num_batched_tokens": 96}


@pytest.mark.parametrize("settings", [{}, PRESSURE], ids=["whole", "chunks-preempted"])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_a_replay_leaves(name, settings, tmp_path):
    family, kind, head_dim = VARIANTS[name]
    model_dir = make_tiny(family, tmp_path, **{**SHAPE, "head_dim": head_dim})
    harness = build(model_dir, max_num_seqs=24, block_size=16, **kind, **settings)
    runner = harness.loop.runner
    graphs, run = runner.chunk_graphs, runner.chunk_graphs.run
    seen = []

    def run_and_compare(inputs):
        hidden, attended = (part.clone() for part in run(inputs))
        runner.attention.plan(inputs, runner.specs)
        want_hidden, want_attended = runner.model.attend_all(inputs, runner.attention)
        count = inputs.query_start[-1]
        assert torch.isfinite(hidden).all()
        assert torch.equal(hidden[:count], want_hidden[:count]), (inputs.query_start, len(seen))
        assert torch.equal(attended[:count], want_attended[:count]), (inputs.query_start, len(seen))
        seen.append((inputs.num_decodes, len(inputs.seq_lens), len(inputs.input_ids)))
        return hidden, attended

    graphs.run = run_and_compare
    everyone = prompts(60, seed=31, high=200)
    for i, prompt in enumerate(everyone):
        params = (PLAIN + FULL)[i % (len(PLAIN) + len(FULL))]
        harness.add(i, everyone[0] + prompt if i % 5 == 2 else prompt, max_tokens=16, **params)
        if i % 3 == 2:
            harness.step()
    results = harness.run()
    harness.assert_empty()
    assert all(len(result.token_ids) == 16 for result in results.values())
    assert len({size for *_, size in seen}) > 2
    assert any(decodes == 0 for decodes, *_ in seen)
    assert any(0 < decodes < batch - 1 for decodes, batch, _ in seen), "with decode rows and chunks"
    if settings:
        assert harness.scheduler.preemptions > 3


def test_a_large_step(tmp_path):
    """Thousands of tokens in a step, and a chunk of a long context."""
    model_dir = make_tiny("llama", tmp_path, **{**SHAPE, "max_position_embeddings": 16384})
    params = {"max_tokens": 8, "logprobs": 1}
    answers = []
    for enforce_eager in (False, True):
        # 8 rows or fewer give a row the same bits in decode graphs as without
        harness = build(model_dir, enforce_eager=enforce_eager, num_blocks=1024, max_num_seqs=8)
        for i, prompt in enumerate(prompts(9, seed=32, low=10, high=3000)):
            harness.add(i, prompt, **params)
        harness.add(9, prompts(1, seed=33, low=12000, high=12001)[0], **params)
        answers.append({i: (r.token_ids, r.logprobs) for i, r in harness.run().items()})
        harness.assert_empty()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("rows", "budget"), [(1, 1), (1, 17), (3, 5), (8, 31)])
def test_budgets_that_are_no_size(rows, budget, tmp_path):
    """Steps are padded beyond the budget then, down to a start on steps of a single token."""
    model_dir = make_tiny("llama", tmp_path, **SHAPE)
    settings = {"num_blocks": 64, "max_num_seqs": rows, "max_num_batched_tokens": budget}
    answers = []
    for enforce_eager in (False, True):
        harness = build(model_dir, enforce_eager=enforce_eager, **settings)
        for i, prompt in enumerate(prompts(10, seed=34, high=40)):
            harness.add(i, prompt, max_tokens=6, logprobs=1)
        answers.append({i: (r.token_ids, r.logprobs) for i, r in harness.run().items()})
        harness.assert_empty()
        graphs = harness.loop.runner.chunk_graphs
        assert (graphs is None) == enforce_eager
        assert graphs is None or graphs.can_run(-(-budget // 16) * 16)
    assert answers[0] == answers[1]
