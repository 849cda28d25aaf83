"""The whole engine on a GPU: against transformers in float32, and against itself."""

import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from engine.api.config import ConfigError
from engine.api.messages import FinishReason, TokenPieces
from engine.api.sampling import MAX_BIASES, StructuredOutput
from engine.models.config import ModelConfig
from engine.ops import jit
from engine.resolve import KV_DTYPES
from engine.weights.loader import load_model
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.test_fp8_cache import rounded_sequences, with_scales
from tests.engine_cpu.tiny_models import make_tiny
from tests.gpu.engine_cases import (
    SHAPE,
    build,
    check_against_transformers,
    forced_logprobs,
    prompts,
)
from tokenizer_proc.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name), **SHAPE)
        return made[name]

    return get


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_follows_transformers(tiny, family, enforce_eager):
    harness = build(tiny(family), enforce_eager=enforce_eager, max_num_batched_tokens=256)
    everyone = prompts(12, seed=1)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=24, logprobs=1)
    results = harness.run()
    check_against_transformers(tiny(family), everyone, results)
    harness.assert_empty()


def test_scored_prompts_follow_transformers(tiny):
    """Prompts longer than a step and than a slice of logits, among others that decode meanwhile."""
    harness = build(tiny("llama"), max_num_batched_tokens=256, max_num_seqs=32)
    everyone = prompts(12, seed=8, high=700)
    for i, prompt in enumerate(everyone):
        wanted = {"prompt_logprobs": i % 4} if i % 3 else {}
        harness.add(i, prompt, max_tokens=12 * (i % 4), **wanted)
    results = harness.run()
    ours, theirs = [], []
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for i, prompt in enumerate(everyone):
        found = results[i].prompt_logprobs
        assert len(found) == (len(prompt) - 1 if i % 3 else 0)
        assert len(results[i].token_ids) == 12 * (i % 4)
        if not found:
            continue
        with torch.inference_mode():
            logits = [model(torch.tensor([prompt])).logits[0, :-1].float() for model in models]
        tokens = torch.tensor(prompt[1:])[:, None]
        exact, rounded = (torch.log_softmax(x, -1).gather(1, tokens)[:, 0] for x in logits)
        ours.append(torch.tensor([value for value, _, _ in found]) - exact)
        theirs.append(rounded - exact)
        for value, rank, top in found:
            assert len(top) == i % 4
            values = [v for _, v in top]
            assert values == sorted(values, reverse=True)
            if rank <= len(top):
                assert values[rank - 1] == value
    ours_rms, theirs_rms = (float(torch.cat(e).square().mean().sqrt()) for e in (ours, theirs))
    assert ours_rms < 1.5 * theirs_rms + 0.005
    harness.assert_empty()


def run_all(harness: Harness, everyone: list[list[int]], **params: object) -> list[list[int]]:
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=40, **params)
    results = harness.run()
    harness.assert_empty()
    return [results[i].token_ids for i in range(len(everyone))]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "seed": 5}])
def test_overlap_equals_sequence_at_equal_batches(tiny, params):
    """All requests start together and end together, so every step has the same rows in both modes."""
    everyone = prompts(16, seed=2, low=20, high=21)
    runs = [
        run_all(build(tiny("llama"), overlap=mode), everyone, **params) for mode in ("on", "off")
    ]
    assert runs[0] == runs[1]


def test_graphs_equal_eager_at_a_graph_size(tiny):
    everyone = prompts(8, seed=3, low=20, high=21)  # a captured size: no padded rows
    runs = [run_all(build(tiny("llama"), enforce_eager=eager), everyone) for eager in (True, False)]
    assert runs[0] == runs[1]


def test_preempted_requests_lose_and_repeat_nothing(tiny):
    everyone = prompts(24, seed=4, low=50, high=200)
    harness = build(tiny("llama"), num_blocks=16, admission="greedy", block_size=64)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=150, logprobs=1)
    results = harness.run()
    assert harness.scheduler.preemptions > 0
    assert all(len(results[i].token_ids) == 150 for i in range(24))
    check_against_transformers(tiny("llama"), everyone, results)
    harness.assert_empty()


def test_chunked_and_cached_prompts_follow_transformers(tiny):
    everyone = prompts(6, seed=5, low=200, high=900)
    everyone += [[*p, 7, 8, 9] for p in everyone]  # prefixes of the second half are cached
    harness = build(tiny("qwen3"), max_num_batched_tokens=77)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=8, logprobs=1)
    results = harness.run()
    assert any((results[i].cached_tokens or 0) > 0 for i in range(6, 12))
    check_against_transformers(tiny("qwen3"), everyone, results)


# --- float32, for checking ---


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_float32_equals_transformers(tiny, family, enforce_eager):
    harness = build(
        tiny(family), dtype="float32", enforce_eager=enforce_eager, max_num_batched_tokens=256
    )
    everyone = prompts(8, seed=8)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=16, logprobs=1)
    results = harness.run()
    exact = forced_logprobs(tiny(family), torch.float32, everyone, results)
    for i in range(len(everyone)):
        tokens = torch.tensor(results[i].token_ids)[:, None]
        chosen = exact[i].gather(1, tokens)[:, 0]
        torch.testing.assert_close(torch.tensor(results[i].logprobs), chosen, rtol=0, atol=2e-3)
        assert (exact[i].max(-1).values - chosen < 2e-3).all(), f"request {i}: not greedy"
    harness.assert_empty()


