"""All layers of a small step in one kernel, against their definition, and in graphs."""

import numpy as np
import pytest
import torch

from engine.models import small_steps
from engine.ops import decoder_layers, jit
from engine.ops.decoder_layers import Shape
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.conftest import Record
from tests.gpu.engine_cases import SHAPE, build, check_against_transformers, prompts
from tests.kernels.decoder_layers_cases import POISONS, Step

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = [
    Shape(BF16, 896, 4864, 14, 2, 64, 64),
    Shape(FP16, 896, 4864, 14, 2, 64, 16),
    Shape(BF16, 576, 1536, 9, 3, 64, 64),
    Shape(FP16, 1024, 3072, 16, 8, 128, 64),
    Shape(BF16, 192, 192, 2, 1, 64, 32),  # hardly more outputs than blocks
    Shape(BF16, 192, 1216, 16, 1, 64, 64),
]
LENS = [1, 15, 16, 17, 63, 64, 65, 1000, 5000]


@pytest.fixture(scope="module", autouse=True)
def hopper_with_kernels() -> None:
    if jit.device_arch() != "sm_90a":
        pytest.skip("the kernel is for Hopper")
    jit.prebuild([decoder_layers.variant(shape) for shape in SHAPES])


def step_of(shape: Shape, lens: list[int], **options: int | bool) -> Step:
    num_blocks = decoder_layers.multiprocessors(torch.cuda.current_device())
    return Step(shape, lens, num_blocks=num_blocks, device="cuda", **options)  # type: ignore[arg-type]


def run(step: Step) -> torch.Tensor:
    want, caches = step.reference()
    hidden = step.hidden.clone()
    step.launch(hidden, step.spec())
    torch.cuda.synchronize()
    step.check(hidden, want, caches)
    return hidden


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_definition(shape: Shape, has_bias: bool) -> None:
    for m in range(1, 9):
        lens = [LENS[(3 * m + 2 * i) % len(LENS)] for i in range(m)]
        run(step_of(shape, lens, has_bias=has_bias, has_qk_norm=m % 2 == 0))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_padding_and_long_contexts(shape: Shape) -> None:
    run(step_of(shape, [20000]))
    run(step_of(shape, [1, 9000, 130], padding=1, num_layers=3))
    run(step_of(shape, [1000] * 5, padding=3))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_a_graph_follows_new_lengths(shape: Shape, graph_replay: Record) -> None:
    longest = [4097, 1000, 65, 3000, 17]
    step = step_of(shape, longest, padding=1, num_layers=3, has_qk_norm=True)
    hidden, spec = step.hidden.clone(), step.spec()

    def work() -> None:
        hidden.copy_(step.hidden)
        step.launch(hidden, spec)

    replay = graph_replay(work)
    generator = np.random.default_rng(0)
    for _ in range(20):
        count = int(generator.integers(1, len(longest) + 1))
        step.draw([int(generator.integers(1, n + 1)) for n in longest[:count]])
        want, caches = step.reference()
        replay()
        step.check(hidden, want, caches)


def test_the_same_bits_each_time() -> None:
    """What blocks do does not depend on which of them is first."""
    step = step_of(SHAPES[0], [700, 64, 3000], num_layers=4)
    first = run(step)
    for _ in range(50):
        hidden = step.hidden.clone()
        step.launch(hidden, step.spec())
        assert torch.equal(hidden.view(torch.int16), first.view(torch.int16))


def test_all_sorts_of_steps_in_a_row() -> None:
    """Scratch is clean for whoever comes next."""
    longest = [5000, 1000, 65, 3000, 17, 300, 1, 128]
    step, generator = step_of(SHAPES[0], longest), np.random.default_rng(1)
    steps = [step_of(SHAPES[0], longest[:m]) for m in range(1, 8)] + [step]
    for _ in range(30):
        one = steps[generator.integers(len(steps))]
        one.scratch = step.scratch
        high = generator.choice([200, 1000, 5000])
        one.draw([int(generator.integers(1, min(n, high) + 1)) for n in one.longest])
        run(one)


@pytest.mark.parametrize("place", POISONS)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)
def test_bad_numbers_are_not_waited_for(shape: Shape, place: str) -> None:
    """A NaN of a row or a weight, whatever its bits, leaves the kernel as another NaN than "not there yet": rows of
    one part and of several. Where it does not, the kernel would hang; built so, it traps."""
    lens = [3000, 17, 1, 700]
    step = step_of(shape, lens, has_bias=True, has_qk_norm=True)
    spec, before = step.spec(SLUICE_TRAP=1), step.hidden.clone()
    step.launch(before, spec)
    weight = getattr(step.table.layers[0], place, None)
    healthy = None if weight is None else weight.clone()
    bad = step.poison(place)
    hidden = step.hidden.clone()
    step.launch(hidden, spec)
    assert hidden.isnan().any(-1).nonzero().flatten().tolist() == bad
    others = [row for row in range(len(lens)) if row not in bad]
    assert torch.equal(hidden[others].view(torch.int16), before[others].view(torch.int16))
    assert step.scratch.is_clean()
    if healthy is not None:
        weight.copy_(healthy)
    step.draw(lens)
    run(step)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen2", "qwen3"])
def test_decode_steps_of_an_engine(tmp_path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(small_steps, "MOST_ROWS", 8)
    path = make_tiny(name, tmp_path, **SHAPE)
    harness = build(path, max_num_seqs=12, max_num_batched_tokens=256)
    steps = harness.loop.runner.small_steps
    assert steps is not None
    assert steps.sizes == [1, 2, 4, 8]
    everyone = prompts(12, seed=31)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=16 + 5 * i, logprobs=1)
    check_against_transformers(path, everyone, harness.run())
    harness.assert_empty()
