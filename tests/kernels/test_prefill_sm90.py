"""The Hopper prefill kernel in the emulator: layouts, swizzles, masks, and that every wait ends."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ops import paged_prefill_sm90 as op
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.prefill_sm90_cases import assert_close, make_case

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

BF16, FP16 = torch.bfloat16, torch.float16


def emulated_map(tensor: Tensor, box: tuple[int, ...]) -> np.ndarray:
    """As TensorMap in cuda/common/sm90_emulated.cuh."""
    missing = 3 - tensor.dim()
    extents = [*tensor.shape[::-1], *[1] * missing]
    strides = [*(2 * s for s in tensor.stride()[-2::-1]), *[0] * missing]
    boxes = [*box[::-1], *[1] * missing]
    words = [tensor.data_ptr(), *extents, *strides, *boxes, *[0] * 7]
    return np.array(words, np.uint64).view("V128")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    monkeypatch.setattr(op, "tensor_map", emulated_map)
    with emulated(op):
        yield


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "heads", "chunks", "window", "softcap", "num_sms"),
    [
        (128, 64, BF16, (2, 1), [(3, 3)], None, 0.0, 2),
        (128, 16, BF16, (4, 2), [(130, 300), (1, 77), (20, 20)], None, 0.0, 3),
        (64, 32, FP16, (2, 1), [(150, 400)], 90, 0.0, 1),
        (64, 128, BF16, (1, 1), [(40, 200)], None, 5.0, 1),
    ],
)
def test_prefill_sm90(
    monkeypatch: pytest.MonkeyPatch,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    chunks: list[tuple[int, int]],
    window: int | None,
    softcap: float,
    num_sms: int,
) -> None:
    monkeypatch.setattr(op, "num_sms", lambda device: num_sms)
    case = make_case(head_dim, block_size, dtype, *heads, chunks, window, softcap)
    out = torch.full((case.q.shape[0], heads[0] * head_dim), float("nan"), dtype=dtype)
    op.paged_prefill_sm90(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.rows,
        case.work,
        case.q_start,
        case.scale,
        window,
        softcap,
        out,
    )
    assert_close(out, case)


def test_work_items_cover_every_query_row_longest_first() -> None:
    items = op.work_items([300, 1, 128], [300, 1000, 256])
    assert items.dtype == np.int32
    assert items.tolist() == [
        [1, 0, 1, 1000],
        [0, 256, 300, 300],
        [0, 128, 300, 300],
        [2, 0, 128, 256],
        [0, 0, 300, 300],
    ]
