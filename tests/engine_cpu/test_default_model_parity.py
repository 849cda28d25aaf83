"""The default model in this engine against transformers, in float32.

The model's distribution is flat, so near-ties happen: tokens are compared up to the first step whose
two best logits are closer than NEAR_TIE, and such steps are printed. No test here expects a word.
"""

import numpy as np
import pytest
import torch
import transformers

from server.default_model import ensure_default_model
from tests.engine_cpu.harness import Harness

NEAR_TIE = 1e-3
LOGPROB_TOLERANCE = 2e-3
NEW_TOKENS = 64

LONG_TEXT = (
    "The harbour lay quiet in the morning. Boats came and went, and nobody counted them. "
    "In the office above the quay a clerk wrote down the tides, the winds and the names of ships. "
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "List three uses of a paperclip:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n<head><title>",
    "for (int i = 0; i < n; i++) {",
    "中国的首都是",
    "今天天气很好，我们去公园",
    "人工智能的未来",
    "🙂🎉🚀 Let's celebrate",
    "👩‍👩‍👧‍👦 means",
    "Zażółć gęślą jaźń. Übermäßig große Äpfel",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "a",
    LONG_TEXT * 40,  # cut to 1,500 tokens below
]


@pytest.fixture(scope="module")
def model_dir():
    return str(ensure_default_model())


@pytest.fixture(scope="module")
def prompt_ids(model_dir):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    ids[-1] = ids[-1][:1500]
    assert len(ids[-1]) == 1500
    assert len(ids) >= 20
    return ids


@pytest.fixture(scope="module")
def completions(model_dir, prompt_ids):
    """Greedy tokens and their log-probabilities from this engine, all prompts in one batch."""
    harness = Harness(model_dir, num_blocks=512, max_num_batched_tokens=256, check_invariants=False)
    for i, ids in enumerate(prompt_ids):
        harness.add(i, ids, max_tokens=NEW_TOKENS, logprobs=1)
    results = harness.run()
    harness.assert_empty()
    return results


def test_greedy_tokens_and_logprobs_equal_transformers(model_dir, prompt_ids, completions):
    """Teacher-forced: one transformers pass over prompt and completion gives its choice at each step,
    which is what its own greedy generation would take as long as all earlier choices agree."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    near_ties, compared = 0, 0
    worst = 0.0
    for i, ids in enumerate(prompt_ids):
        tokens, logprobs = completions[i].token_ids, completions[i].logprobs
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].float()
        expected = torch.log_softmax(logits, -1)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(chosen - np.array(logprobs)).max()))
        np.testing.assert_allclose(logprobs, chosen, atol=LOGPROB_TOLERANCE, rtol=0)
        best = logits.topk(2).values
        gaps = (best[:, 0] - best[:, 1]).tolist()
        for step, gap in enumerate(gaps):
            if gap < NEAR_TIE:
                near_ties += 1
                print(f"prompt {i} step {step}: near-tie, gap {gap:.2e}; compared up to here")
                break
            assert tokens[step] == int(logits[step].argmax()), (i, step, gap)
            compared += 1
    print(f"{compared} tokens equal, {near_ties} near-ties, largest difference {worst:.1e}")
    assert compared > 0.8 * NEW_TOKENS * len(prompt_ids)
