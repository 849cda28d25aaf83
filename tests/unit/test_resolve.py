"""Every `auto` is decided with a reason; what cannot work is refused by name."""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from engine.api.config import ConfigError, EngineConfig
from engine.build_gpu import check_kernels_fit, graph_reserve, kernel_config
from engine.memory import GIB, GpuMemory, kv_block_bytes
from engine.models.config import ModelConfig
from engine.ops.kernel_list import kernel_specs
from engine.ops.plan_decode import MAX_BATCH
from engine.resolve import decide_num_blocks, resolve
from engine.runner.decode_graphs import graph_sizes
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


def test_a_budget_that_follows_max_num_seqs_says_so(model):
    for seqs, budget, reason in ((512, 512, "keeps steps short"), (513, 513, "--max-num-seqs")):
        resolved = resolve(EngineConfig(device="cpu", max_num_seqs=seqs), model)
        assert resolved.max_num_batched_tokens == budget
        assert reason in resolved.reasons["max_num_batched_tokens"]


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
    assert caught.value.exit_code == 2, "flags alone say so: a retry changes nothing"


def test_too_few_blocks_are_a_wrong_command_and_what_it_offers_does(model):
    """Not 75: nothing changes when it is started again."""

    def size(**settings):
        config = EngineConfig(device="cpu", dtype="float32", **settings)
        decide_num_blocks(resolve(config, model), config, model)

    for few in ({"num_blocks": 1}, {"kv_cache_gib": 1e-9}, {"kv_cache_gib": 1e-5}):
        with pytest.raises(ConfigError) as caught:
            size(**few)
        assert caught.value.exit_code == 2
        message = str(caught.value)
        offered = dict(re.findall(r"--(num-blocks|kv-cache-gib|max-model-len) ([\d.]+)", message))
        if length := offered.pop("max-model-len", ""):
            size(**few, max_model_len=length)
        for flag, value in offered.items():
            size(**{flag.replace("-", "_"): type(next(iter(few.values())))(value)})
        assert offered
    with pytest.raises(ConfigError, match=r"--num-blocks 32 \(2 or more for shorter requests\)"):
        size(num_blocks=1)
    size(num_blocks=2)


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


