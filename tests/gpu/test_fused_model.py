"""Layers whose products take in norm, gate and residual, on a GPU, whoever computes them: our kernels for few
rows, torch's library for many."""

import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import ModelConfig
from engine.ops import jit
from engine.weights.loader import load_model, weight_bytes
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.conftest import Record
from tests.gpu.engine_cases import SHAPE, build, check_against_transformers, prompts

BF16, FP16 = torch.bfloat16, torch.float16
ROWS = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 257)
HIDDEN, INNER = 896, 1216
EPS = 1e-6


def numbers(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(dtype)


class Block:
    """Layers of one MLP and a product of attention, and their definition in float32."""

    def __init__(self, dtype: torch.dtype, has_bias: bool) -> None:
        self.dtype = dtype
        norm = RmsNorm("norm", HIDDEN, EPS)
        norm.take([1 + numbers(HIDDEN, dtype=dtype, scale=0.2)])
        assert norm.weight is not None
        self.norm = norm.weight.float()
        self.has_bias = has_bias
        gate_up = [("gate", INNER), ("up", INNER)]
        self.weights: dict[str, list[Tensor]] = {}  # in float32, as they were loaded
        self.qkv = self.load(
            Linear("qkv", HIDDEN, [("qkv", 1152)], has_bias, norm=norm, fused=True)
        )
        self.gate_up = self.load(
            Linear("gate_up", HIDDEN, gate_up, has_bias, norm=norm, gated=True, fused=True)
        )
        self.down = self.load(Linear("down", INNER, [("down", HIDDEN)], has_bias, fused=True))

    def load(self, layer: Linear) -> Linear:
        tensors = [
            numbers(*slot.shape, dtype=self.dtype, scale=layer.in_features**-0.5 if i == 0 else 1)
            for i, slot in enumerate(layer.slots())
        ]
        self.weights[layer.name] = [tensor.float() for tensor in tensors]
        layer.take(tensors)
        return layer

    def product(self, name: str, x: Tensor) -> Tensor:
        weight, *bias = self.weights[name]
        return F.linear(x.float(), weight, bias[0] if bias else None)

    def normed(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * self.norm

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.product("gate_up", self.normed(x)).chunk(2, -1)
        return F.silu(gate) * up


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """Folding and the library's way round a few times: by less than half a unit each, at random."""
    assert got.dtype is dtype
    difference = got.float() - want
    rows = difference.norm(dim=-1) / want.norm(dim=-1)
    worst = int(rows.nan_to_num(torch.inf).argmax())
    limit = 2 * torch.finfo(dtype).eps
    assert rows[worst] < limit, (
        f"{what}: row {worst} has a relative error of {float(rows[worst]):.2e}, limit {limit:.2e}; "
        f"largest difference {float(difference.abs().nan_to_num(torch.inf).max()):.3g} in column "
        f"{int(difference[worst].abs().nan_to_num(torch.inf).argmax())}"
    )


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_layers_against_their_definition(dtype: torch.dtype, has_bias: bool) -> None:
    block = Block(dtype, has_bias)
    assert block.gate_up.is_interleaved
    for m in ROWS:
        x = numbers(m, HIDDEN, dtype=dtype, scale=3)
        kept = x.clone()
        want = block.product("qkv", block.normed(x))
        assert_near(block.qkv(x), want, dtype, f"qkv, {m} rows")
        inner = block.gate_up(x)
        assert inner.shape == (m, INNER)
        assert_near(inner, block.mlp(x), dtype, f"gate_up, {m} rows")
        assert torch.equal(x, kept), "x was changed"
        want = x.float() + block.product("down", inner)
        address = x.data_ptr()
        block.down.add_to(x, inner)
        assert x.data_ptr() == address
        assert_near(x, want, dtype, f"down, {m} rows")


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("m", [1, 8, 16, 32, 48])
def test_a_chain_in_a_graph(m: int, dependent: bool, graph_replay: Record) -> None:
    """Each product reads what the one before has written, and each second one adds in place."""
    block = Block(BF16, has_bias=False)
    hidden = torch.zeros(m, HIDDEN, dtype=BF16, device="cuda")
    start = torch.zeros_like(hidden)
    kept: list[Tensor] = []

    def layers() -> None:
        kept.clear()
        hidden.copy_(start)
        for _ in range(4):
            inner = block.gate_up(hidden)
            block.down.add_to(hidden, inner)
            kept.extend((inner, hidden.clone()))

    with jit.dependent_launches() if dependent else nullcontext():
        replay = graph_replay(layers)
    for _ in range(3):
        start.copy_(numbers(m, HIDDEN, dtype=BF16, scale=2))
        replay()
        before = start
        for step in range(4):
            inner, after = kept[2 * step : 2 * step + 2]
            assert_near(inner, block.mlp(before), BF16, f"gate_up of step {step}")
            want = before.float() + block.product("down", inner)
            assert_near(after, want, BF16, f"down of step {step}")
            before = after


def test_loading_leaves_nothing_but_the_weights(tmp_path, device: torch.device) -> None:
    """Interleaving and folding take place within the weights."""
    path = make_tiny("llama", tmp_path, tokenizer=False, **SHAPE)
    config = ModelConfig.from_directory(path)
    gc.collect()
    before = torch.cuda.memory_allocated(device)
    model = load_model(path, config, BF16, device)
    taken = torch.cuda.memory_allocated(device) - before
    assert all(layer.gate_up.is_interleaved for layer in model.layers)
    table = model.rotary.table
    wanted = weight_bytes(config, BF16) + table.numel() * table.element_size()
    assert wanted <= taken < wanted + 1024 * 30, "of 30 tensors, each rounded up to 512 bytes"


def check(harness: Harness, model_dir: str, seed: int) -> None:
    everyone = prompts(12, seed=seed)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=24, logprobs=1)
    check_against_transformers(model_dir, everyone, harness.run())
    harness.assert_empty()


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("inner", [1024, 1020])
def test_a_model_with_biases_everywhere(tmp_path, inner: int, enforce_eager: bool) -> None:
    """1020 is no multiple of 8: gate and up stay apart, and rows of x are no multiples of 16 bytes."""
    shape = {**SHAPE, "intermediate_size": inner}
    path = make_tiny("llama_biases", tmp_path, **shape)
    check(build(path, enforce_eager=enforce_eager, max_num_batched_tokens=256), path, seed=13)


def test_float16(tmp_path) -> None:
    path = make_tiny("qwen3", tmp_path, **SHAPE)
    check(build(path, dtype="float16", max_num_batched_tokens=256), path, seed=14)


def test_a_model_of_one_layer(tmp_path) -> None:
    """Its first layer is the last: chunks that sample nothing attend nowhere."""
    path = make_tiny("llama", tmp_path, **{**SHAPE, "num_hidden_layers": 1})
    check(
        build(path, max_num_batched_tokens=64, num_blocks=0, gpu_memory_utilization=0.2), path, 15
    )
