"""Decode steps in halves without a GPU: the same results, what the halves share, and where launches must be whole."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

from engine.attention import paged
from engine.attention.base import KVCache, allocate_kv_cache
from engine.attention.paged_f32 import PagedAttentionF32
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.ops import jit, paged_decode, side_by_side
from engine.ops.plan_decode import PlanLimits
from engine.runner import split_steps
from engine.runner.runner import distinct
from engine.runner.split_steps import SplitSteps, rows_ahead
from engine.weights.loader import load_model
from tests.engine_cpu.test_decode_graphs import FULL, PLAIN, as_on_a_gpu, complete, gpu_like
from tests.engine_cpu.tiny_models import make_tiny
from tests.kernels.models import MODELS

__all__ = ["as_on_a_gpu"]  # a fixture for all tests here

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny("qwen3", tmp_path_factory.mktemp("split"), tokenizer=False)


@pytest.fixture(scope="module")
def model(model_dir: str) -> Decoder:
    return load_model(
        model_dir, ModelConfig.from_directory(model_dir), torch.float32, CPU, fused=False
    )


@pytest.mark.parametrize("everyone", [PLAIN * 2, PLAIN + FULL], ids=["plain", "mixed"])
def test_tokens_are_those_of_whole_steps(model_dir, monkeypatch, everyone) -> None:
    """With 6 rows, and with 4 of which some are padding; halves of two rows have the bits of whole steps here."""
    monkeypatch.setattr(split_steps, "ROWS", range(4, 7))
    monkeypatch.setattr(split_steps, "QUANTUM", 2)
    split = gpu_like(model_dir, True)
    graphs = split.loop.runner.decode_graphs
    num_heads = graphs.model.attention_specs[0].num_heads
    halves = tuple(PagedAttentionF32(graphs.attention.kv, num_heads, CPU) for _ in range(2))
    graphs.split_steps = steps = SplitSteps(graphs.model, halves, None)
    sizes, forward = [], SplitSteps.forward

    def noted(self: SplitSteps, inputs) -> Tensor:
        assert self is steps
        sizes.append(inputs.num_decodes)
        return forward(self, inputs)

    monkeypatch.setattr(SplitSteps, "forward", noted)
    got = complete(split, everyone)
    want = complete(gpu_like(model_dir, True), everyone)
    assert {4, 6} == set(sizes)
    for req_id, result in want.items():
        assert got[req_id].token_ids == result.token_ids, f"request {req_id}"
        assert got[req_id].logprobs == pytest.approx(result.logprobs, abs=1e-4)


def test_halves_are_views_of_the_step(model_dir) -> None:
    graphs = gpu_like(model_dir, True).loop.runner.decode_graphs
    inputs = graphs.step_inputs(6)
    graphs.inputs.positions.copy_(torch.arange(6))
    graphs.inputs.rows.copy_(torch.arange(6) + 10)
    parts = [inputs.part(slice(4)), inputs.part(slice(4, None))]
    assert [part.num_decodes for part in parts] == [4, 2]
    assert [part.query_start for part in parts] == [[0, 1, 2, 3, 4], [0, 1, 2]]
    assert torch.cat([part.positions for part in parts]).tolist() == list(range(6))
    assert torch.cat([part.rows_device for part in parts]).tolist() == list(range(10, 16))
    for part in parts:
        assert part.block_table is inputs.block_table
        for name in ("input_ids", "slot_mapping", "seq_lens_device"):
            whole, view = getattr(inputs, name), getattr(part, name)
            assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert len(view) == part.num_decodes == len(part.rows) == len(part.seq_lens)


@pytest.mark.parametrize("size", [16, 24, 64, 80, 100, 256])
def test_halves_are_alike(size: int) -> None:
    ahead = rows_ahead(size)
    assert ahead % 8 == 0
    assert 0 <= ahead - (size - ahead) < 16


def test_models_with_small_layers_are_chosen() -> None:
    chosen = {name for name, config in MODELS.items() if side_by_side.is_worth(config)}
    assert chosen >= {"SmolLM2-135M", "Qwen2.5-0.5B fp16"}
    assert not chosen & {"Qwen2.5-7B", "Llama-3-8B fp8 cache", "Phi-3-mini", "Gemma-2-2B"}


def test_a_layers_bytes_are_those_of_its_matrices(model: Decoder) -> None:
    layer = model.layers[0]
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    weights = sum(rows * product.in_features for product in products for _, rows in product.sources)
    assert side_by_side.layer_bytes(model.spec) == 2 * weights


# --- what the halves of a step on a GPU are made of ---


class FakeStream:
    """Remembers what came after what."""

    def __init__(self, name: object = "side") -> None:
        self.name = name

    def wait_stream(self, other: "FakeStream") -> None:
        EVENTS.append((self.name, "waits", False))


EVENTS: list[tuple[object, str, bool]] = []  # stream, what, whether it may start early


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [FakeStream("main")]

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_90a")
    monkeypatch.setattr(paged_decode, "resident_blocks", lambda *_: 2)
    monkeypatch.setattr(paged, "plan_limits", limits_of)
    EVENTS.clear()

    def note(owner: type, name: str) -> None:
        function: Callable[..., object] = getattr(owner, name)

        def noted(*args, **kwargs) -> object:
            EVENTS.append((current[-1].name, name, jit.settings.dependent_launches))
            assert side_by_side.settings.leaves_room or not jit.settings.dependent_launches
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    note(PagedAttentionF32, "plan_on_device")
    note(PagedAttentionF32, "attend")
    note(DecoderLayer, "project")


def limits_of(heads, kv_heads, head_dim, kv_dtype, max_tokens, is_fixed, device, blocks=None):
    return PlanLimits(kv_heads, 132 * (blocks or 2), is_fixed, max_tokens)


def cache_of(model: Decoder) -> KVCache:
    spec = model.spec
    return allocate_kv_cache(
        spec.num_layers, 9, spec.num_kv_heads, 16, spec.head_dim, torch.float32, CPU
    )


def paged_attention(model: Decoder) -> paged.PagedAttention:
    return paged.PagedAttention(cache_of(model), distinct(model.attention_specs), 256, 512, CPU)


def tensors_of(value: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors that an object reaches, but for its KV cache."""
    if id(value) in seen or isinstance(value, KVCache):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(one, seen)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name), seen)
    elif isinstance(value, paged.PagedAttention):
        yield from tensors_of(vars(value), seen)


