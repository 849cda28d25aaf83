"""Captured steps with prompt chunks, without a GPU: a replay runs what was captured.

Inputs and plans go where a captured step looks for them, padded to its size, and the rest of the step is
eager, as on a GPU. What a capture does is not.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.api.messages import FinishReason
from engine.runner.chunk_graphs import (
    ChunkGraphs,
    most_graph_tokens,
    padded_tokens,
    token_sizes,
)
from engine.runner.device_inputs import DeviceInputs
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.test_decode_graphs import CPU, FULL, PLAIN, as_on_a_gpu, gpu_like
from tests.engine_cpu.tiny_models import make_tiny

__all__ = ["as_on_a_gpu"]  # a fixture that all tests here use


class ReplayedChunks(ChunkGraphs):
    """Graphs that compute at replay what was captured."""

    def replay(self, size: int) -> None:
        self.replays.append(size)
        assert len(self.attention.captured_out) == self.sizes[-1]
        self.body(size)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny("qwen3", tmp_path_factory.mktemp("chunks"), tokenizer=False)


def with_chunks(model_dir, captured: bool, most: int = 64, **settings: object) -> Harness:
    """An engine with a GPU's decode graphs, and with captured or eager steps with chunks."""
    harness = gpu_like(model_dir, True, **settings)
    runner, resolved = harness.loop.runner, harness.engine.resolved
    runner.device_inputs = DeviceInputs(resolved.max_num_batched_tokens, resolved.max_num_seqs, CPU)
    runner.token_sizes = token_sizes(most)
    if captured:
        graphs = ReplayedChunks(
            runner.model,
            runner.attention,
            runner.device_inputs,
            runner.table,
            runner.token_sizes,
            torch.float32,
        )
        graphs.graphs = dict.fromkeys(graphs.sizes)  # type: ignore[arg-type]
        graphs.replays = []
        with torch.inference_mode():
            graphs.body(most)  # as a capture does: it makes `results`
        runner.chunk_graphs = graphs
    return harness


def complete(harness: Harness, **extra: object):
    """Prompts of all lengths, some with a common beginning, at different times."""
    rng = np.random.default_rng(4)
    common = rng.integers(3, 500, 40).tolist()
    for i, params in enumerate((PLAIN + FULL) * 2):
        own = rng.integers(3, 500, 1 + 23 * i % 90).tolist()
        prompt = common + own if i % 3 == 0 else own
        harness.add(i + 1, prompt, max_tokens=9 + 5 * i % 17, **params, **extra)
        if i % 4 == 3:
            for _ in range(5):
                harness.step()
    results = harness.run()
    harness.assert_empty()
    return results


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 24},
        {"num_blocks": 18, "max_num_batched_tokens": 40, "admission": "greedy"},
        {"enable_prefix_caching": False},
    ],
    ids=["whole", "chunks", "preemption", "no-cache"],
)
def test_tokens_are_those_of_eager_steps(model_dir, settings, overlap) -> None:
    captured = with_chunks(model_dir, True, overlap=overlap, **settings)
    got = complete(captured)
    want = complete(with_chunks(model_dir, False, overlap=overlap, **settings))
    replays = captured.loop.runner.chunk_graphs.replays
    assert len(replays) > 6
    assert len(set(replays)) > 1
    if "num_blocks" in settings:
        assert captured.scheduler.preemptions > 3
    for req_id, result in want.items():
        assert got[req_id].token_ids == result.token_ids, f"request {req_id}"
        assert got[req_id].logprobs == pytest.approx(result.logprobs, abs=1e-4)
        assert got[req_id].finish == result.finish


def test_prompts_are_scored_behind_a_graph(model_dir) -> None:
    answers = []
    for captured in (True, False):
        harness = with_chunks(model_dir, captured, max_num_batched_tokens=48)
        answers.append(complete(harness, prompt_logprobs=2))
    for req_id, result in answers[1].items():
        assert result.prompt_logprobs or req_id == 1
        for (value, rank, best), mine in zip(
            result.prompt_logprobs, answers[0][req_id].prompt_logprobs, strict=True
        ):
            assert mine[1] == rank
            assert [i for i, _ in mine[2]] == [i for i, _ in best]
            assert [mine[0], *(v for _, v in mine[2])] == pytest.approx(
                [value, *(v for _, v in best)], abs=1e-4
            )


def test_constrained_rows_wait_for_the_tokens_before(model_dir) -> None:
    """Their logits outlive the launch of the step that follows."""
    harness = with_chunks(model_dir, True, overlap="on")
    allowed = list(range(100, 140))
    for i in range(5):
        harness.add(i, [7 + i] * (3 + i), max_tokens=9, allowed_token_ids=allowed)
    assert all(set(result.token_ids) <= set(allowed) for result in harness.run().values())


