"""Decode graphs without a GPU: a replay runs the graph's body.

Staging, sampling within the graph, results by slot, and steps that have to be sampled once more are those
of a GPU. What a capture does is not, and kernels are torch's; the stand-in for sampling depends on
row, position and class, so that a token from the wrong place shows.
"""

import numpy as np
import pytest
import torch

from engine.attention import paged_f32
from engine.ops import token_masks
from engine.ops.logprobs import LogprobTensors, gather_logprobs
from engine.ops.sample_cuda import ROW_DTYPE, RowFlags, SamplingClass
from engine.runner import device_sampler
from engine.runner import runner as runner_module
from engine.runner.decode_graphs import DecodeGraphs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.runner import ModelRunner
from engine.runner.step_memory import DEPTH, StepMemory
from tests.engine_cpu.harness import Collected, Harness
from tests.engine_cpu.tiny_models import make_tiny

CPU = torch.device("cpu")
PLAIN = [
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_k": 7},
    {"temperature": 1.2, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.02, "top_k": 40, "top_p": 0.9},
]
FULL = [
    {"frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "logit_bias": {7: 4.0, 11: -50.0}, "min_tokens": 9},
    {"temperature": 1.0, "seed": 7, "allowed_token_ids": [5, 6, 7, 8, 200, 300]},
]


def sample_by_rule(
    logits,
    rows,
    positions,
    params,
    workspace,
    which,
    token_ids,
    is_bad,
    masks=None,
    last_token=None,
) -> None:
    """In place of sample_cuda.launch: the best token, moved on by what the row asks for."""
    if masks is not None:
        logits = logits.clone()
        token_masks.apply(logits, masks)
    records = params.numpy().view(ROW_DTYPE)[:, 0][rows.numpy()]
    drawn = (records["flags"] & RowFlags.DRAW > 0) * (records["seed"].astype(np.int64) + 1)
    shift = torch.from_numpy(drawn) * positions
    if which is SamplingClass.FULL:
        edits = RowFlags.PENALTIES | RowFlags.LOGIT_BIAS | RowFlags.MIN_TOKENS
        shift += torch.from_numpy((records["flags"] & edits).astype(np.int64)) * 101
    best, ids = logits.max(-1)
    is_bad[:] = ~torch.isfinite(best)
    token_ids[:] = torch.where(is_bad, 0, (ids + shift) % logits.shape[1])
    assert last_token is not None
    last_token[rows.long()] = token_ids


def logprobs_by_torch(
    logits, rows, params, token_ids, is_bad, workspace, num_top
) -> LogprobTensors:
    return gather_logprobs(torch.log_softmax(logits, -1), token_ids, num_top)


class FakeEvent:
    """On a CPU everything has happened."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class ReplayedBodies(DecodeGraphs):
    """Graphs that compute at replay what was captured."""

    def replay(self, size: int) -> None:
        self.replays = getattr(self, "replays", 0) + 1
        self.logits = None  # a CPU's head makes its own
        self.logits = self.body(size)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("graphs"), tokenizer=False)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def upload(arrays, device):
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(runner_module, "pinned_copy", torch.clone)
    monkeypatch.setattr(paged_f32, "upload", upload)
    monkeypatch.setattr(device_sampler, "launch", sample_by_rule)
    monkeypatch.setattr(device_sampler, "launch_logprobs", logprobs_by_torch)


def gpu_like(model_dir, has_graphs: bool, **settings: object) -> Harness:
    """An engine with a GPU's sampler, with or without graphs."""
    settings = {"max_num_seqs": 6, "max_model_len": 256, "block_size": 16, **settings}
    harness = Harness(model_dir, **settings)
    old, max_batch = harness.loop.runner, harness.engine.resolved.max_num_seqs
    table = old.sampler.table
    sampler = DeviceSampler(max_batch + 1, table.vocab_size, table.eos_token_ids, CPU)
    attention = paged_f32.PagedAttentionF32(old.attention.kv, old.specs[0].num_heads, CPU)
    runner = ModelRunner(old.model, attention, sampler, old.table)
    if has_graphs:
        graphs = ReplayedBodies(old.model, attention, sampler, old.table, max_batch, CPU)
        graphs.graphs = dict.fromkeys(graphs.sizes)  # type: ignore[arg-type]
        runner.decode_graphs = graphs
    harness.loop.runner = runner
    return harness


def complete(harness: Harness, everyone: list[dict[str, object]]) -> dict[int, Collected]:
    """Requests of different lengths: they come, fill blocks and go at different steps."""
    rng = np.random.default_rng(3)
    for i, params in enumerate(everyone):
        prompt = rng.integers(3, 500, 5 + 9 * i % 40).tolist()
        harness.add(i + 1, prompt, max_tokens=12 + 5 * i % 17, **params)
    results = harness.run()
    harness.assert_empty()
    return results


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("everyone", [PLAIN * 2, PLAIN + FULL], ids=["plain", "mixed"])
def test_tokens_are_those_of_eager_steps(model_dir, everyone, overlap) -> None:
    graphed = gpu_like(model_dir, True, overlap=overlap)
    got = complete(graphed, everyone)
    want = complete(gpu_like(model_dir, False, overlap=overlap), everyone)
    assert graphed.loop.runner.decode_graphs.replays > 20
    for req_id, result in want.items():
        assert got[req_id].token_ids == result.token_ids, f"request {req_id}"
        assert got[req_id].logprobs == pytest.approx(result.logprobs, abs=1e-4)
        assert got[req_id].finish == result.finish


def test_bad_rows_end_their_requests_alone(model_dir) -> None:
    """Logits of NaN, seen by the sampling within the graph."""
    harness = gpu_like(model_dir, True, overlap="on")
    want = complete(gpu_like(model_dir, False, overlap="on"), PLAIN)
    graphs = harness.loop.runner.decode_graphs
    sample = graphs.sampler.sample_on_device

    def spoiled(logits, *args, **kwargs):
        if graphs.replays == 4:
            logits[1] = torch.nan
        return sample(logits, *args, **kwargs)

    graphs.replays = 0
    graphs.sampler.sample_on_device = spoiled
    got = complete(harness, PLAIN)
    assert harness.loop.nan_events == 1
    assert [i for i in got if got[i].finish.name == "ERROR"] == [2]
    for i in (1, 3, 4, 5):
        assert got[i].token_ids == want[i].token_ids


def test_results_outlive_the_steps_that_follow() -> None:
    memory = StepMemory(num_words=4, max_batch=3, device=CPU)
    slots = []
    for step in range(DEPTH):
        slots.append(memory.next_slot())
        memory.token_ids[:] = step
        memory.is_bad[:] = torch.tensor([False, step == 1, False])
        memory.download(slots[-1])
    assert [slot.token_ids.tolist() for slot in slots] == [[i] * 3 for i in range(DEPTH)]
    assert [slot.is_bad.tolist() for slot in slots[:2]] == [[False] * 3, [False, True, False]]
    assert memory.next_slot() is slots[0]
