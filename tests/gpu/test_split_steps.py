"""Decode steps in halves: bit by bit those of one half after the other, and close to whole steps'."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops import side_by_side
from engine.ops.narrow_gemm import device_of
from engine.plan import StepPlan
from engine.runner import split_steps
from engine.runner.decode_graphs import DecodeGraphs, GraphStep
from engine.runner.runner import ModelRunner
from engine.runner.split_steps import rows_ahead
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.test_engine import SHAPE, build, check_against_transformers, prompts

pytestmark = pytest.mark.gpu

SIZES = [32, 64, 128, 256]


@pytest.fixture(autouse=True)
def from_16_rows_on(monkeypatch: pytest.MonkeyPatch) -> None:
    if not device_of().has_clusters:
        pytest.skip("steps are split on Hopper GPUs")
    monkeypatch.setattr(split_steps, "IS_CHOSEN", True)
    monkeypatch.setattr(split_steps, "ROWS", range(16, 1025))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def get(name: str) -> str:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = make_tiny(name, folder, **{**SHAPE, "num_hidden_layers": 5})
        return made[name]

    return get


class Serial(DecodeGraphs):
    """The same launches one after the other, without a graph."""

    def replay(self, size: int) -> None:
        self.body(size)


def graphs_of(runner: ModelRunner, kind: type[DecodeGraphs] = DecodeGraphs) -> DecodeGraphs:
    """Of SIZES, not captured."""
    graphs = kind(
        runner.model,
        runner.attention,
        runner.sampler,
        runner.table,
        SIZES[-1],
        runner.table.last_token.device,
    )
    graphs.sizes = SIZES
    assert graphs.split_steps is not None
    return graphs


def capture(graphs: DecodeGraphs) -> DecodeGraphs:
    graphs.capture(lambda *_: None)
    return graphs


class ThreeWays:
    """Runs each decode step of an engine in halves, serially in halves, and whole."""

    def __init__(self, harness: Harness) -> None:
        self.runner = runner = harness.loop.runner
        self.split = capture(graphs_of(runner))
        assert self.split.split_steps is not None
        self.serial = graphs_of(runner, Serial)
        self.serial.split_steps = replace(self.split.split_steps, side=None)
        self.serial.logits = torch.empty_like(self.split.logits)
        self.whole = graphs_of(runner)
        self.whole.split_steps = None
        capture(self.whole)
        self.steps: list[tuple[int, int, float]] = []  # rows, size, difference from whole steps
        self.captured_run = self.split.run
        self.split.run = self.run
        runner.decode_graphs = self.split

    def alone(self, run: Callable[[StepPlan], GraphStep], plan: StepPlan) -> Tensor:
        """Logits of a step that leaves no trace: what it writes to the cache is written again."""
        last_token = self.runner.table.last_token
        before = last_token.clone()
        logits = run(plan).logits.clone()
        last_token.copy_(before)
        return logits

    def run(self, plan: StepPlan) -> GraphStep:
        serial = self.alone(self.serial.run, plan)
        whole = self.alone(self.whole.run, plan)
        step = self.captured_run(plan)
        batch, size = plan.batch_size, next(s for s in SIZES if s >= plan.batch_size)
        where = f"step {len(self.steps)}: {batch} rows of {size}"
        assert torch.isfinite(step.logits).all(), where
        wrong = (step.logits != serial).any(1).nonzero()[:, 0].tolist()
        assert not wrong, f"{where}: rows {wrong} (of {rows_ahead(size)} ahead) differ from serial"
        differences = (step.logits - whole).square().mean(1).sqrt()
        differences /= whole.square().mean(1).sqrt()
        worst = int(differences.argmax())
        self.steps.append((batch, size, float(differences[worst])))
        assert differences[worst] < 0.1, (
            f"{where}: row {worst} is off by {differences[worst]:.3f} of its size"
        )
        best = step.logits.argmax(1)
        gaps = whole.amax(1) - whole.gather(1, best[:, None])[:, 0]
        limits = 4 * (step.logits - whole).abs().amax(1)
        assert (gaps <= limits).all(), f"{where}: another token, which is no near tie"
        return step


def add_ragged(harness: Harness, count: int) -> None:
    """Contexts of 1 to 600 tokens that end at different steps."""
    for i, prompt in enumerate(prompts(count, seed=41, high=600)):
        params = {"temperature": 1.0, "seed": i} if i % 3 == 0 else {}
        harness.add(i, prompt, max_tokens=6 + 7 * i % 61, **params)


@pytest.mark.parametrize(
    ("family", "dtype", "kv_cache_dtype"),
    [
        ("llama", "float16", "auto"),
        ("qwen2", "float16", "auto"),
        ("qwen3", "bfloat16", "auto"),
        ("mistral", "float16", "auto"),
        ("llama_biases", "float16", "fp8_e4m3"),
    ],
)
def test_halves_give_the_bits_of_serial_ones(tiny, family, dtype, kv_cache_dtype) -> None:
    """Some 65 replays with new data, of four graphs; in the end the second half is all padding."""
    harness = build(
        tiny(family),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        num_blocks=4096,
        max_num_seqs=SIZES[-1],
        enforce_eager=True,
    )
    ways = ThreeWays(harness)
    add_ragged(harness, 250)
    results = harness.run()
    harness.assert_empty()
    assert all(len(results[i].token_ids) == 6 + 7 * i % 61 for i in range(250))
    assert len(ways.steps) >= 50
    assert {size for _, size, _ in ways.steps} == set(SIZES)
    assert any(batch <= rows_ahead(size) for batch, size, _ in ways.steps)
    assert any(rows_ahead(size) < batch < size for batch, size, _ in ways.steps)
    worst = max(difference for *_, difference in ways.steps)
    print(f"{len(ways.steps)} steps; logits differ from whole steps' by {worst:.4f} of their size")


@pytest.mark.parametrize("count", [250, 100, 24])
def test_replays_of_the_same_step_give_the_same_bits(tiny, count: int) -> None:
    """50 of them without a pause, so that one's end meets the next one's beginning."""
    harness = build(
        tiny("llama"), num_blocks=4096, max_num_seqs=SIZES[-1], enforce_eager=True, overlap="off"
    )
    runner = harness.loop.runner
    graphs = runner.decode_graphs = capture(graphs_of(runner))
    replayed, run = [], graphs.run

    def run_often(plan: StepPlan) -> GraphStep:
        last_token = runner.table.last_token
        before = last_token.clone()
        step = run(plan)
        size = next(s for s in SIZES if s >= plan.batch_size)
        after, logits, wrong = last_token.clone(), step.logits.clone(), []
        for _ in range(50):
            last_token.copy_(before)
            graphs.replay(size)
            wrong.append((step.logits != logits).sum())
        assert torch.equal(last_token, after)
        replayed.append(torch.stack(wrong).tolist())
        return step

    graphs.run = run_often
    for i, prompt in enumerate(prompts(count, seed=42, high=600)):
        harness.add(i, prompt, max_tokens=16)
    harness.run()
    assert len(replayed) >= 4
    assert not np.any(replayed), f"logits that differ, by step and replay: {replayed}"


def test_an_engine_serves_200_requests_in_halves(tiny) -> None:
    harness = build(tiny("qwen3"), num_blocks=4096, max_num_seqs=200)
    graphs = harness.loop.runner.decode_graphs
    assert graphs.split_steps is not None
    assert next(size for size in graphs.sizes if graphs.split_steps.takes(size)) == 16
    everyone = prompts(200, seed=43, high=400)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=20 + i % 40, logprobs=1)
    results = harness.run()
    harness.assert_empty()
    assert all(len(results[i].token_ids) == 20 + i % 40 for i in range(200))
    checked = range(0, 200, 19)
    check_against_transformers(
        tiny("qwen3"), [everyone[i] for i in checked], [results[i] for i in checked]
    )


def test_halves_leave_room_on_every_multiprocessor(tiny) -> None:
    harness = build(tiny("llama"), max_num_seqs=64)
    graphs = harness.loop.runner.decode_graphs
    num_sms = device_of().num_sms
    assert graphs.attention.limits.slots == 2 * num_sms
    assert [one.limits.slots for one in graphs.split_steps.attentions] == [num_sms] * 2
    assert side_by_side.is_worth(graphs.model.spec)
    assert not side_by_side.settings.leaves_room
