"""Which kernel takes which product, and that start-up compiles what a decoder launches."""

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.layers.embedding import OutputHead
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rope_config import RopeConfig
from engine.models.decoder import Decoder, DecoderSpec
from engine.ops import activation, jit, narrow_gemm, rms_norm, skinny_gemm, wide_gemm_sm90
from engine.ops import linear as op
from engine.ops.kernel_list import kernel_specs
from tests.kernels.emulator import as_if_cuda, forget
from tests.kernels.models import shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = (activation, narrow_gemm, rms_norm, skinny_gemm, wide_gemm_sm90)
Launch = tuple[str, str, tuple[tuple[str, object], ...], int]


@pytest.fixture(autouse=True)
def without_the_wide_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_wide_gemm_sm90.py compiles what that kernel is chosen for."""
    monkeypatch.setattr(wide_gemm_sm90, "CHOSEN", ())


@pytest.fixture
def launched() -> Iterator[set[Launch]]:
    """What launchers ask for, instead of launching it."""
    asked: set[Launch] = set()

    def kernel(
        source: str,
        name: str,
        defines: Mapping[str, object] | None = None,
        smem_bytes: int = 0,
        arch: str | None = None,
    ) -> Callable[..., None]:
        asked.add((source, name, tuple(sorted((defines or {}).items())), smem_bytes))
        return lambda *args, **options: None

    real = jit.kernel
    jit.kernel = kernel  # type: ignore[assignment]
    forget(MODULES)
    yield asked
    jit.kernel = real
    forget(MODULES)


# --- the choice ---


def chosen(m: int, w: Tensor, dtype: torch.dtype = BF16) -> str | None:
    kernel = op.kernel_for(as_if_cuda(torch.zeros(m, w.shape[1], dtype=dtype)), w)
    return None if kernel is None else kernel.__name__


def test_few_rows_go_to_our_kernels() -> None:
    w = torch.zeros(64, 96, dtype=BF16)
    for m in (1, 8):
        assert chosen(m, w) == "skinny_gemm"
    for m in (9, 16, 32):
        assert chosen(m, w) == "narrow_gemm"
    for m in (33, 64, 256, 257, 5000):
        assert chosen(m, w) is None
    assert op.kernel_for(torch.zeros(4, 96, dtype=BF16), w) is None, "not on a CPU"


def test_the_kernel_for_many_rows_is_taken_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w = torch.zeros(64, 96, dtype=BF16)
    monkeypatch.setattr(wide_gemm_sm90, "CHOSEN", ((range(49, 65), range(0, 64 * 96 * 2 + 1)),))
    assert [m for m in (32, 48, 49, 64, 65) if chosen(m, w) == "wide_gemm_sm90"] == [49, 64]
    monkeypatch.setattr(wide_gemm_sm90, "CHOSEN", ((range(49, 65), range(0, 64 * 96 * 2)),))
    assert chosen(64, w) is None


def test_what_our_kernels_cannot_read_goes_to_the_library() -> None:
    w = torch.zeros(64, 96, dtype=BF16)
    for m in (4, 16):
        odd = torch.zeros(m, 100, dtype=BF16)[:, 1:97]  # rows between multiples of 16 bytes
        assert op.kernel_for(as_if_cuda(odd), w) is None
        assert op.kernel_for(as_if_cuda(torch.zeros(m, 64, dtype=BF16)), w[:, :64]) is None
        assert chosen(m, w.float(), FP32) is None
        assert chosen(m, torch.zeros(64, 90, dtype=BF16)) is None
    assert chosen(16, torch.zeros(63, 96, dtype=BF16)) is None, "narrow_gemm stores pairs"


# --- compiled ahead ---

SHAPES = {  # head size, heads, KV heads, hidden, inner, vocabulary
    "Qwen2.5-0.5B": (64, 14, 2, 896, 4864, 151_936),
    "Llama-3-8B": (128, 32, 8, 4096, 14_336, 128_256),
    "SmolLM2-135M": (64, 9, 3, 576, 1536, 49_152),
    "no whole groups": (64, 3, 1, 192, 364, 520),
}


def decoder(sizes: tuple[int, ...], dtype: torch.dtype) -> Decoder:
    """One layer of it, whose weights are never touched, so that they take no memory."""
    head_dim, heads, kv_heads, hidden, inner, vocab = sizes
    spec = DecoderSpec(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_model_len=1,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tied_head=False,
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,),
    )
    model = Decoder(spec, dtype, torch.device("cpu"), fused=dtype.itemsize == 2)
    for layer in model.weighted_layers():
        tensors = [torch.empty(slot.shape, dtype=dtype) for slot in layer.slots()]
        if isinstance(layer, Linear):
            layer.weight, layer.bias = tensors[0], tensors[1] if layer.has_bias else None
        elif isinstance(layer, RmsNorm | OutputHead):
            layer.weight = tensors[0]
    return model


def run_products(model: Decoder, num_rows: int, dtype: torch.dtype) -> None:
    """All norms and products of a layer, and the head, on what seems to be a GPU."""

    def rows(width: int) -> Tensor:
        return as_if_cuda(torch.empty(num_rows, width, dtype=dtype))

    (layer,), spec = model.layers, model.spec
    total = torch.zeros(num_rows, spec.hidden_size, dtype=dtype)
    layer.qkv(rows(spec.hidden_size))
    layer.output.add_to(total, rows(spec.num_heads * spec.head_dim))
    layer.gate_up(rows(spec.hidden_size))
    layer.down.add_to(total, rows(spec.intermediate_size))
    model.norm(rows(spec.hidden_size))
    assert model.head.weight is not None
    op.linear(rows(spec.hidden_size), model.head.weight)


def listed(sizes: tuple[int, ...], dtype: torch.dtype) -> set[Launch]:
    return {
        (spec.source, spec.name, tuple(sorted(spec.defines.items())), spec.smem_bytes)
        for spec in kernel_specs(shape(*sizes, dtype))
        if jit.supports(spec, "sm_90a")
    }


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", SHAPES)
def test_products_of_few_rows_are_compiled_ahead_and_no_others(
    name: str, dtype: torch.dtype, launched: set[Launch]
) -> None:
    model = decoder(SHAPES[name], dtype)
    for num_rows in range(1, 17):
        run_products(model, num_rows, dtype)
    sources = {source for source, *_ in launched}
    assert {"skinny_gemm.cu", "narrow_gemm.cu", "rms_norm.cu"} <= sources
    assert launched <= listed(SHAPES[name], dtype)
    unused = listed(SHAPES[name], dtype) - launched
    assert not [spec for spec in unused if spec[0] == "skinny_gemm.cu"]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", ["SmolLM2-135M", "no whole groups"])
def test_products_of_many_rows_are_compiled_ahead(
    name: str, dtype: torch.dtype, launched: set[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return as_if_cuda(torch.zeros(len(x), len(w), dtype=x.dtype))

    monkeypatch.setattr(op, "F", SimpleNamespace(linear=library))
    model = decoder(SHAPES[name], dtype)
    for num_rows in (1, 24, 32, 33, 300):
        run_products(model, num_rows, dtype)
    assert launched <= listed(SHAPES[name], dtype)
    gates = [dict(defines) for source, _, defines, _ in launched if source == "activation.cu"]
    is_interleaved = dtype is not FP32 and name == "SmolLM2-135M"
    has_kernel = is_interleaved or dtype is FP32
    assert [("INTERLEAVED" in gate) for gate in gates] == [is_interleaved] * has_kernel
