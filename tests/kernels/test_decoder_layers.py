"""All layers of a small step in one kernel, in the emulator: a few thread blocks at a time."""

import pytest
import torch

from engine.ops import decoder_layers
from engine.ops.decoder_layers import Layer, Shape
from tests.kernels import emulator
from tests.kernels.decoder_layers_cases import POISONS, Step
from tests.kernels.emulator import emulated

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16


TINY = Shape(BF16, 64, 64, 1, 1, 64, 64)
NARROW = Shape(BF16, 128, 192, 2, 1, 64, 64)  # less than a chunk for each warp
LONG_ROWS = Shape(BF16, 64, 704, 2, 1, 64, 16)  # rows of several pieces, the last one short
WIDE_HEADS = Shape(FP16, 192, 128, 4, 2, 128, 32)
MANY_HEADS = Shape(BF16, 64, 128, 16, 1, 64, 64)


def run(step: Step, smem_bytes: int = 1 << 19, **defines: int) -> None:
    want, caches = step.reference()
    hidden = step.hidden.clone()
    with emulated(decoder_layers):
        step.launch(hidden, step.spec(smem_bytes, CLUSTER=step.num_blocks, **defines))
    step.check(hidden, want, caches)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "lens", "options"),
    [
        (NARROW, [200, 1], {}),
        (NARROW, [1], {"padding": 1, "has_bias": True}),
        (NARROW, [600], {"has_qk_norm": True}),  # several tiles for a warp
        (LONG_ROWS, [130], {"has_bias": True}),
        (WIDE_HEADS, [17], {"has_bias": True, "has_qk_norm": True}),
        (MANY_HEADS, [64, 65, 16], {}),
    ],
    ids=["parts", "padding", "tiles", "pieces", "wide", "heads"],
)
def test_against_the_definition(shape: Shape, lens: list[int], options: dict[str, bool]) -> None:
    run(Step(shape, lens, num_blocks=3, **options))


def test_eight_rows() -> None:
    run(Step(TINY, [1, 15, 16, 17, 128, 129, 5, 64], num_blocks=8, num_layers=1))


@pytest.mark.parametrize("lens", [[700], [300, 129], [1, 257, 130], [400]])
def test_parts_of_rows(lens: list[int]) -> None:
    run(
        Step(
            WIDE_HEADS if len(lens) == 2 else TINY,
            lens,
            num_blocks=2 if lens == [400] else 6,
            num_layers=1,
        )
    )


@pytest.mark.parametrize("schedule", ["EMU_LATE", "EMU_BACKWARDS"])
def test_a_ring_that_comes_round(schedule: str) -> None:
    """Few slots, so that flights wait for others to be read, and lie across the ring's end."""
    step = Step(LONG_ROWS, [70], num_blocks=3, num_layers=1)
    large, pitch = step.spec(1 << 19), 1088
    small = large.smem_bytes - pitch * (int(large.defines["SLOTS"]) - 36)
    assert int(step.spec(small).defines["SLOTS"]) in range(32, 37)
    run(step, small, **{schedule: 1})


@pytest.mark.parametrize("schedule", [{}, {"EMU_BACKWARDS": 1}, {"EMU_UNEVEN": 1}], ids=str)
def test_launches_one_after_another(schedule: dict[str, int]) -> None:
    """Each finds empty what it fills, whatever the one before has left: more parts, longer ones, shorter rows."""
    step = Step(TINY, [300, 1, 40], num_blocks=4, has_qk_norm=True)
    for lens in ([300, 1, 40], [130, 2, 1], [300, 17, 1]):
        step.draw(lens)
        run(step, **schedule)


def test_fewer_rows_than_before() -> None:
    """Rows of `inner` that a launch leaves are no numbers of the next one that has as many."""
    five = Step(TINY, [5, 30, 1, 2, 3], num_blocks=5, num_layers=1)
    one = Step(TINY, [33], num_blocks=5)
    one.scratch = five.scratch
    for step in (five, one, five):
        run(step)


@pytest.mark.parametrize(("shape", "num_blocks"), [(NARROW, 3), (WIDE_HEADS, 4)], ids=str)
@pytest.mark.parametrize("place", POISONS)
def test_bad_numbers_are_not_waited_for(place: str, shape: Shape, num_blocks: int) -> None:
    """A NaN of a row or a weight, whatever its bits, leaves the kernel as another NaN than "not there yet"."""
    step = Step(shape, [20, 7], num_blocks=num_blocks, has_bias=True, has_qk_norm=True)
    weight = getattr(step.table.layers[0], place, None)
    healthy = None if weight is None else weight.clone()
    bad = step.poison(place)
    hidden = step.hidden.clone()
    with emulated(decoder_layers):
        step.launch(hidden, step.spec(1 << 19, CLUSTER=step.num_blocks))
    assert hidden.isnan().any(-1).nonzero().flatten().tolist() == bad
    assert step.scratch.is_clean()
    if healthy is not None:
        weight.copy_(healthy)
    step.draw([20, 7])
    run(step)


def test_what_is_supported() -> None:
    shape = Shape(BF16, 896, 4864, 14, 2, 64, 64)
    assert decoder_layers.supports(shape, 132)
    assert not decoder_layers.supports(shape, 80)
    assert not decoder_layers.supports(Shape(BF16, 900, 4864, 14, 2, 64, 64), 132)
    assert not decoder_layers.supports(Shape(BF16, 128, 4864, 14, 2, 64, 64), 132)
    assert not decoder_layers.supports(Shape(BF16, 896, 4864, 14, 2, 96, 64), 132)
    assert not decoder_layers.supports(Shape(torch.float32, 896, 4864, 14, 2, 64, 64), 132)
    assert not decoder_layers.supports(Shape(BF16, 2048, 4864, 32, 32, 64, 64), 132)
    assert decoder_layers.supports(Shape(BF16, 2048, 4864, 32, 32, 64, 64), 132, rows=4)
    assert not decoder_layers.is_chosen(Shape(BF16, 3584, 18944, 28, 4, 128, 64), 132)


def test_tensors_that_cannot_be_read() -> None:
    step = Step(NARROW, [3])
    layer = step.table.layers[0]
    for change in ({"down": layer.down.t()}, {"qkv": layer.qkv.half()}, {"qkv_bias": layer.qkv[0]}):
        with pytest.raises(ValueError, match="a tensor of layer 0 is"):
            decoder_layers.LayerTable.make(NARROW, [Layer(**{**vars(layer), **change})])