# --- a GPU's decisions, as if there were one ---


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    properties = SimpleNamespace(total_memory=140 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def test_kv_cache_dtype_follows_the_model_or_the_flag(model, hopper):
    auto = resolve(EngineConfig(dtype="float16"), model)
    assert auto.kv_dtype is torch.float16
    fp8 = {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
    for name, dtype in fp8.items():
        config = EngineConfig(dtype="float16", kv_cache_dtype=name, num_blocks=100)
        resolved = resolve(config, model)
        assert (resolved.kv_dtype, resolved.reasons["kv_dtype"]) == (dtype, "flag")
        assert kv_block_bytes(model, 16, dtype) * 2 == kv_block_bytes(model, 16, auto.dtype)


def test_float32_on_a_gpu_is_taken_only_when_asked_for(model, hopper):
    assert model.dtype == "float32"
    assert resolve(EngineConfig(), model).dtype is torch.bfloat16
    asked = resolve(EngineConfig(dtype="float32"), model)
    assert (asked.dtype, asked.kv_dtype) == (torch.float32, torch.float32)
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: with --dtype float32"):
        resolve(EngineConfig(dtype="float32", kv_cache_dtype="fp8"), model)
    with pytest.raises(ConfigError, match="--block-size 8: a GPU"):
        resolve(EngineConfig(block_size=8), model)


def test_a_large_gpu_runs_more_requests_at_once(model, hopper):
    large = resolve(EngineConfig(), model)
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert "64 GiB or more" in large.reasons["max_num_seqs"]
    assert large.max_num_seqs <= MAX_BATCH
    cuda, config = torch.device("cuda"), EngineConfig(block_size=16)
    for gib, seqs in ((24, 256), (63.9, 256), (64, 1024)):
        there = resolve(config, model, elsewhere=cuda, elsewhere_bytes=int(gib * GIB))
        assert there.max_num_seqs == seqs
    bounded = resolve(EngineConfig(max_num_batched_tokens=512), model)
    assert (bounded.max_num_seqs, bounded.max_num_batched_tokens) == (512, 512)
    assert "--max-num-batched-tokens" in bounded.reasons["max_num_seqs"]
    assert resolve(EngineConfig(max_num_seqs=300), model).reasons["max_num_seqs"] == "flag"


def test_the_reserve_for_graphs_follows_model_and_batch(model, hopper):
    def reserve(shape, **settings):
        config = EngineConfig(**settings)
        return graph_reserve(config, shape, resolve(config, shape), weights=2 << 20)

    assert reserve(model, enforce_eager=True) == 0
    small = reserve(model, max_num_seqs=8)
    assert small < GIB // 4, "a small card with a small model needs little"
    wide = replace(model, vocab_size=152_064)
    more = 1024 * (152_064 - model.vocab_size) * 4
    assert reserve(wide) - reserve(model) == more, "the float32 logits of all rows"
    sizes = len(graph_sizes(1024)) - len(graph_sizes(8))
    assert reserve(model) - small > sizes * 2**20
    deep, graphs = replace(model, num_layers=80), len(graph_sizes(8))
    assert reserve(deep, max_num_seqs=8) - small > graphs * 2**21, "nodes of 56 layers more"


def test_graphs_pad_few_rows():
    sizes = graph_sizes(1024)
    assert len(sizes) == 39
    assert sizes[0] == 1
    assert sizes[-1] == 1024
    for smaller, size in pairwise(sizes):
        assert smaller < size
        assert size - smaller <= max(8, size / 4), "few rows cost little: a step reads all weights"
        assert size < 257 or size - smaller <= size / 8, "from here on a step grows with its rows"
    assert graph_sizes(300)[-2:] == [288, 300]
    assert graph_sizes(1) == [1]


def test_shapes_that_no_kernel_takes_are_refused(model, hopper):
    resolved = resolve(EngineConfig(), model)
    check_kernels_fit(model, resolved)
    for change, words in (
        ({"head_dim": 40}, "head_dim is 40.*--dtype float32"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"vocab_size": 2**20}, "vocab_size is 1048576"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_kernels_fit(replace(model, **change), resolved)
    resolved.dtype = torch.float32
    check_kernels_fit(replace(model, head_dim=40), resolved)


def test_soft_caps_of_a_model_select_its_kernels(model):
    plain = kernel_config(model, torch.bfloat16, torch.bfloat16, 16)
    assert plain.softcaps == (False,)
    specs = kernel_specs(replace(plain, softcaps=(True,)))
    capped = [s.source for s in specs if "SOFTCAP" in s.defines]
    assert set(capped) == {
        "paged_decode.cu",
        "paged_prefill.cu",
    }  # no Hopper kernel for heads of 16
    assert len(specs) == len(kernel_specs(plain))


def test_blocks_that_were_asked_for_need_no_share_of_memory():
    """Two servers on one GPU: each takes what it was told, if it is free (`check_cache_fits`)."""
    asked, automatic = EngineConfig(num_blocks=64), EngineConfig()
    memory = GpuMemory(1000, others=700, weights=150, activations=40, graphs=30)
    with pytest.raises(ConfigError, match="give --num-blocks"):
        memory.for_cache(automatic)
    assert memory.for_cache(asked) == 900 - 700 - 150 - 40 - 30
    memory.kv_cache = 60
    rows = dict(memory.rows())
    assert rows["left free (--gpu-memory-utilization)"] == 20, (
        "the others and the cache took the rest"
    )
    assert rows["unaccounted"] == 0
    assert sum(rows.values()) == memory.total
    alone = GpuMemory(1000, others=10, weights=150, activations=40)
    assert alone.for_cache(asked) == alone.for_cache(automatic) == 700
    assert dict(alone.rows())["left free (--gpu-memory-utilization)"] == 100


def test_the_account_of_a_gpus_memory_sums_to_the_whole():
    memory = GpuMemory(1000, 10, 300, 50, kv_cache=400, graphs=7, reserve=100, sampling_tables=20)
    rows = dict(memory.rows())
    assert sum(rows.values()) == 1000
    assert rows["unaccounted"] == 1000 - 10 - 300 - 50 - 400 - 7 - 100 - 20


def test_a_cache_without_a_block_is_not_answered_by_a_length(model):
    config = EngineConfig(device="cpu", kv_cache_gib=1e-9, max_model_len="16")
    resolved = resolve(config, model)
    with pytest.raises(ConfigError, match=r"\(0 blocks\) are available; fits with --kv-cache-gib"):
        decide_num_blocks(resolved, config, model)