# --- a KV cache of 8-bit floats ---


def rounded_cache_logprobs(model_dir, kv_dtype, everyone, results) -> list[torch.Tensor]:
    """Log-probabilities of the generated tokens in float32 arithmetic over a cache of `kv_dtype`."""
    config = ModelConfig.from_directory(str(model_dir))
    model = load_model(str(model_dir), config, torch.float32, torch.device("cpu"))
    chosen = []
    for i, prompt in enumerate(everyone):
        naive = rounded_sequences(model, kv_dtype, max_len=1024)
        logits = naive.run({0: prompt + results[i].token_ids})[0][len(prompt) - 1 : -1]
        tokens = torch.tensor(results[i].token_ids)[:, None]
        chosen.append(torch.log_softmax(logits, -1).gather(1, tokens)[:, 0])
    return chosen


def rms(errors: list[torch.Tensor]) -> float:
    return float(torch.cat(errors).square().mean().sqrt())


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("has_scales", [False, True])
def test_fp8_cache_follows_float32_over_the_same_cache(
    tiny, tmp_path, kv_cache_dtype, has_scales, enforce_eager
):
    """Teacher-forced. Rounding a number in bfloat16 before it is rounded to 8 bits moves a few of them
    by a whole step, so some of the error that 8 bits make is allowed, besides transformers' own."""
    model_dir = tiny("qwen3")
    if has_scales:
        scales = {"k_scale": torch.tensor(0.0625), "v_scale": torch.tensor(0.25)}
        model_dir = with_scales(model_dir, tmp_path / "scaled", **scales)
    harness = build(
        model_dir,
        kv_cache_dtype=kv_cache_dtype,
        enforce_eager=enforce_eager,
        max_num_batched_tokens=256,
    )
    everyone = prompts(10, seed=9)
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=16, logprobs=1)
    results = harness.run()
    harness.assert_empty()
    coarse = rounded_cache_logprobs(model_dir, KV_DTYPES[kv_cache_dtype], everyone, results)
    plain = tiny("qwen3")  # transformers knows no scales
    exact = forced_logprobs(plain, torch.float32, everyone, results)
    rounded = forced_logprobs(plain, torch.bfloat16, everyone, results)
    tokens = [torch.tensor(results[i].token_ids)[:, None] for i in range(len(everyone))]
    exact, rounded = (
        [one.gather(1, t)[:, 0] for one, t in zip(many, tokens, strict=True)]
        for many in (exact, rounded)
    )
    got = [torch.tensor(results[i].logprobs) for i in range(len(everyone))]
    ours = rms([a - b for a, b in zip(got, coarse, strict=True)])
    theirs = rms([a - b for a, b in zip(rounded, exact, strict=True)])
    of_8_bits = rms([a - b for a, b in zip(coarse, exact, strict=True)])
    whole = rms([a - b for a, b in zip(got, exact, strict=True)])
    print(
        f"error of log-probabilities: ours {ours:.4f}, of 8 bits {of_8_bits:.4f}, both {whole:.4f}; "
        f"transformers in bfloat16 {theirs:.4f}"
    )
    assert ours < 2 * theirs + 0.5 * of_8_bits + 0.005
    assert whole < 1.5 * (theirs + of_8_bits) + 0.005


def test_fp8_cache_mostly_gives_the_same_first_tokens(tiny):
    everyone = prompts(32, seed=10)
    first = [
        [tokens[0] for tokens in run_all(build(tiny("llama"), kv_cache_dtype=kind), everyone)]
        for kind in ("auto", "fp8")
    ]
    equal = sum(a == b for a, b in zip(*first, strict=True))
    print(f"{equal} of 32 first tokens are equal")
    assert equal >= 16  # random weights: many near-ties


def test_fp8_cache_preempts_chunks_and_finds_prefixes(tiny):
    everyone = prompts(24, seed=11, low=50, high=200)
    harness = build(
        tiny("llama"),
        kv_cache_dtype="fp8",
        num_blocks=16,
        admission="greedy",
        block_size=64,
        max_num_batched_tokens=77,
    )
    for i, prompt in enumerate(everyone):
        harness.add(i, prompt, max_tokens=60)
    results = harness.run()
    assert harness.scheduler.preemptions > 0
    assert all(len(results[i].token_ids) == 60 for i in range(24))
    harness.assert_empty()


