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
from engine.ops import (
    activation,
    fused_product,
    gated_gemm_sm90,
    hopper,
    jit,
    narrow_gemm,
    rms_norm,
    skinny_gemm,
    wide_gemm_sm90,
)
from engine.ops import linear as op
from engine.ops.kernel_list import kernel_specs
from tests.kernels.emulator import as_if_cuda, emulated, emulated_map, forget
from tests.kernels.models import shape

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODULES = (activation, gated_gemm_sm90, narrow_gemm, rms_norm, skinny_gemm, wide_gemm_sm90)
Launch = tuple[str, str, tuple[tuple[str, object], ...], int]


@pytest.fixture(autouse=True)
def chosen_afresh() -> Iterator[None]:
    """Choices are kept, and the devices here are made up."""
    forget((op,))
    yield
    forget((op,))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Launch]]:
    """What launchers ask for, instead of launching it."""
    for module in (gated_gemm_sm90, wide_gemm_sm90):
        monkeypatch.setattr(module, "tensor_map", lambda tensor, box: None)
    monkeypatch.setattr(torch, "mm", lambda *given, out=None: out)  # a CPU's gives no float32
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


def chosen(m: int, w: Tensor, dtype: torch.dtype = BF16, **surrounding: bool) -> str | None:
    """`surrounding`: options of op.kernel_for."""
    kernel = op.kernel_for(as_if_cuda(torch.zeros(m, w.shape[1], dtype=dtype)), w, **surrounding)
    return None if kernel is None else kernel.__name__


SKINNY, NARROW, WIDE, LIBRARY = "skinny_gemm", "narrow_gemm", "wide_gemm_sm90", None
GATED = "norm_and_gated_gemm"
QKV = {"normed": True, "has_bias": True}
SUM = {"residual": True}
GATE = {"normed": True, "gated": True}


@pytest.mark.parametrize(
    ("n", "k", "surrounding", "kernels"),
    [  # W of 2 to 17 MiB, then of 25 to 259; from row to row
        (1152, 896, QKV, {1: SKINNY, 9: NARROW, 17: WIDE, 257: LIBRARY}),
        (896, 896, SUM, {1: SKINNY, 9: NARROW, 17: WIDE, 257: LIBRARY}),
        (9728, 896, GATE, {1: SKINNY, 4: NARROW, 17: WIDE, 241: GATED}),
        (9728, 896, GATE | QKV, {1: SKINNY, 4: NARROW, 17: WIDE, 257: LIBRARY}),
        (896, 4864, SUM, {1: NARROW, 17: WIDE, 257: LIBRARY}),
        (3584, 3584, SUM, {1: SKINNY, 9: WIDE, 193: LIBRARY}),
        (4608, 3584, QKV, {1: SKINNY, 9: WIDE, 65: LIBRARY}),
        (37888, 3584, GATE, {1: SKINNY, 9: WIDE, 193: GATED}),
        (3584, 18944, SUM, {1: SKINNY, 9: WIDE, 193: LIBRARY}),
        (2048, 8192, SUM, {1: SKINNY, 5: WIDE, 193: LIBRARY}),
        (8192, 4096, QKV, {1: SKINNY, 9: WIDE, 65: LIBRARY}),
    ],
)
def test_each_number_of_rows_goes_where_it_is_fastest(
    n: int, k: int, surrounding: dict[str, bool], kernels: dict[int, str | None]
) -> None:
    w = torch.empty(n, k, dtype=BF16)
    got = [chosen(m, w, **surrounding) for m in range(1, 300)]
    assert kernels == {
        m: kernel for m, kernel in enumerate(got, 1) if m == 1 or kernel != got[m - 2]
    }
    for m, kernel in enumerate(got, 1):
        assert chosen(m, w) == (kernel if m <= 64 else LIBRARY), f"{m} rows"
    for m in (4, 300):
        assert op.kernel_for(torch.zeros(m, k, dtype=BF16), w) is None, "not on a CPU"


