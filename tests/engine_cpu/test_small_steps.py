"""Decode steps with all layers at once, by their definition on a CPU, against the model layer by layer."""

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import StepInputs, allocate_kv_cache
from engine.attention.paged_f32 import PagedAttentionF32
from engine.build_gpu import decode_plan
from engine.models import small_steps
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.small_steps import SmallSteps
from engine.ops import decoder_layers, jit
from engine.runner.decode_graphs import graph_sizes
from engine.runner.device_inputs import DeviceInputs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.request_table import RequestTable
from engine.runner.runner import ModelRunner
from engine.weights.loader import load_model
from tests.engine_cpu import naive_attention
from tests.engine_cpu.naive_attention import Sequences
from tests.engine_cpu.test_decode_graphs import ReplayedBodies, as_on_a_gpu
from tests.engine_cpu.tiny_models import make_tiny

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SIZES = [1, 2, 4, 8]
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
PROMPTS = {0: [(7 * i) % 500 + 3 for i in range(40)], 1: [5, 6, 7]}


__all__ = ["as_on_a_gpu"]  # a fixture that all tests here use


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_90a")
    monkeypatch.setattr(decoder_layers, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(naive_attention, "BLOCK_SIZE", 16)
    monkeypatch.setattr(small_steps, "MOST_ROWS", 4)


def load(path: str, dtype: torch.dtype = BF16, fused: bool = True) -> Decoder:
    return load_model(path, ModelConfig.from_directory(path), dtype, CPU, fused=fused)


def sequences_of(model: Decoder) -> Sequences:
    sequences = Sequences(model, 2, max_len=64)
    kv = sequences.attention.kv
    kv.k, kv.v = ([tensor.contiguous() for tensor in tensors] for tensors in (kv.k, kv.v))
    return sequences


class OneKernel:
    """In place of a model: its decode steps take all layers at once."""

    def __init__(self, model: Decoder, steps: SmallSteps) -> None:
        self.attention_specs, self.logits, self.steps = model.attention_specs, model.logits, steps

    def forward(self, inputs: StepInputs, _: object) -> Tensor:
        count = len(inputs.seq_lens)
        inputs.rows_device = torch.arange(count, dtype=torch.int32)
        inputs.seq_lens_device = torch.tensor(inputs.seq_lens, dtype=torch.int32)
        inputs.input_ids, inputs.positions = inputs.input_ids[:count], inputs.positions[:count]
        return self.steps.forward(inputs)


@pytest.mark.parametrize("name", ["llama", "llama_biases", "qwen2", "qwen3"])
def test_as_layer_by_layer(name: str, tmp_path) -> None:
    path = make_tiny(name, tmp_path, tokenizer=False, head_dim=64, **SHAPE)
    both = []
    for at_once in (False, True):
        model = load(path)
        sequences = sequences_of(model)
        outputs = [*sequences.run(PROMPTS).values()]
        if at_once:
            steps = SmallSteps.make(model, sequences.attention.kv, CPU, SIZES)
            assert steps is not None
            sequences.model = OneKernel(model, steps)
        for token in range(20):  # across a block's end
            outputs += sequences.run({0: [11 + token], 1: [300 - token]}).values()
            outputs += sequences.run({1: [40 + token]}).values()
        both.append(torch.log_softmax(torch.cat(outputs).float(), -1))
    difference = (both[0] - both[1]).square().mean().sqrt()
    exact = sequences_of(load(path, torch.float32, False))
    outputs = [*exact.run(PROMPTS).values()]
    for token in range(20):
        outputs += exact.run({0: [11 + token], 1: [300 - token]}).values()
        outputs += exact.run({1: [40 + token]}).values()
    want = torch.log_softmax(torch.cat(outputs), -1)
    errors = [float((got - want).square().mean().sqrt()) for got in both]
    print(f"{name}: difference {float(difference):.4f}, errors {errors}")
    assert errors[1] < 1.2 * errors[0]


class Recorded(SmallSteps):
    """Keeps the inputs of its steps."""

    def forward(self, inputs: StepInputs) -> Tensor:
        fields = (inputs.input_ids, inputs.positions, inputs.rows_device, inputs.seq_lens_device)
        seen.append([field.tolist() for field in fields if field is not None])
        return super().forward(inputs)


seen: list[list[list[int]]] = []


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_with_a_graph_or_without(rows: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same inputs, padding rows among them, so the same numbers."""
    path = make_tiny("llama", tmp_path, tokenizer=False, head_dim=64, **SHAPE)
    model, vocab = load(path), ModelConfig.from_directory(path).vocab_size
    kv = allocate_kv_cache(model.num_layers, 9, 1, 16, 64, BF16, CPU)
    for cache in [*kv.k, *kv.v]:
        cache.normal_(generator=torch.Generator().manual_seed(1))
    attention = PagedAttentionF32(kv, 2, CPU)
    table = RequestTable(6, 4, CPU)
    table.block_ids[1:5, :2] = np.arange(1, 9).reshape(4, 2)
    table.last_token.copy_(torch.arange(40, 46))
    steps = Recorded.make(model, kv, CPU, graph_sizes(5))
    assert steps is not None
    assert steps.sizes == [1, 2, 4]
    sampler = DeviceSampler(6, vocab, (2,), CPU)
    monkeypatch.setattr(sampler, "sample_on_device", lambda *args, **options: None)
    runner = ModelRunner(model, attention, sampler, table, DeviceInputs(32, 5, CPU))
    runner.small_steps = steps
    runner.decode_graphs = ReplayedBodies(model, attention, sampler, table, 5, CPU, steps)
    plan = decode_plan(rows, 17)
    plan.num_computed += np.arange(rows, dtype=np.int32)
    seen.clear()
    without, _ = runner.forward(plan)
    runner.decode_graphs.run(plan)
    logits = runner.decode_graphs.logits
    size = {1: 1, 3: 4, 4: 4}[rows]
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert [len(field) for field in seen[0]] == [size] * 4
    assert seen[0][0] == [41 + i if i < rows else 0 for i in range(size)]
    assert logits is not None
    assert logits.shape == (size, vocab)
    assert torch.equal(without, logits[:rows])


def test_who_does_without(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny("llama", tmp_path, tokenizer=False, head_dim=64, **SHAPE)
    model = load(path)
    kv = sequences_of(model).attention.kv
    steps = SmallSteps.make(model, kv, CPU, SIZES)
    assert steps is not None
    assert steps.sizes == [1, 2, 4]
    assert SmallSteps.make(model, kv, CPU, [8, 16]) is None
    plain = load(path, fused=False)
    assert SmallSteps.make(plain, kv, CPU, SIZES) is None, "norms are not folded"
    kv.k[0] = kv.k[0].to(torch.float8_e4m3fn)
    assert SmallSteps.make(model, kv, CPU, SIZES) is None, "the cache has 8 bits"
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_100")
    assert SmallSteps.make(model, sequences_of(model).attention.kv, CPU, SIZES) is None