def test_fp8_halves_a_token(tiny):
    plain, coarse = (build(tiny("llama"), kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    sizes = [h.engine.resolved.block_bytes // h.block_size for h in (plain, coarse)]
    assert sizes == [2 * 2 * 2 * 64 * 2, 2 * 2 * 2 * 64]  # k and v, layers, KV heads, D, bytes


# --- memory and kernels ---


def test_the_account_of_memory_holds_the_sampling_tables(tiny):
    harness = build(tiny("llama"), num_blocks=0, max_num_seqs=16, gpu_memory_utilization=0.2)
    memory = harness.engine.gpu_memory
    assert memory.sampling_tables == 17 * (512 * 2 + MAX_BIASES * 8)
    rows = memory.rows()
    assert sum(size for _, size in rows) == memory.total
    print("\n".join(f"{size / 2**30:8.3f} GiB  {what}" for what, size in rows))


def test_too_small_a_share_of_memory_is_refused_with_figures(tiny):
    with pytest.raises(ConfigError, match="no memory is left for the KV cache") as caught:
        build(tiny("llama"), num_blocks=0, gpu_memory_utilization=0.0001)
    assert caught.value.exit_code == 75


def test_running_out_of_memory_at_the_start_gives_advice(tiny):
    """As if others held nearly all: torch may take less than a full step needs."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**23) / total)
    try:
        with pytest.raises(ConfigError, match="out of memory while") as caught:
            build(tiny("llama"), max_num_batched_tokens=65_536)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert caught.value.exit_code == 75


def test_a_step_without_memory_fails_alone(tiny):
    harness = build(tiny("llama"), enforce_eager=True)
    everyone = prompts(4, seed=12, low=50, high=51)
    alone = harness.generate(everyone[0], max_tokens=8).token_ids
    launch, calls = harness.loop.runner.launch, []

    def full(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(plan)

    harness.loop.runner.launch = full
    for i in (101, 102):
        harness.add(i, everyone[i - 101], max_tokens=8)
    results = harness.run()
    assert [results[i].finish for i in (101, 102)] == [FinishReason.ERROR] * 2
    assert harness.loop.failed_steps == 1
    assert harness.generate(everyone[0], max_tokens=8).token_ids == alone
    harness.assert_empty()


SERVE_WITHOUT_COMPILING = """
import sys
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.test_equalities import MIXED_PARAMS
harness = Harness(
    sys.argv[1], dtype="bfloat16", device="cuda", num_blocks=512, max_num_seqs=64, require_cached=True
)
for i, params in enumerate(MIXED_PARAMS * 3):
    harness.add(i, list(range(3, 40 + 9 * i)), logprobs=i % 3, **params)
assert all(result.finish is not None for result in harness.run().values())
print("served")
"""


def test_what_the_list_of_kernels_has_is_all_that_serving_needs(tiny):
    """In a process of its own, where nothing is loaded yet."""
    build(tiny("qwen3"))  # compiles
    command = [sys.executable, "-c", SERVE_WITHOUT_COMPILING, str(tiny("qwen3"))]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.endswith("served\n"), done.stderr[-3000:]


def test_required_kernels_must_be_in_the_cache(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.settings, "require_cached", False)  # to be put back at the end
    monkeypatch.setattr(jit.settings, "cache_dir", tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"kernels are not in .*--require-cached") as caught:
        build(tiny("llama"), require_cached=True)
    assert caught.value.exit_code == 75


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_constraints_on_the_device(tiny, enforce_eager, dtype):
    """Masks of grammars, allowed ids and bad words, overlapped and in sequence, in a mixed batch.

    Overlapped, rows wait for their masks while others go on, so batches differ, and with them the last bits
    of a bfloat16 model's logits: equal draws are asked of float32 only.
    """
    model = tiny("llama")
    vocabulary = Vocabulary(transformers.AutoTokenizer.from_pretrained(model), 512)
    pieces, special = vocabulary.everything.pieces, sorted(vocabulary.special_ids)
    regex = StructuredOutput("regex", "[a-f]{3,20}-[0-9]{3}")
    outcomes = []
    for overlap in ("on", "off"):
        harness = build(model, overlap=overlap, enforce_eager=enforce_eager, dtype=dtype)
        harness.loop.take([TokenPieces(pieces=pieces, special_ids=special)])
        for i, prompt in enumerate(prompts(16, seed=3, high=60)):
            constraint = (
                {"structured": regex},
                {"allowed_token_ids": [40, 77, 511]},
                {"bad_word_ids": [[i] for i in range(300)]},
                {},
            )[i % 4]
            draw = {"temperature": 1.0, "seed": i, "logprobs": 2}
            harness.add(i + 1, prompt, max_tokens=60, **draw, **constraint)
        results = harness.run()
        outcomes.append({i: results[i].token_ids for i in results})
        for i in range(1, 17, 4):
            text = b"".join(pieces[t] for t in results[i].token_ids).decode()
            assert results[i].finish is FinishReason.STOP
            assert re.fullmatch("[a-f]{3,20}-[0-9]{3}", text), text
            assert set(results[i + 1].token_ids) <= {40, 77, 511}
            assert min(results[i + 2].token_ids) >= 300
            assert results[i + 3].finish is FinishReason.LENGTH
        assert harness.loop.nan_events == 0
    assert dtype == "bfloat16" or outcomes[0] == outcomes[1]