def test_gated_products_of_many_rows_have_a_kernel() -> None:
    w = torch.empty(9728, 896, dtype=BF16)
    for m in (257, 1024, 8192):
        assert chosen(m, w, **GATE) == GATED
        assert chosen(m, w, gated=True) == GATED
        assert chosen(m, w, **GATE, has_bias=True) == LIBRARY
        assert chosen(m, w, **GATE, residual=True) == LIBRARY
        assert chosen(m, torch.empty(9720, 896, dtype=BF16), **GATE) == LIBRARY
        assert chosen(m, w.float(), FP32, **GATE) == LIBRARY


def test_who_norms_and_gates_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias goes to the library: gate and up are written, and a kernel gates them."""
    w, bias, total = torch.randn(32, 64).to(BF16), torch.randn(32).to(BF16), torch.zeros(300, 32)
    x = as_if_cuda(torch.randn(300, 64).to(BF16))
    steps: list[str] = []

    def step(name: str, result: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: object, **options: object) -> Tensor:
            steps.append(name)
            return as_if_cuda(result(*args, **options))

        return run

    norm = step("norm", lambda x, weight, eps: 2 * x)
    gated = step("gated", lambda x, w, out: fused_product.reference(x, w, gated=True))
    library = step("library", torch.nn.functional.linear)
    gate = step("gate", lambda y, interleaved: y[:, :16])
    monkeypatch.setattr(op, "rms_norm", norm)
    monkeypatch.setattr(gated_gemm_sm90, "gated_gemm_sm90", gated)
    monkeypatch.setattr(op, "F", SimpleNamespace(linear=library))
    monkeypatch.setattr(op, "silu_and_mul", gate)
    y = op.fused_linear(x, w, norm_eps=1e-6, gated=True)
    assert torch.equal(y, fused_product.reference(2 * x, w, gated=True))
    assert steps == ["norm", "gated"]
    op.fused_linear(x, w, gated=True)
    assert steps[2:] == ["gated"]
    op.fused_linear(x, w, bias, norm_eps=1e-6, gated=True)
    assert steps[3:] == ["norm", "library", "gate"]
    op.fused_linear(x, w, norm_eps=1e-6)
    assert steps[6:] == ["norm", "library"]
    op.fused_linear(x, w, bias, residual=total.to(BF16))
    assert steps[8:] == ["library"]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_logits_are_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever computes them, and into memory that is given."""

    def mm(
        x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None
    ) -> Tensor:
        assert (out_dtype or x.dtype) is FP32
        y = x.float() @ w.float()
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(torch, "mm", mm)
    w = torch.randn(48, 72).to(dtype)
    monkeypatch.setattr(wide_gemm_sm90, "tensor_map", emulated_map)
    with emulated(skinny_gemm, narrow_gemm, wide_gemm_sm90):
        for m in (3, 12, 40, 70):
            x = torch.randn(m, 72).to(dtype)
            want = x.float() @ w.float().T
            place = torch.empty(m + 2, 48)
            fresh = op.linear_float32(as_if_cuda(x), w)
            given = op.linear_float32(as_if_cuda(x), w, place[:m])
            assert given.data_ptr() == place.data_ptr()
            for y in (fresh, given, op.linear_float32(x, op.pack_weight(w))):
                assert y.dtype is FP32
            for y in (fresh, given):
                torch.testing.assert_close(torch.Tensor(y), want, atol=1e-4, rtol=1e-5)


def test_other_devices_have_a_kernel_for_few_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    other = hopper.Device(108, 163 << 10, has_clusters=False)
    monkeypatch.setattr(op, "device_of", lambda index=None: other)
    for shape_of_w in ((9728, 896), (896, 4864), (4608, 3584)):
        w = torch.empty(shape_of_w, dtype=BF16)
        assert [m for m in range(1, 100) if chosen(m, w)] == list(range(1, 9))
        assert chosen(8, w) == SKINNY
        assert chosen(300, w, **GATE) == LIBRARY