def test_halves_share_the_cache_and_nothing_that_is_written(model: Decoder, as_on_hopper) -> None:
    attention = paged_attention(model)
    steps = SplitSteps.make(model, attention, [1, 8, 64, 80, 256, 1024], CPU)
    assert steps is not None
    assert [steps.takes(size) for size in (1, 32, 64, 80, 256, 1024)] == [
        *(False, False),
        *(True, True, True),
        False,
    ]
    everyone = (attention, *steps.attentions)
    assert all(one.kv is attention.kv for one in everyone)
    owned = [
        {t.untyped_storage().data_ptr() for t in tensors_of(one, set())} - {0} for one in everyone
    ]
    assert all(len(one) >= 5 for one in owned)  # items and their number, parts of O, sums, arrivals
    assert len(set().union(*owned)) == sum(map(len, owned))
    assert [one.limits.slots for one in everyone] == [264, 132, 132]
    for one in steps.attentions:
        (plan,) = one.decode_plans.values()
        assert len(plan.items) == one.limits.max_items(128)
        assert one.limits.max_tokens == 512


@pytest.mark.parametrize(
    "why",
    ["switched off", "few rows", "another attention", "a large model", "no room", "another card"],
)
def test_other_steps_stay_whole(model: Decoder, as_on_hopper, monkeypatch, why: str) -> None:
    attention, sizes = paged_attention(model), [16, 64]
    match why:
        case "switched off":
            monkeypatch.setattr(split_steps, "IS_CHOSEN", False)
        case "few rows":
            sizes = [16, 32, 56]
        case "another attention":
            attention = PagedAttentionF32(attention.kv, model.spec.num_heads, CPU)
        case "a large model":
            monkeypatch.setattr(side_by_side, "MOST_LAYER_BYTES", 10_000)
        case "no room":
            monkeypatch.setattr(paged_decode, "resident_blocks", lambda *_: 1)
        case "another card":
            monkeypatch.setattr(jit, "device_arch", lambda device=None: "sm_80")
    assert SplitSteps.make(model, attention, sizes, CPU) is None


def test_launches_are_whole_where_streams_part_and_meet(
    model_dir, model: Decoder, as_on_hopper, monkeypatch
) -> None:
    graphs = gpu_like(model_dir, True).loop.runner.decode_graphs
    kv = cache_of(model)
    halves = tuple(PagedAttentionF32(kv, model.spec.num_heads, CPU) for _ in range(2))
    steps = SplitSteps(model, halves, FakeStream())
    note_product(model.layers[0].output, monkeypatch)
    note_product(model.norm, monkeypatch)
    monkeypatch.setattr(split_steps, "QUANTUM", 2)
    monkeypatch.setattr(jit.settings, "dependent_launches", True)
    EVENTS.clear()
    with torch.inference_mode():
        hidden = steps.forward(graphs.step_inputs(6))
    assert hidden.shape == (6, model.spec.hidden_size)
    assert jit.settings.dependent_launches
    main = [(what, early) for stream, what, early in EVENTS if stream == "main"]
    side = [(what, early) for stream, what, early in EVENTS if stream == "side"]
    layer = [("project", True), ("attend", True)]
    assert model.spec.num_layers == 2
    assert main == [
        *(("plan_on_device", False), *layer, ("output", False), *layer),
        *(("waits", False), ("norm", False)),
    ]
    assert side == [
        *(("waits", False), ("plan_on_device", False)),
        *(("waits", False), ("project", False), ("attend", False), ("output", True), *layer),
    ]
    assert not side_by_side.settings.leaves_room
    # the second half begins behind the first one's attention
    attended = EVENTS.index(("main", "attend", True))
    assert EVENTS[attended + 1] == ("side", "waits", False)
    assert EVENTS.index(("side", "project", False)) == attended + 2


def note_product(product, monkeypatch) -> None:
    """Note when a layer's output or the last norm is launched."""
    kind = type(product)
    name = "add_to" if hasattr(kind, "add_to") else "__call__"
    what = "output" if name == "add_to" else "norm"
    function = getattr(kind, name)

    def noted(self, *args):
        if self is product:
            stream = torch.cuda.current_stream().name
            EVENTS.append((stream, what, jit.settings.dependent_launches))
        return function(self, *args)

    monkeypatch.setattr(kind, name, noted)
