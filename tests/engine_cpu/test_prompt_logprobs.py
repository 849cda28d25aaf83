"""Log-probabilities of prompts: those of transformers, however the prompt came to be computed."""

import weakref

import numpy as np
import pytest
import torch
import transformers

from engine.api.messages import FinishReason
from engine.plan import PromptSpan
from engine.runner.prompt_logprobs import score_prompts
from engine.runner.sampler import Sampler
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.tiny_models import make_tiny

TOLERANCE = 2e-4
VOCAB = 512


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model_dir):
    """Log-probabilities of the whole vocabulary before each token of a prompt, by transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    @torch.inference_mode()
    def logprobs(prompt: list[int]) -> np.ndarray:  # [len(prompt), VOCAB]
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1).numpy()

    return logprobs


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def check(found, prompt, reference, k):
    """All of a prompt, each with its rank and the k best."""
    assert len(found) == len(prompt) - 1
    expected = reference(prompt)
    for position, (value, rank, top) in enumerate(found):
        row, token = expected[position], prompt[position + 1]
        assert value == pytest.approx(row[token], abs=TOLERANCE)
        higher = int((row > row[token] + TOLERANCE).sum())
        not_lower = int((row > row[token] - TOLERANCE).sum())  # itself included
        assert higher < rank <= not_lower
        assert len(top) == k
        np.testing.assert_allclose([v for _, v in top], np.sort(row)[::-1][:k], atol=TOLERANCE)
        np.testing.assert_allclose([v for _, v in top], row[[i for i, _ in top]], atol=TOLERANCE)
        if rank <= k:
            assert top[rank - 1] == (token, value)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 150])
def test_equal_to_transformers(model_dir, reference, length, budget, overlap):
    """150 tokens are more than one slice of logits."""
    harness = Harness(model_dir, max_num_batched_tokens=budget, max_num_seqs=4, overlap=overlap)
    prompt = prompt_of(length)
    result = harness.generate(prompt, prompt_logprobs=5, max_tokens=3)
    check(result.prompt_logprobs, prompt, reference, 5)
    assert len(result.token_ids) == 3
    harness.assert_empty()


@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_a_second_time_with_the_prompt_in_the_cache(model_dir, reference, length):
    harness = Harness(model_dir, max_num_batched_tokens=8, max_num_seqs=4)
    prompt = prompt_of(length)
    first = harness.generate(prompt, prompt_logprobs=1)
    second = harness.generate(prompt, prompt_logprobs=1)
    check(second.prompt_logprobs, prompt, reference, 1)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert first.token_ids == second.token_ids
    # what it computed is named, so others find it
    plain = harness.generate(prompt)
    assert plain.cached_tokens == (length - 1) // 16 * 16
    assert plain.token_ids == first.token_ids
    harness.assert_empty()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preempted_requests_report_every_token_once(model_dir, reference, overlap):
    """The harness fails on a token left out or reported twice."""
    harness = Harness(
        model_dir,
        num_blocks=16,
        admission="greedy",
        max_num_batched_tokens=24,
        max_num_seqs=8,
        overlap=overlap,
    )
    prompts = {i: prompt_of(20 + 9 * i, seed=i) for i in range(10)}
    for i, prompt in prompts.items():
        harness.add(i, prompt, prompt_logprobs=i % 4, max_tokens=60)
    results = harness.run()
    assert harness.scheduler.preemptions > 3
    for i, prompt in prompts.items():
        check(results[i].prompt_logprobs, prompt, reference, i % 4)
        assert len(results[i].token_ids) == 60
    harness.assert_empty()


def test_only_the_rows_that_ask_report(model_dir, reference):
    """Asking changes nobody's tokens, in steps that are shared."""
    prompts = [prompt_of(40, seed=i) for i in range(8)]
    plain, mixed = Harness(model_dir), Harness(model_dir)
    for i, prompt in enumerate(prompts):
        plain.add(i, prompt)
        mixed.add(i, prompt, prompt_logprobs=i if i % 2 else None)
    undisturbed, results = plain.run(), mixed.run()
    for i, prompt in enumerate(prompts):
        assert results[i].token_ids == undisturbed[i].token_ids
        if i % 2:
            check(results[i].prompt_logprobs, prompt, reference, i)
        else:
            assert results[i].prompt_logprobs == []


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("length", [1, 16, 64])
def test_the_prompt_alone(model_dir, reference, length, budget, overlap):
    """max_tokens 0 ends after the prompt, which may be as long as the context and fill all blocks."""
    harness = Harness(
        model_dir,
        max_model_len="64",
        num_blocks=4,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        overlap=overlap,
    )
    prompt = prompt_of(length)
    for _ in range(2):
        result = harness.generate(prompt, prompt_logprobs=2, max_tokens=0)
        assert (result.token_ids, result.finish) == ([], FinishReason.LENGTH)
        check(result.prompt_logprobs, prompt, reference, 2)
    plain = harness.generate(prompt, max_tokens=0)
    assert (plain.token_ids, plain.finish, plain.prompt_logprobs) == ([], FinishReason.LENGTH, [])
    harness.assert_empty()


def test_aborts_while_a_prompt_is_scored_leave_nothing(model_dir):
    for steps in range(6):
        harness = Harness(model_dir, max_num_batched_tokens=8, max_num_seqs=4, overlap="on")
        harness.add(1, prompt_of(40), prompt_logprobs=1, max_tokens=0)
        for _ in range(steps):
            harness.step()
        harness.abort(1)
        harness.run()
        assert harness.results[1].finish is FinishReason.ABORT
        harness.assert_empty()


def test_bad_logits_end_the_request_alone(model_dir, reference):
    """NaN in the logits of a prompt is an error of that request, and no number is made up."""
    harness = Harness(model_dir, max_num_batched_tokens=16, max_num_seqs=4)
    good, bad = prompt_of(40), [*prompt_of(20, seed=1), 7]
    assert 7 not in good
    table = harness.loop.runner.model.embedding.table
    with torch.inference_mode():
        table[7] = float("nan")
    harness.add(1, bad, prompt_logprobs=1)
    harness.add(2, good, prompt_logprobs=1)
    results = harness.run()
    assert results[1].finish is FinishReason.ERROR
    check(results[2].prompt_logprobs, good, reference, 1)
    harness.assert_empty()


def test_one_slice_of_logits_at_a_time():
    """The peak of a GPU's memory is measured with one."""
    made: list[weakref.ref[torch.Tensor]] = []

    class Model:
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            assert all(logits() is None for logits in made), "earlier logits are still there"
            logits = hidden @ torch.eye(16)
            made.append(weakref.ref(logits))
            return logits

    sampler = Sampler(2, 16, [], torch.device("cpu"))
    sampler.score_rows = 4
    tokens = np.arange(11, dtype=np.int32)
    output = score_prompts(torch.randn(11, 16), [PromptSpan(0, tokens, 1)], Model(), sampler)
    assert len(made) == 3
    assert len(output.logprobs.sampled) == 11
