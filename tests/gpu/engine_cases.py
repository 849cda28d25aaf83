"""Engines on a GPU with small random models, and their results against transformers."""

import numpy as np
import torch
import transformers

from tests.engine_cpu.harness import Harness

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


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
        assert (exact[i].max(-1).values - chosen < 5.0).all(), f"request {i}: an unlikely token"
    ours_rms, theirs_rms = (float(torch.cat(e).square().mean().sqrt()) for e in (ours, theirs))
    print(
        f"error of log-probabilities: ours {ours_rms:.4f}, transformers in bfloat16 {theirs_rms:.4f}"
    )
    assert ours_rms < 1.5 * theirs_rms + 0.005
