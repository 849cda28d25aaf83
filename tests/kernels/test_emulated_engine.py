"""A GPU's attention backends under a whole model, with their kernels in the emulator.

What stays torch's are the products of many rows, and all in float32. Those of few rows, norms, rotation,
cache writes with their scales, plans, attention of decode rows and chunks run through the launchers that a
GPU uses.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention import base, paged, paged_f32
from engine.attention.base import allocate_kv_cache
from engine.layers import linear as linear_layer
from engine.layers import norm
from engine.models.config import ModelConfig
from engine.ops import (
    activation,
    jit,
    narrow_gemm,
    paged_attention_f32,
    paged_decode,
    paged_prefill,
    plan_decode,
    rms_norm,
    rope_and_cache,
    rotated_decode,
    skinny_gemm,
)
from engine.ops import linear as linear_op
from engine.runner.runner import distinct
from engine.weights.loader import load_model
from tests.engine_cpu import naive_attention
from tests.engine_cpu.naive_attention import Sequences
from tests.engine_cpu.test_fp8_cache import rounded_sequences, with_scales
from tests.engine_cpu.tiny_models import make_tiny
from tests.kernels import emulator
from tests.kernels.emulator import as_if_cuda, emulated
from tests.kernels.paged_attention_cases import Heads, limits_of

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")
MODULES = (
    activation,
    narrow_gemm,
    paged_attention_f32,
    paged_decode,
    paged_prefill,
    plan_decode,
    rms_norm,
    rope_and_cache,
    skinny_gemm,
)
SCALES = {"k_scale": torch.tensor(0.0625), "v_scale": torch.tensor(0.25)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("emulated")
    plain = make_tiny("qwen3", folder / "plain", tokenizer=False, head_dim=64)
    return with_scales(plain, folder / "scaled", **SCALES)


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The branches that tensors on a GPU would take."""
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_80")
    monkeypatch.setattr(paged, "upload", upload)
    monkeypatch.setattr(paged_f32, "upload", upload)
    monkeypatch.setattr(
        paged,
        "plan_limits",
        lambda heads, kv_heads, *_: limits_of(Heads(64, heads // kv_heads, kv_heads), 40),
    )
    monkeypatch.setattr(paged, "plan_decode", plan_decode_by_kernel)
    monkeypatch.setattr(paged, "paged_decode", paged_decode.launch)
    monkeypatch.setattr(paged, "rotated_decode", rotated_decode.launch)
    monkeypatch.setattr(paged, "paged_prefill", paged_prefill.launch)
    monkeypatch.setattr(paged_f32, "paged_attention_f32", paged_attention_f32.launch)
    monkeypatch.setattr(base, "rope_and_cache", rope_and_cache.launch)
    monkeypatch.setattr(linear_op, "kernel_for", kernel_for)
    for module in (linear_op, linear_layer):
        monkeypatch.setattr(module, "silu_and_mul", silu_and_mul_by_kernel)
    for module in (linear_op, norm):
        monkeypatch.setattr(module, "rms_norm", rms_norm.launch)
    monkeypatch.setattr(naive_attention, "BLOCK_SIZE", 16)  # kernels take no smaller blocks
    with emulated(*MODULES):
        yield


def kernel_for(x: Tensor, w: Tensor, *product: bool) -> Callable[..., Tensor] | None:
    """As on a Hopper."""
    if x.dtype is torch.float32 or len(x) > 32:
        return None
    kernel = skinny_gemm.skinny_gemm if len(x) <= 8 else narrow_gemm.narrow_gemm
    return lambda x, *args, **options: kernel(as_if_cuda(x), *args, **options)


def silu_and_mul_by_kernel(gate_up: Tensor, interleaved: bool = False) -> Tensor:
    return activation.launch(gate_up, "silu", interleaved)


def plan_decode_by_kernel(plan, seq_lens, rows, window) -> None:
    plan.batch = len(seq_lens)
    plan_decode.launch(plan, seq_lens, rows, window)


def gpu_like(
    model_dir, dtype: torch.dtype, kv_dtype: torch.dtype, captured: bool = False
) -> Sequences:
    """A model on the CPU that attends as on a GPU. `captured`: as captured steps with chunks do, whose
    kernels are launched for any numbers of rows and work items."""
    config = ModelConfig.from_directory(str(model_dir))
    model = load_model(str(model_dir), config, dtype, CPU, fused=dtype.itemsize == 2)
    sequences = Sequences(model, 2, max_len=96)
    spec = model.attention_specs[0]
    num_blocks = sequences.attention.kv.num_blocks
    kv = allocate_kv_cache(
        model.num_layers, num_blocks, spec.num_kv_heads, 16, spec.head_dim, kv_dtype, CPU, model.kv_scales
    )  # fmt: skip
    kv.k, kv.v = ([tensor.contiguous() for tensor in tensors] for tensors in (kv.k, kv.v))
    if dtype is torch.float32:
        attention = paged_f32.PagedAttentionF32(kv, spec.num_heads, CPU)
    else:
        attention = paged.PagedAttention(kv, distinct(model.attention_specs), 4, 96, CPU)
    plan_step = attention.plan
    if captured:
        attention.allocate_chunks(64, dtype)

    def plan(inputs, specs) -> None:
        """Leading rows of one token are decode rows."""
        counts = np.diff(inputs.query_start).tolist()
        inputs.num_decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
        if not captured or inputs.num_decodes == len(counts):
            plan_step(inputs, specs)
            return
        inputs.rows = np.arange(len(counts), dtype=np.int32)
        inputs.rows_device = torch.from_numpy(inputs.rows)
        inputs.seq_lens_device = torch.tensor(inputs.seq_lens, dtype=torch.int32)
        size = len(inputs.input_ids)
        attention.capture_chunks(size)
        attention.plan_chunks(inputs)
        attention.capture_chunks(size)  # what a replay does is what was captured

    attention.plan = plan
    sequences.attention = attention
    return sequences


def plain(model_dir, kv_dtype: torch.dtype) -> Sequences:
    """The same in float32 with the plainest attention."""
    model = load_model(
        str(model_dir), ModelConfig.from_directory(str(model_dir)), torch.float32, CPU
    )
    if kv_dtype.itemsize == 1:
        return rounded_sequences(model, kv_dtype, 96, 2)
    return Sequences(model, 2, 96)


STEPS: list[dict[int, list[int]]] = [
    {0: [(7 * i) % 500 + 3 for i in range(40)]},  # a prompt
    {0: [11], 1: [(5 * i) % 500 + 3 for i in range(23)]},  # a decode row and a chunk
    {0: [12], 1: [(3 * i) % 500 + 3 for i in range(9)]},
    {0: [13], 1: [14]},  # decode rows
    {1: [15]},
]


def logprobs(sequences: Sequences) -> Tensor:
    """Of all tokens at all positions, [positions, vocabulary]."""
    steps = [sequences.run(chunks) for chunks in STEPS]
    return torch.cat([torch.log_softmax(x.float(), -1) for step in steps for x in step.values()])


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance", "captured"),
    [
        (torch.float32, torch.float32, 1e-4, False),
        (torch.float32, torch.float32, 1e-4, True),
        (torch.float16, torch.float8_e4m3fn, 0.05, True),  # half a minute each
        (torch.float16, torch.float8_e5m2, 0.05, False),
    ],
)
def test_log_probabilities(model_dir, monkeypatch, dtype, kv_dtype, tolerance, captured) -> None:
    got = logprobs(gpu_like(model_dir, dtype, kv_dtype, captured))
    monkeypatch.undo()  # the reference runs as on a CPU
    monkeypatch.setattr(naive_attention, "BLOCK_SIZE", 16)
    want = logprobs(plain(model_dir, kv_dtype))
    exact = logprobs(plain(model_dir, torch.float32))
    ours, of_8_bits = (
        float((got - want).square().mean().sqrt()),
        float((want - exact).square().mean().sqrt()),
    )
    print(f"rms {ours:.5f}, of the cache's dtype {of_8_bits:.5f}")
    assert ours < tolerance + 0.5 * of_8_bits
