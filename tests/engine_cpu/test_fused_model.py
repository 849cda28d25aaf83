"""Weights stored as GPUs want them - norms folded in, gate and up interleaved - give the same model.

The formulation of a GPU runs here on CPU tensors: by torch's library with the operations around products
apart, as for many rows, and by the definition of the kernels for few rows.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.ops import fused_product
from engine.ops import linear as linear_op
from engine.weights.loader import load_model
from tests.engine_cpu.naive_attention import Sequences
from tests.engine_cpu.tiny_models import make_tiny

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
PROMPT = [(7 * i * i + 3 * i) % 509 + 3 for i in range(40)]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "biases": ("llama_biases", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "no whole groups": ("llama", {"hidden_size": 60, "intermediate_size": 84}),
}


@pytest.fixture(params=["library", "kernels"])
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernels":
        monkeypatch.setattr(linear_op, "kernel_for", lambda *_: fused_product.reference)
    return request.param


def load(path: str, dtype: torch.dtype, fused: bool) -> Decoder:
    return load_model(path, ModelConfig.from_directory(path), dtype, CPU, fused=fused)


def logits(model: Decoder) -> Tensor:
    """A prompt, then a chunk, then single tokens, [positions, vocabulary]."""
    sequences = Sequences(model)
    steps = (PROMPT[:25], PROMPT[25:], PROMPT[:1], PROMPT[1:2])
    return torch.cat([sequences.run({0: step})[0].float() for step in steps])


def error(got: Tensor, want: Tensor) -> float:
    """Relative to what `want` is large."""
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("name", MODELS)
def test_logits_in_float32(name: str, computed_by: str, tmp_path: Path) -> None:
    family, settings = MODELS[name]
    path = make_tiny(family, tmp_path, tokenizer=False, **settings)
    want = logits(load(path, FP32, fused=False))
    assert error(logits(load(path, FP32, fused=True)), want) < 1e-5


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_in_16_bits(name: str, dtype: torch.dtype, computed_by: str, tmp_path: Path) -> None:
    """As near to float32 as the plain formulation is, which rounds at other places."""
    family, settings = MODELS[name]
    path = make_tiny(family, tmp_path, tokenizer=False, **settings)
    exact = logits(load(path, FP32, fused=False))
    plain = error(logits(load(path, dtype, fused=False)), exact)
    fused = error(logits(load(path, dtype, fused=True)), exact)
    assert 0 < plain < 0.1
    assert fused < 1.3 * plain, f"error {fused:.4f}, of the plain formulation {plain:.4f}"


def test_the_tied_table_and_the_last_norm_stay_as_they_are(tmp_path: Path) -> None:
    path = make_tiny("llama_tied", tmp_path, tokenizer=False)
    plain, fused = load(path, BF16, fused=False), load(path, BF16, fused=True)
    assert torch.equal(fused.embedding.table, plain.embedding.table)
    assert torch.equal(fused.head(fused.embedding.table), plain.head(plain.embedding.table))
    assert torch.equal(fused.norm.weight, plain.norm.weight)
    first = fused.layers[0]
    assert first.qkv.norm is first.input_norm
    assert first.gate_up.norm is first.mlp_norm
    assert first.gate_up.is_interleaved


def test_by_default_only_gpus_in_16_bits_fuse(tmp_path: Path) -> None:
    from engine.models.decoder import build_model

    config = ModelConfig.from_directory(make_tiny("llama", tmp_path, tokenizer=False))
    for dtype in (FP32, BF16):
        assert not build_model(config, dtype, CPU).layers[0].qkv.is_fused


def random(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_a_layer_against_its_definition(
    has_bias: bool, dtype: torch.dtype, computed_by: str
) -> None:
    torch.manual_seed(0)
    norm = RmsNorm("norm", 48, 1e-5)
    norm.take([1 + 0.2 * random(48, dtype=dtype)])
    sources = [("gate", 56), ("up", 56)]
    layer = Linear("gate_up", 48, sources, has_bias, norm=norm, gated=True, fused=True)
    tensors = [random(112, 48, dtype=dtype) / 7, random(112, dtype=dtype)][: 1 + has_bias]
    stored = [tensor.float() for tensor in tensors]
    layer.take([tensor.clone() for tensor in tensors])
    x = random(5, 48, dtype=dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    y = torch.nn.functional.linear(normed, stored[0], stored[1] if has_bias else None)
    gate, up = y.chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    tolerance = 1e-5 if dtype is FP32 else 4 * torch.finfo(dtype).eps
    got = layer(x)
    assert got.dtype is dtype
    assert error(got.float(), want) < tolerance


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_a_product_added_in_place(
    has_bias: bool, dtype: torch.dtype, fused: bool, computed_by: str
) -> None:
    torch.manual_seed(0)
    layer = Linear("down", 48, [("down", 40)], has_bias, fused=fused)
    tensors = [random(40, 48, dtype=dtype) / 7, random(40, dtype=dtype)][: 1 + has_bias]
    layer.take([tensor.clone() for tensor in tensors])
    x, total = random(5, 48, dtype=dtype), 3 * random(5, 40, dtype=dtype)
    want = total.float() + x.float() @ tensors[0].float().T
    if has_bias:
        want += tensors[1].float()
    address = total.data_ptr()
    layer.add_to(total, x)
    assert total.data_ptr() == address
    tolerance = 1e-6 if dtype is FP32 else torch.finfo(dtype).eps
    assert error(total.float(), want) < tolerance


@pytest.mark.parametrize(
    ("dtype", "size", "is_folded"),
    [
        (torch.float16, 3e-3, True),
        (torch.float16, 1e-3, False),  # most of the product would be subnormal
        (torch.float16, 100.0, True),
        (BF16, 1e-4, True),
        (FP32, 1e-4, True),
    ],
)
def test_norms_of_all_sizes(
    dtype: torch.dtype, size: float, is_folded: bool, computed_by: str
) -> None:
    """A norm's weight that the matrix cannot take in stays apart."""
    torch.manual_seed(0)
    norm = RmsNorm("norm", 1024, 1e-5)
    norm.take([(size * (0.5 + torch.rand(1024))).to(dtype)])
    layer = Linear("qkv", 1024, [("qkv", 600)], norm=norm, fused=True)
    w = (0.02 * random(600, 1024)).to(dtype)
    layer.take([w.clone()])
    assert layer.is_folded == is_folded
    x = random(4, 1024, dtype=dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    tolerance = 1e-5 if dtype is FP32 else torch.finfo(dtype).eps
    assert error(layer(x).float(), normed @ w.float().T) < tolerance


def test_a_norm_that_would_overflow_stays_apart(computed_by: str) -> None:
    """One column's product is beyond float16, and what it is multiplied by is small."""
    torch.manual_seed(0)
    norm, w, x = RmsNorm("norm", 64, 1e-5), random(40, 64), random(5, 64)
    norm.take([torch.ones(64).index_fill_(0, torch.tensor([3]), 1e4).half()])
    w[7, 3], x[:, 3] = 10.0, 1e-3
    layer = Linear("qkv", 64, [("qkv", 40)], norm=norm, fused=True)
    layer.take([w.half()])
    assert not layer.is_folded
    wide = x.half().float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * norm.weight.float()
    assert error(layer(x.half()).float(), normed @ w.half().float().T) < 2e-3


@pytest.mark.parametrize("shape", [(16, 1), (48, 5), (32, fused_product.SLAB * 2 + 8), (160,)])
def test_interleaving_in_place(shape: tuple[int, ...]) -> None:
    gate_up = random(*shape)
    want = fused_product.interleave(gate_up).clone()
    fused_product.interleave_in_place(gate_up)
    assert torch.equal(gate_up, want)


def test_a_product_before_its_norm_is_an_error() -> None:
    layer = Linear("qkv", 8, [("qkv", 8)], norm=RmsNorm("norm", 8, 1e-5), fused=True)
    with pytest.raises(AssertionError, match="norm is loaded before qkv"):
        layer.take([random(8, 8)])