def test_steps_beyond_the_largest_size_are_eager(model_dir) -> None:
    harness = with_chunks(model_dir, True, most=32)
    result = harness.generate(list(range(3, 90)), max_tokens=3)
    assert harness.loop.runner.chunk_graphs.replays == []
    assert result.token_ids == with_chunks(model_dir, False).generate(
        list(range(3, 90)), max_tokens=3
    ).token_ids  # fmt: skip
    assert harness.loop.runner.chunk_graphs.can_run(32)
    assert not harness.loop.runner.chunk_graphs.can_run(87)


@pytest.mark.parametrize(("rows", "budget"), [(1, 1), (1, 17), (5, 5), (6, 31)])
def test_budgets_that_are_no_size(model_dir, rows, budget) -> None:
    """Steps are padded beyond the budget then. Chunks of a token, and no row for another request."""
    settings = {"max_num_seqs": rows, "max_num_batched_tokens": budget}
    most = most_graph_tokens(budget, 1)
    assert budget <= most < budget + 16
    answers = []
    for captured in (True, False):
        harness = with_chunks(model_dir, captured, most, overlap="on", **settings)
        for i in range(8):
            harness.add(i, [9 + 2 * i] * (1 + 7 * i % 20), max_tokens=3, min_tokens=2)
        answers.append({i: result.token_ids for i, result in harness.run().items()})
        harness.assert_empty()
        if captured:
            assert len(harness.loop.runner.chunk_graphs.replays) >= 8 // rows
    assert answers[0] == answers[1]
    assert all(len(token_ids) == 3 for token_ids in answers[0].values())


def test_a_request_that_is_aborted_leaves_the_others_alone(model_dir) -> None:
    """In its prefill, and with a step of its own under way."""
    prompts = [list(range(3 + i, 60 + i)) for i in range(4)]
    settings = {"overlap": "on", "max_num_batched_tokens": 40}
    alone = with_chunks(model_dir, True, **settings)
    want = [alone.generate(prompt, max_tokens=9).token_ids for prompt in prompts]
    for num_steps in range(1, 9):
        harness = with_chunks(model_dir, True, **settings)
        for i, prompt in enumerate(prompts):
            harness.add(i, prompt, max_tokens=9)
        for _ in range(num_steps):
            harness.step()
        harness.abort(0, 2)
        results = harness.run()
        harness.assert_empty()
        assert [results[i].token_ids for i in (1, 3)] == [want[1], want[3]], num_steps


def test_a_failed_step_leaves_the_others_alone(model_dir, monkeypatch) -> None:
    """Memory runs out behind a replay: the requests of that step fail, later ones find the graphs intact."""
    harness = with_chunks(model_dir, True, overlap="on")
    prompt = list(range(5, 50))
    want = harness.generate(prompt, max_tokens=7).token_ids
    finish = harness.loop.runner.model.finish
    replays = harness.loop.runner.chunk_graphs.replays
    count = len(replays)

    def short_of_memory(*args):
        if len(replays) == count + 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return finish(*args)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(harness.loop.runner.model, "finish", short_of_memory)
    failed = harness.generate([*prompt, 77], max_tokens=7)
    assert failed.finish is FinishReason.ERROR
    assert failed.token_ids == []
    assert harness.loop.failed_steps == 1
    assert harness.generate(prompt, max_tokens=7).token_ids == want
    harness.assert_empty()


def test_sizes() -> None:
    for most in (16, 48, 1024, 8192, 5008, 1 << 24):
        sizes = token_sizes(most)
        assert sizes[-1] == most
        assert all(low < high for low, high in pairwise(sizes))
        assert all(size % 16 == 0 for size in sizes)
        assert all(high - low <= max(64, low / 8) for low, high in pairwise(sizes))
    assert len(token_sizes(8192)) < 50
    assert padded_tokens(17, token_sizes(64)) == 32
    assert padded_tokens(64, token_sizes(64)) == 64
    assert padded_tokens(65, token_sizes(64)) == 65
    assert padded_tokens(65, []) == 65


def test_only_steps_that_a_gpu_ends_soon_are_worth_a_graph() -> None:
    assert most_graph_tokens(8192, 500_000_000) == 8192
    assert most_graph_tokens(8192, 7_600_000_000) == 1024
    assert most_graph_tokens(8192, 70 * 10**9) == 256
    assert most_graph_tokens(100, 1000) == 112
