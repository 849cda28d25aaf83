"""Each optimisation is a claim: the same tokens as without it."""

import numpy as np
import pytest
import torch
import transformers

from engine.api.messages import FinishReason
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny

FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Path of a tiny random model by family name, made once."""
    made = {}

    def get(name: str):
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 90) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 512, rng.integers(low, high)).tolist() for _ in range(count)]


def reference_tokens(model_dir: str, prompt: list[int], count: int) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(tiny, family):
    harness = Harness(tiny(family))
    for i, prompt in enumerate(prompts(6, seed=1)):
        harness.add(i, prompt, max_tokens=24)
    results = harness.run()
    for i, prompt in enumerate(prompts(6, seed=1)):
        assert results[i].token_ids == reference_tokens(tiny(family), prompt, 24), i
        assert results[i].finish == FinishReason.LENGTH
    harness.assert_empty()


MIXED_PARAMS = [
    {},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 12},
    {"temperature": 1.2, "min_p": 0.05, "seed": 13},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 14},
    {"logit_bias": {7: 5.0, 9: -100.0}, "temperature": 0.7, "seed": 15},
    {"min_tokens": 10, "ignore_eos": False, "logit_bias": {2: 100.0}},
    {"stop_token_ids": list(range(100, 200)), "temperature": 1.0, "seed": 16},
]


def run_workload(model, *, count: int = 18, seed: int = 3, max_tokens: int = 40, **settings):
    """A workload with every kind of sampling; arrivals spread over the first steps."""
    harness = Harness(model, **settings)
    for i, prompt in enumerate(prompts(count, seed)):
        harness.add(i, prompt, **{"max_tokens": max_tokens, **MIXED_PARAMS[i % len(MIXED_PARAMS)]})
        if i % 3 == 0:
            harness.step()
    results = harness.run()
    harness.assert_empty()
    outcome = {i: (r.token_ids, r.finish, r.stop_token) for i, r in results.items()}
    return outcome, harness


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_overlap_equals_sequence(tiny, family):
    plain, _ = run_workload(tiny(family), overlap="off")
    overlapped, _ = run_workload(tiny(family), overlap="on")
    assert overlapped == plain
    assert any(finish == FinishReason.STOP for _, finish, _ in plain.values())


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_preempted_equals_undisturbed(tiny, family, overlap):
    plain, calm = run_workload(tiny(family), num_blocks=512)
    assert calm.scheduler.preemptions == 0
    disturbed, harness = run_workload(
        tiny(family), num_blocks=16, admission="greedy", overlap=overlap
    )
    assert harness.scheduler.preemptions > 5
    assert disturbed == plain


def test_peak_admission_equals_undisturbed_in_a_small_pool(tiny):
    plain, _ = run_workload(tiny("llama"), num_blocks=512)
    small, harness = run_workload(tiny("llama"), num_blocks=20, admission="peak")
    assert small == plain
    assert harness.scheduler.preemptions == 0


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_chunked_equals_whole_for_every_cut(tiny, family):
    prompt = prompts(1, seed=5, low=70, high=71)[0]
    params = {"max_tokens": 12, "logprobs": 3}
    whole = Harness(tiny(family), max_num_seqs=1, enable_prefix_caching=False).generate(
        prompt, **params
    )
    for budget in range(1, 71):  # chunks of every size: cuts at every position
        harness = Harness(
            tiny(family),
            max_num_seqs=1,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        chunked = harness.generate(prompt, **params)
        assert chunked.token_ids == whole.token_ids, budget
        np.testing.assert_allclose(chunked.logprobs, whole.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_prefix_hit_equals_cold(tiny, family):
    base = prompts(1, seed=6, low=100, high=101)[0]
    variants = [base, base[:64], base[:65], [*base[:50], 9, 8, 7], [*base, 5, 6], base[1:]]
    warm = Harness(tiny(family))
    expected_hits = [0, 48, 64, 48, 96, 0]
    for prompt, hit in zip(variants, expected_hits, strict=True):
        cold = Harness(tiny(family), enable_prefix_caching=False).generate(prompt, max_tokens=20)
        cached = warm.generate(prompt, max_tokens=20)
        assert cached.cached_tokens == hit
        assert cached.token_ids == cold.token_ids
    # a second turn finds the blocks of the first one's completion too
    first = warm.generate(base, max_tokens=20)
    second_prompt = base + first.token_ids + [11, 12]
    second = warm.generate(second_prompt, max_tokens=8)
    assert second.cached_tokens == 112  # of 100 + 19 computed tokens, in whole blocks
    assert (
        second.token_ids
        == Harness(tiny(family), enable_prefix_caching=False)
        .generate(second_prompt, max_tokens=8)
        .token_ids
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_alone_equals_in_a_batch_of_64_bitwise(tiny, dtype, threads):
    """Every token and every log-probability bit is the same alone as among 63 others."""
    settings = {
        "dtype": dtype,
        "cpu_threads": threads,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,  # whole prompts: a cut elsewhere sums in another order
        "num_blocks": 1024,
        "enable_prefix_caching": False,
        "check_invariants": False,
    }
    everyone = prompts(64, seed=7)
    params = [
        {"max_tokens": 24, "logprobs": 5, "temperature": 0.0 if i % 2 else 1.0, "seed": i}
        for i in range(64)
    ]
    together = Harness(tiny("llama"), **settings)
    for i, prompt in enumerate(everyone):
        together.add(i, prompt, **params[i])
    batch = together.run()
    alone = Harness(tiny("llama"), **settings)
    for i in range(0, 64, 7):
        single = alone.generate(everyone[i], **params[i])
        assert single.token_ids == batch[i].token_ids
        assert single.logprobs == batch[i].logprobs  # floats: equal bits
        assert single.top_logprobs == batch[i].top_logprobs


def test_aborts_at_every_moment_leave_nothing_behind(tiny):
    rng = np.random.default_rng(8)
    for overlap in ("off", "on"):
        harness = Harness(tiny("llama"), num_blocks=40, overlap=overlap, max_num_batched_tokens=70)
        everyone = prompts(120, seed=9)
        live: list[int] = []
        for i, prompt in enumerate(everyone):
            harness.add(i, prompt, max_tokens=int(rng.integers(1, 30)))
            live.append(i)
            for _ in range(int(rng.integers(0, 3))):
                harness.step()
            if rng.random() < 0.6:
                victim = live.pop(int(rng.integers(len(live))))
                harness.abort(victim, 999_999)
                harness.abort(victim)  # idempotent
        harness.run()
        harness.assert_empty()
        ends = [r.finish for r in harness.results.values() if r.rejected is None]
        assert None not in ends, "a request without a terminal message"
        assert FinishReason.ABORT in ends
        assert FinishReason.LENGTH in ends


def test_a_request_that_can_never_fit_is_refused_at_once(tiny):
    harness = Harness(tiny("llama"), num_blocks=8)
    harness.add(1, list(range(3, 203)), max_tokens=100)  # eight blocks hold 128 tokens
    harness.add(2, [5, 6, 7], max_tokens=4)
    results = harness.run()
    assert results[1].rejected == "context_length_exceeded"
    assert len(results[2].token_ids) == 4
    harness.assert_empty()
