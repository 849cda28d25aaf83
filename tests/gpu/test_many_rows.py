"""As many requests as a step on a GPU takes: 1,024, on rows 1 to 1,024 of the tables."""

import numpy as np
import pytest
import torch

from engine.api.sampling import SamplingParams
from engine.ops.plan_decode import MAX_BATCH
from engine.plan import RowInit, StepPlan, StepResult
from engine.runner.decode_graphs import GraphStep
from engine.runner.device_sampler import DeviceSampler
from engine.runner.step_memory import SlotSample
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.engine_cases import SHAPE, build, check_against_transformers, prompts

CHECKED = (0, 1, 254, 255, 256, 511, 512, 1021, 1022, 1023)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("many"), **SHAPE)


def test_every_row_is_served(model: str) -> None:
    """First with sampling inside the graphs, then behind them; all rows at once at the end of a prefill."""
    harness = build(model, max_num_seqs=MAX_BATCH, num_blocks=16_384, check_invariants=False)
    runner = harness.loop.runner
    graphs, sizes, rows = runner.decode_graphs, [], set()
    replay = graphs.run

    def run_and_check(plan: StepPlan) -> GraphStep:
        step = replay(plan)
        sizes.append(plan.batch_size)
        rows.update(plan.rows.tolist())
        if step.sample is not None:
            torch.cuda.synchronize()
            token_ids = SlotSample(step.sample.slot, plan.batch_size).result().token_ids
            chosen = step.logits.gather(1, torch.from_numpy(token_ids).long().cuda()[:, None])
            assert torch.equal(chosen[:, 0], step.logits.amax(-1)), "not the largest logit"
        return step

    graphs.run = run_and_check
    everyone = prompts(MAX_BATCH, seed=31, high=40)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=20 + i % 5)
    results = harness.run()
    assert max(sizes) == MAX_BATCH
    assert rows == set(range(1, MAX_BATCH + 1))
    assert all(len(results[i].token_ids) == 20 + i % 5 for i in range(MAX_BATCH))
    harness.assert_empty()

    for i, prompt in enumerate(everyone):
        harness.add(2000 + i, prompt, max_tokens=20, logprobs=1 if i in CHECKED else None)
    again = harness.run()
    checked = [again[2000 + i] for i in CHECKED]
    check_against_transformers(model, [everyone[i] for i in CHECKED], checked)
    harness.assert_empty()


def test_every_row_may_have_tables(model: str) -> None:
    """Penalties, biases and constraints in all rows; a ban holds in each."""
    harness = build(model, max_num_seqs=MAX_BATCH, num_blocks=16_384, check_invariants=False)
    sampler = harness.loop.runner.sampler
    before = torch.cuda.memory_allocated()
    for i, prompt in enumerate(prompts(MAX_BATCH, seed=32, high=40)):
        params = {"allowed_token_ids": list(range(3, 400))} if i % 5 == 0 else {}
        harness.add(
            i,
            prompt,
            max_tokens=16,
            temperature=1.0,
            seed=i,
            repetition_penalty=1.1,
            logit_bias=dict.fromkeys(range(3, 300), -100.0),
            **params,
        )
    results = harness.run()
    for i in range(MAX_BATCH):
        assert len(results[i].token_ids) == 16
        allowed = range(300, 400) if i % 5 == 0 else range(300, 512)
        unwanted = set(results[i].token_ids) - set(allowed) - {0, 1, 2}
        assert not unwanted, f"request {i}: {unwanted}"
    assert len(sampler.tokens.free_tables) + len(sampler.tokens.of_row) == MAX_BATCH
    assert torch.cuda.memory_allocated() - before <= sampler.most_table_bytes + 2**22
    harness.assert_empty()


def test_a_row_far_behind_samples_as_it_would_alone(device: torch.device) -> None:
    """1,024 rows of 262,144 tokens: a gigabyte of logits."""
    vocab_size, last = 262_144, 4
    sampler = DeviceSampler(MAX_BATCH + 1, vocab_size, [2], device)
    rows = np.arange(1, MAX_BATCH + 1, dtype=np.int32)
    kinds = [
        {"temperature": 0.0},
        {"logprobs": 3},
        {"top_p": 0.9, "repetition_penalty": 1.2, "logit_bias": {vocab_size - 1: 9.0}},
        {"top_k": 50, "logprobs": 3},
    ]
    tokens = np.arange(8, dtype=np.int32)
    for row in rows.tolist():
        params = SamplingParams(**{"temperature": 1.0, "seed": row, **kinds[row % 4]})
        sampler.add(RowInit(row, params, tokens, 4, 0, []))
    logits = torch.randn((MAX_BATCH, vocab_size), device=device) * 2
    positions = np.full(MAX_BATCH, 8, np.int64)

    def sampled(part: slice) -> StepResult:
        return sampler.sample(logits[part], rows[part], positions[part]).result()

    together = sampled(slice(0, MAX_BATCH))
    for part in (slice(0, last), slice(512, 512 + last), slice(MAX_BATCH - last, MAX_BATCH)):
        for row in rows[part].tolist():  # the penalised have counted their token
            params = SamplingParams(**{"temperature": 1.0, "seed": row, **kinds[row % 4]})
            sampler.add(RowInit(row, params, tokens, 4, 0, []))
        alone = sampled(part)
        assert alone.token_ids.tolist() == together.token_ids[part].tolist()
        for i, entry in alone.logprobs.items():
            assert entry.rank == together.logprobs[part.start + i].rank
            np.testing.assert_array_equal(entry.top_ids, together.logprobs[part.start + i].top_ids)
