"""Every `auto` is decided with a reason; what cannot work is refused by name."""

from dataclasses import replace

import pytest
import torch

from engine.api.config import ConfigError, EngineConfig
from engine.models.config import ModelConfig
from engine.resolve import decide_num_blocks, resolve
from tests.engine_cpu.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ModelConfig.from_directory(make_tiny("llama", tmp_path_factory.mktemp("tiny")))


def test_defaults_have_reasons(model):
    resolved = resolve(EngineConfig(), model)
    decide_num_blocks(resolved, EngineConfig(), model)
    assert resolved.max_model_len == model.max_model_len == 512
    assert resolved.threads >= 1
    assert resolved.num_blocks > 512 // resolved.block_size
    for name in ("dtype", "threads", "max_model_len", "max_num_seqs", "overlap", "num_blocks"):
        assert resolved.reasons[name]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": "100k"}, ["--max-model-len", "512"]),
        ({"max_model_len": "many"}, ["--max-model-len", "many"]),
        ({"max_model_len": "1"}, ["--max-model-len 1:", "2 or more"]),
        ({"dtype": "float16"}, ["float16", "bfloat16"]),
        ({"block_size": 17}, ["--block-size", "16"]),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, ["--max-num-batched-tokens", "64"]),
        ({"max_num_seqs": -1}, ["--max-num-seqs"]),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            ["--no-enable-chunked-prefill", "512"],
        ),
        ({"cpu_threads": -2}, ["--cpu-threads"]),
        ({"cpu_threads": 100_000}, ["--cpu-threads 100000", "1024"]),
        ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}, ["--max-num-seqs 1000000000"]),
        ({"max_num_batched_tokens": 10**9}, ["--max-num-batched-tokens 1000000000"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(model, settings, words):
    with pytest.raises(ConfigError) as caught:
        resolve(EngineConfig(**settings), model)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


def test_max_model_len_shrinks_to_the_cache_only_if_auto(model):
    resolved = resolve(EngineConfig(), model)
    decide_num_blocks(resolved, EngineConfig(num_blocks=10), model)
    assert resolved.max_model_len == 160
    assert "shortened" in resolved.reasons["max_model_len"]
    fixed = EngineConfig(num_blocks=10, max_model_len="512")
    resolved = resolve(fixed, model)
    with pytest.raises(ConfigError, match="--max-model-len 160") as caught:
        decide_num_blocks(resolved, fixed, model)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize(
    ("settings", "words", "code"),
    [
        ({"num_blocks": 10**12}, "--num-blocks 1000000000000: expected", 2),
        ({"kv_cache_gib": 1e9}, "--kv-cache-gib 1000000000.0: expected", 2),
        ({"kv_cache_gib": float("nan")}, "--kv-cache-gib nan: expected", 2),
        ({"num_blocks": 2 * 10**9}, r"--num-blocks 2000000000: .* GiB, and .* GiB are free", 75),
        ({"kv_cache_gib": 1e6}, r"--kv-cache-gib 1e\+06: .* 1000000.00 GiB, and .* are free", 75),
    ],
)
def test_a_cache_beyond_the_machine_is_refused_with_the_figures(model, settings, words, code):
    config = EngineConfig(device="cpu", **settings)
    with pytest.raises(ConfigError, match=words) as caught:
        decide_num_blocks(resolve(config, model), config, model)
    assert caught.value.exit_code == code


def test_model_of_one_position_is_refused(model):
    with pytest.raises(ConfigError, match="max_position_embeddings") as caught:
        resolve(EngineConfig(), replace(model, max_model_len=1))
    assert caught.value.exit_code == 2


def test_dtype_flag_wins(model):
    assert resolve(EngineConfig(dtype="float32"), model).dtype is torch.float32
    assert resolve(EngineConfig(dtype="bfloat16"), model).dtype is torch.bfloat16
