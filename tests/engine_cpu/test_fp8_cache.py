"""A KV cache of 8-bit floats on the CPU: scales, accuracy, and the equalities that any cache must keep."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api.config import ConfigError
from engine.attention.base import AttentionSpec, KVCache, allocate_kv_cache
from engine.attention.reference import ReferenceAttention
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.ops.rope_and_cache import quantized
from engine.weights.loader import load_model
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.naive_attention import NaiveAttention, Sequences
from tests.engine_cpu.test_attention import make_cache, make_inputs, oracle
from tests.engine_cpu.test_equalities import MIXED_PARAMS, prompts, run_workload
from tests.engine_cpu.tiny_models import copy_model, make_tiny

CPU = torch.device("cpu")
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> str:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


# --- attention ---


@pytest.mark.parametrize("kv_dtype", DTYPES.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("runs", [False, True])  # consecutive blocks are read another way
def test_attention_reads_what_is_stored(kv_dtype, dtype, window, runs) -> None:
    """Exactly the attention over the cached numbers times their scales, in float32."""
    scales = (0.5, 3.0)
    spec = AttentionSpec(6, 2, 32, 32**-0.5, window)
    stored = make_cache(spec, torch.float32)
    kv = KVCache(
        *([quantized(t, kv_dtype, s) for t in tensors] for tensors, s in zip((stored.k, stored.v), scales, strict=True)),
        stored.block_size,
        [scales],
    )  # fmt: skip
    exact = KVCache(
        [t.float() * scales[0] for t in kv.k], [t.float() * scales[1] for t in kv.v], kv.block_size
    )
    for lens, queries in (([70, 5, 128, 33], [1] * 4), ([90], [90]), ([20, 150], [1, 100])):
        inputs = make_inputs(lens, queries, seed=1, runs=runs)
        q = torch.randn(len(inputs.positions), 6, 32).to(dtype)
        attention = ReferenceAttention(kv, dtype)
        attention.plan(inputs, [spec])
        got = attention.attend(0, q, spec, inputs)
        want = oracle(exact, q.float(), spec, inputs)
        assert got.dtype is dtype
        tolerance = 1e-5 if dtype is torch.float32 else 0.03
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kv_dtype", DTYPES.values())
def test_scrubbing_leaves_all_finite_numbers(kv_dtype) -> None:
    kv = allocate_kv_cache(1, 3, 2, 16, 8, kv_dtype, CPU)
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    kv.k[0].transpose(0, 1)[0].view(torch.uint8).view(-1)[:256] = codes.view(torch.uint8)
    kv.scrub()
    got = kv.k[0].transpose(0, 1)[0].reshape(-1)[:256].float()
    want = torch.nan_to_num(codes.float(), nan=0.0, posinf=0.0, neginf=0.0)
    assert torch.equal(got, want)


# --- scales of a checkpoint ---


def with_scales(source: str, path: Path, **scales: torch.Tensor) -> Path:
    """A copy of the model whose layer 1 has these tensors beside its attention's weights."""
    directory = copy_model(source, path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors |= {
        f"model.layers.1.self_attn.{name.replace('__', '.')}": t for name, t in scales.items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def loaded_scales(directory: Path) -> list[tuple[float, float]]:
    config = ModelConfig.from_directory(str(directory))
    return load_model(str(directory), config, torch.float32, CPU).kv_scales


def test_scales_come_from_the_checkpoint(llama, tmp_path) -> None:
    assert loaded_scales(Path(llama)) == [(1.0, 1.0), (1.0, 1.0)]
    plain = with_scales(
        llama, tmp_path / "a", k_scale=torch.tensor(0.25), v_scale=torch.ones(1) * 2
    )
    assert loaded_scales(plain) == [(1.0, 1.0), (0.25, 2.0)]
    scales = {"k_proj__k_scale": torch.tensor([0.5, 4.0]), "v_proj__v_scale": torch.tensor(0.5)}
    assert loaded_scales(with_scales(llama, tmp_path / "b", **scales)) == [(1.0, 1.0), (4.0, 0.5)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_divided_by_is_refused(llama, tmp_path, value) -> None:
    damaged = with_scales(llama, tmp_path / "a", k_scale=torch.tensor(value))
    with pytest.raises(ConfigError, match=r"layers\.1\.self_attn\.k_scale .* positive number"):
        loaded_scales(damaged)


def test_the_engine_uses_the_scales_for_8_bits_only(llama, tmp_path) -> None:
    """Values beyond the range of the format are clamped, unless a scale brings them within."""
    directory = with_scales(llama, tmp_path / "a", v_scale=torch.tensor(2.0**-12))
    prompt = prompts(1, seed=3, low=40, high=41)[0]
    plain = Harness(llama).generate(prompt, logprobs=1)
    ignored = Harness(directory).generate(prompt, logprobs=1)
    assert (ignored.token_ids, ignored.logprobs) == (plain.token_ids, plain.logprobs)
    clamped = Harness(directory, kv_cache_dtype="fp8").generate(prompt, logprobs=1)
    good = Harness(llama, kv_cache_dtype="fp8").generate(prompt, logprobs=1)
    assert clamped.logprobs[0] != good.logprobs[0]  # 448 / 4096: no value is larger


# --- the engine ---


class RoundedAttention(NaiveAttention):
    """Over a cache of 8-bit floats, times its scales."""

    def attend(self, layer, q, spec, inputs):
        k_scale, v_scale = self.kv.scales_of(layer)
        k, v = self.kv.k[layer].float() * k_scale, self.kv.v[layer].float() * v_scale
        return NaiveAttention(KVCache([k], [v], self.kv.block_size)).attend(0, q, spec, inputs)


def rounded_sequences(
    model: Model, kv_dtype: torch.dtype, max_len: int = 256, num_sequences: int = 1
) -> Sequences:
    """A float32 model on a CPU, with the plainest attention over keys and values of `kv_dtype`."""
    sequences = Sequences(model, num_sequences, max_len)
    plain = sequences.attention.kv
    sequences.attention = RoundedAttention(
        KVCache(
            [k.to(kv_dtype) for k in plain.k],
            [v.to(kv_dtype) for v in plain.v],
            plain.block_size,
            model.kv_scales,
        )
    )
    return sequences


@pytest.mark.parametrize("kv_cache_dtype", DTYPES)
def test_log_probabilities_are_those_of_the_rounded_cache(llama, kv_cache_dtype) -> None:
    """Against the same model with the plainest attention over numbers rounded to 8 bits, and in the
    vicinity of float32. Wide random weights make the latter's errors larger than a trained model's."""
    exact, coarse = Harness(llama), Harness(llama, kv_cache_dtype=kv_cache_dtype)
    assert coarse.engine.resolved.kv_dtype is DTYPES[kv_cache_dtype]
    assert exact.engine.resolved.block_bytes == 4 * coarse.engine.resolved.block_bytes
    naive = rounded_sequences(coarse.loop.runner.model, DTYPES[kv_cache_dtype])
    differences, equal = [], 0
    for prompt in prompts(16, seed=5, low=10, high=120):
        got = coarse.generate(prompt, max_tokens=6, logprobs=1)
        naive.lengths = [0]
        logits = naive.run({0: prompt + got.token_ids})[0][len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        want = logprobs.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(got.logprobs), want, rtol=0, atol=2e-3)
        true = exact.generate(prompt, max_tokens=1, logprobs=20)
        equal += got.token_ids[0] == true.token_ids[0]
        differences.append(
            abs(dict(true.top_logprobs[0]).get(got.token_ids[0], -9) - got.logprobs[0])
        )
    print(f"{kv_cache_dtype}: {equal} of 16 equal, mean difference {sum(differences) / 16:.3f}")
    assert equal >= 7
    assert sum(differences) / 16 < (0.6 if kv_cache_dtype == "fp8_e4m3" else 1.2)


def workload(model, **settings):
    return run_workload(model, count=len(MIXED_PARAMS), kv_cache_dtype="fp8", **settings)


def test_equalities_hold_with_8_bits_as_well(llama) -> None:
    plain, calm = workload(llama, num_blocks=512)
    assert calm.scheduler.preemptions == 0
    overlapped, _ = workload(llama, overlap="on")
    assert overlapped == plain
    disturbed, pressed = workload(llama, num_blocks=16, admission="greedy")
    assert pressed.scheduler.preemptions > 0
    assert disturbed == plain
    chunked, _ = workload(llama, max_num_batched_tokens=64, max_num_seqs=16)
    assert chunked == plain


def test_a_cached_prefix_equals_a_cold_one(llama) -> None:
    harness = Harness(llama, kv_cache_dtype="fp8_e5m2")
    prompt = prompts(1, seed=9, low=80, high=81)[0]
    cold, warm = harness.generate(prompt), harness.generate(prompt)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 64)
    assert warm.token_ids == cold.token_ids
