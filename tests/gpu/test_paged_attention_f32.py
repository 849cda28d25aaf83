"""Attention in float32 on a CUDA device: the kernel, and the backend in eager steps and in a graph."""

import pytest
import torch
from torch import Tensor

from engine.attention.base import GraphAttention, KVCache
from engine.attention.paged_f32 import PagedAttentionF32
from engine.ops import jit, paged_attention_f32
from tests.gpu.conftest import Record
from tests.gpu.test_paged_attention import STEPS, Steps
from tests.kernels.paged_attention_cases import Heads, make_queries

FP32 = torch.float32
SHAPES = [
    Heads(64, 3, 3, FP32, block_size=64),
    Heads(128, 7, 4, FP32),
    Heads(80, 4, 2, FP32, block_size=32),
    Heads(256, 2, 2, FP32, softcap=30.0),
    Heads(20, 2, 1, FP32, block_size=8),
]


@pytest.fixture(scope="module", autouse=True)
def kernels_built_together() -> None:
    jit.prebuild([paged_attention_f32.variant(heads.head_dim) for heads in SHAPES])


class Float32Steps(Steps):
    def make_backend(self, kv: KVCache, **settings: object) -> GraphAttention:
        return PagedAttentionF32(
            kv, self.spec.num_heads, torch.device("cuda", torch.cuda.current_device())
        )


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_steps(heads: Heads, window: int | None, kind: str) -> None:
    q_lens, lens = STEPS[kind]
    steps = Float32Steps(heads, lens, window)
    q = make_queries(heads, sum(q_lens) + 2, "cuda")
    for from_host in (False, True):
        inputs = steps.inputs(q_lens, len(q), from_host)
        steps.backend.plan(inputs, [steps.spec])
        steps.check(q, q_lens, steps.backend.attend(0, q, steps.spec, inputs))


def test_a_token_does_not_depend_on_its_step() -> None:
    q_lens, lens = STEPS["mixed"]
    steps = Float32Steps(SHAPES[0], lens, None)
    q = make_queries(SHAPES[0], sum(q_lens), "cuda")
    inputs = steps.inputs(q_lens, len(q), False)
    steps.backend.plan(inputs, [steps.spec])
    together = steps.backend.attend(0, q, steps.spec, inputs)
    first = inputs.query_start[4]
    rows = inputs.rows_device[4:].repeat_interleave(q_lens[4])
    last = torch.arange(lens[4] - q_lens[4], lens[4], dtype=torch.int32, device="cuda") + 1
    out = torch.empty_like(q[first:])
    paged_attention_f32.paged_attention_f32(
        q[first:], steps.context.k_cache, steps.context.v_cache, inputs.block_table,
        rows, last, steps.spec.scale, out,
    )  # fmt: skip
    assert torch.equal(out.flatten(1), together[first:])


def test_a_graph_follows_new_lengths(graph_replay: Record) -> None:
    heads, batch = SHAPES[1], 8
    longest = [700, 4097, 1, 65, 300, 2000, 16, 33]
    steps = Float32Steps(heads, longest, None)
    q = make_queries(heads, batch, "cuda")
    inputs = steps.inputs([1] * batch, batch, False)
    rows, seq_lens = inputs.rows_device.clone(), inputs.seq_lens_device
    result: list[Tensor] = []

    def step() -> Tensor:
        steps.backend.plan_on_device(seq_lens, rows, batch)
        result[:] = [steps.backend.attend(0, q, steps.spec, inputs)]
        return result[0]

    replay = graph_replay(step)
    captured = result[0]
    for count in (8, 3, 1, 8):
        lens = [max(1, n - 13 * count) for n in longest[:count]]
        seq_lens.fill_(1)
        seq_lens[:count] = torch.tensor(lens, dtype=torch.int32)
        rows.zero_()
        rows[:count] = steps.context.rows[:count]
        q.normal_()
        replay()
        steps.context.lens = lens
        steps.check(q, [1] * count, captured)