def test_what_our_kernels_cannot_read_goes_to_the_library() -> None:
    w = torch.zeros(64, 96, dtype=BF16)
    for m in (4, 16, 50, 300):
        odd = torch.zeros(m, 100, dtype=BF16)[:, 1:97]  # rows between multiples of 16 bytes
        assert op.kernel_for(as_if_cuda(odd), w, **GATE) is None
        x = as_if_cuda(torch.zeros(m, 64, dtype=BF16))
        assert op.kernel_for(x, w[:, :64], **GATE) is None
        assert chosen(m, w.float(), FP32) is None
        assert chosen(m, torch.zeros(64, 90, dtype=BF16)) is None
    assert chosen(16, torch.zeros(63, 96, dtype=BF16)) is None, "narrow_gemm stores pairs"
    assert chosen(40, torch.zeros(60, 96, dtype=BF16)) is None, "wide_gemm_sm90 stores eights"


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
    """All norms and products of a layer, and the head, on what seems to be a GPU; in float16 also those of a
    layer whose norms' weights do not fit into its products' (engine/layers/linear.py)."""

    def rows(width: int) -> Tensor:
        return as_if_cuda(torch.empty(num_rows, width, dtype=dtype))

    (layer,), spec = model.layers, model.spec
    total = torch.zeros(num_rows, spec.hidden_size, dtype=dtype)
    layer.qkv(rows(spec.hidden_size))
    layer.gate_up(rows(spec.hidden_size))
    if dtype is FP16:
        norms, layer.qkv.norm, layer.gate_up.norm = (layer.qkv.norm, layer.gate_up.norm), None, None
        layer.qkv(rows(spec.hidden_size))
        layer.gate_up(rows(spec.hidden_size))
        layer.qkv.norm, layer.gate_up.norm = norms
    layer.output.add_to(total, rows(spec.num_heads * spec.head_dim))
    layer.down.add_to(total, rows(spec.intermediate_size))
    model.norm(rows(spec.hidden_size))
    assert model.head.weight is not None
    model.head(rows(spec.hidden_size))


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
    for num_rows in range(1, 65):
        run_products(model, num_rows, dtype)
    few = {"skinny_gemm.cu", "narrow_gemm.cu"} - (
        {"narrow_gemm.cu"} if name == "Llama-3-8B" else set()
    )
    assert {*few, "wide_gemm_sm90.cu"} <= {source for source, *_ in launched}
    assert launched <= listed(SHAPES[name], dtype)
    unused = listed(SHAPES[name], dtype) - launched
    assert not [spec for spec in unused if spec[0] in few]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("name", ["SmolLM2-135M", "no whole groups"])
def test_products_of_many_rows_are_compiled_ahead(
    name: str, dtype: torch.dtype, launched: set[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        return as_if_cuda(torch.zeros(len(x), len(w), dtype=x.dtype))

    monkeypatch.setattr(op, "F", SimpleNamespace(linear=library))
    model = decoder(SHAPES[name], dtype)
    gate_up = model.layers[0].gate_up
    bias = torch.empty(2 * model.spec.intermediate_size, dtype=dtype)
    for num_rows in (1, 9, 32, 33, 64, 65, 128, 129, 192, 193, 256, 300):
        for gate_up.bias in (bias, None):  # with one, gate and up are not gated_gemm_sm90's
            run_products(model, num_rows, dtype)
    for tile in gated_gemm_sm90.TILES:
        monkeypatch.setattr(gated_gemm_sm90, "tile_for", lambda *product, tile=tile: tile)
        run_products(model, 300, dtype)
    assert launched <= listed(SHAPES[name], dtype)
    unused = listed(SHAPES[name], dtype) - launched
    assert not [spec for spec in unused if spec[0] in ("gated_gemm_sm90.cu", "wide_gemm_sm90.cu")]
    gates = [dict(defines) for source, _, defines, _ in launched if source == "activation.cu"]
    is_interleaved = dtype is not FP32 and name == "SmolLM2-135M"
    has_kernel = is_interleaved or dtype is FP32
    assert [("INTERLEAVED" in gate) for gate in gates] == [is_interleaved] * has_kernel
