"""The whole engine on a GPU: against transformers in float32, and against itself."""

import numpy as np
import pytest
import torch
import transformers

from engine.api.messages import FinishReason
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny

pytestmark = pytest.mark.gpu

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made = {}

    def get(name: str) -> str:
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name), **SHAPE)
        return made[name]

    return get


def build(model: str, **settings: object) -> Harness:
    defaults = {"dtype": "bfloat16", "device": "cuda", "num_blocks": 512, "max_num_seqs": 64}
    return Harness(model, **{**defaults, **settings})


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 512, rng.integers(low, high)).tolist() for _ in range(count)]


def forced_logprobs(model_dir, dtype, everyone, results) -> list[torch.Tensor]:
    """transformers' log-probabilities of every token at each generated position, [steps, vocab]."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    out = []
    with torch.inference_mode():
        for i, prompt in enumerate(everyone):
            logits = reference(torch.tensor([prompt + results[i].token_ids])).logits
            out.append(torch.log_softmax(logits[0, len(prompt) - 1 : -1].float(), -1))
    return out


def check_against_transformers(model_dir, everyone, results):
    """Our error against float32 is no larger than transformers' own in bfloat16, give or take.

    Teacher-forced: both are asked for the log-probabilities of what this engine generated. With random
    weights errors are large; a wrong index or mask makes them many times larger still.
    """
    exact = forced_logprobs(model_dir, torch.float32, everyone, results)
    rounded = forced_logprobs(model_dir, torch.bfloat16, everyone, results)
    ours, theirs = [], []
    for i in range(len(everyone)):
        tokens = torch.tensor(results[i].token_ids)[:, None]
        chosen = exact[i].gather(1, tokens)[:, 0]
        ours.append(torch.tensor(results[i].logprobs) - chosen)
        theirs.append(rounded[i].gather(1, tokens)[:, 0] - chosen)
        assert (exact[i].max(-1).values - chosen < 2.0).all(), f"request {i}: an unlikely token"
    ours_rms, theirs_rms = (float(torch.cat(e).square().mean().sqrt()) for e in (ours, theirs))
    print(
        f"error of log-probabilities: ours {ours_rms:.4f}, transformers in bfloat16 {theirs_rms:.4f}"
    )
    assert ours_rms < 1.5 * theirs_rms + 0.005


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


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_two_thousand_random_requests_with_aborts(tiny, overlap):
    rng = np.random.default_rng(6)
    harness = build(tiny("llama"), num_blocks=200, overlap=overlap, check_invariants=False)
    live: list[int] = []
    wanted = {}
    for i, prompt in enumerate(prompts(1000, seed=7, high=120)):
        wanted[i] = int(rng.integers(1, 60))
        sampling = {"temperature": 1.0, "seed": i} if i % 2 else {}
        harness.add(i, prompt, max_tokens=wanted[i], **sampling)
        live.append(i)
        if rng.random() < 0.3:
            harness.step()
        if rng.random() < 0.2:
            harness.abort(live.pop(int(rng.integers(len(live)))))
    results = harness.run()
    harness.assert_empty()
    ends = [r.finish for r in results.values()]
    assert set(ends) == {FinishReason.LENGTH, FinishReason.ABORT}
    for i, result in results.items():
        if result.finish == FinishReason.LENGTH:
            assert len(result.token_ids) == wanted[i]
            assert all(0 <= token < 512 for token in result.token_ids)
