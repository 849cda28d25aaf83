"""Every family gives transformers' logits and greedy tokens, in float32, on tiny random checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, build_model
from engine.weights.loader import EMBEDDING, HEAD, load_model
from tests.engine_cpu.naive_attention import Sequences
from tests.engine_cpu.tiny_models import FAMILIES, copy_model, edit_config, make_tiny

CPU = torch.device("cpu")
LOGITS_TOLERANCE = 1e-4  # logits have a standard deviation of about 4
PROMPT = [(7 * i * i + 3 * i) % 509 + 3 for i in range(40)]  # longer than every window below

SHORT = [1.0 + 0.05 * i for i in range(8)]
LONG = [1.0 + 0.4 * i for i in range(8)]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


LONGROPE = rope(
    "longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=32
)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILIES},
    "rope linear": ("llama", rope("linear", factor=4.0)),
    "rope yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "rope yarn, long ramp": (
        "llama",
        rope(
            "yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=16.0, truncate=False
        ),
    ),
    "rope yarn, mscale": (
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=128,
            mscale=1.0,
            mscale_all_dim=0.8,
        ),
    ),
    "rope longrope": ("llama", {**LONGROPE, "max_position_embeddings": 256}),
    "head size 64": ("llama", {"head_dim": 64}),
    "head size 80": ("llama", {"head_dim": 80}),
    "head size 96": ("qwen3", {"head_dim": 96}),
    "head size 128": ("qwen3", {"head_dim": 128}),
    "head size 256": ("mistral", {"head_dim": 256}),
    "one KV head": ("llama", {"num_key_value_heads": 1}),
    "as many KV heads": ("qwen2", {"num_key_value_heads": 4}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 windows from layer 1": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3 layer types": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral without window": ("mistral", {"sliding_window": None}),
    "odd sizes": ("llama", {"hidden_size": 60, "intermediate_size": 84, "vocab_size": 515}),
}


def load(path: str, dtype: torch.dtype = torch.float32, **config_changes: Any) -> Decoder:
    config = replace(ModelConfig.from_directory(path), **config_changes)
    return load_model(path, config, dtype, CPU)


def theirs(path: str) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def their_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def their_greedy(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int
) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    path = make_tiny(family, tmp_path, tokenizer=False, **overrides)
    ours, reference = load(path), theirs(path)
    got = Sequences(ours).run({0: PROMPT})[0]
    want = their_logits(reference, PROMPT)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS_TOLERANCE)
    assert Sequences(ours).greedy(PROMPT, 24) == their_greedy(reference, PROMPT, 24)


@pytest.mark.parametrize("stored", ["both, different", "both, one value differs", "both", "head"])
def test_a_tied_checkpoint_with_a_head_of_its_own(stored: str, tmp_path: Path) -> None:
    """As transformers loads it: of two that differ each is used, and one alone is both."""
    path = make_tiny("llama_tied", tmp_path / "tied", tokenizer=False)
    weights = f"{path}/model.safetensors"
    tensors = load_file(weights)
    head = torch.randn_like(tensors[EMBEDDING]) if stored == "both, different" else None
    tensors[HEAD] = tensors[EMBEDDING].clone() if head is None else head
    if stored == "both, one value differs":
        tensors[HEAD][-1, -1] += 1
    reference = copy_model(path, tmp_path / "untied")
    edit_config(reference, tie_word_embeddings=False)
    save_file(tensors, f"{reference}/model.safetensors", {"format": "pt"})
    if stored == "head":
        del tensors[EMBEDDING]
    save_file(tensors, weights, {"format": "pt"})

    ours = load(path)
    got = Sequences(ours).run({0: PROMPT})[0]
    want = their_logits(theirs(str(reference)), PROMPT)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS_TOLERANCE)
    assert ours.head.tied == ("differ" not in stored)


def test_chunks_give_the_logits_of_the_whole(tmp_path: Path) -> None:
    """A prompt in pieces, with another sequence beside it, crosses windows and blocks alike."""
    model = load(make_tiny("mistral", tmp_path, tokenizer=False))
    whole = Sequences(model).run({0: PROMPT})[0]
    chunked = Sequences(model, num_sequences=2)
    pieces = [
        chunked.run({1: PROMPT[:5]})[1],
        chunked.run({0: PROMPT[7:20], 1: PROMPT[5:6]})[1],
        chunked.run({1: PROMPT[6:30], 0: PROMPT[:1]})[1],
        chunked.run({1: PROMPT[30:]})[1],
    ]
    torch.testing.assert_close(torch.cat(pieces), whole, rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama_biases", "qwen3"])
def test_a_row_alone_equals_the_row_in_a_batch(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Bit for bit: whatever runs beside it, a sequence's logits are the same."""
    model = load(make_tiny(family, tmp_path, tokenizer=False, intermediate_size=1000), dtype)
    prompts = {row: PROMPT[row : row + 3 + 5 * row] for row in range(6)}
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            together = Sequences(model, num_sequences=6).run(prompts)
            for row, prompt in prompts.items():
                alone = Sequences(model).run({0: prompt})[0]
                assert torch.equal(alone, together[row]), f"row {row}, {num_threads} threads"
    finally:
        torch.set_num_threads(threads)


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, tokenizer=False)
    got = Sequences(load(path, torch.bfloat16)).run({0: PROMPT})[0]
    want = their_logits(theirs(path), PROMPT)
    assert (got - want).abs().mean() < 0.15


def test_dynamic_rope_is_scaled_for_the_longest_sequence(tmp_path: Path) -> None:
    """Equal to transformers at exactly that length, and to unscaled rope if no longer one is served."""
    settings = rope("dynamic", factor=2.0)
    path = make_tiny("llama", tmp_path, tokenizer=False, max_position_embeddings=32, **settings)
    reference = theirs(path)
    ours = load(path)
    assert ours.max_model_len == 64
    tokens = (PROMPT + PROMPT)[:64]
    got = Sequences(ours).run({0: tokens})[0]
    torch.testing.assert_close(got, their_logits(reference, tokens), rtol=0, atol=LOGITS_TOLERANCE)
    short = Sequences(load(path, max_model_len=32)).run({0: tokens[:30]})[0]
    torch.testing.assert_close(
        short, their_logits(reference, tokens[:30]), rtol=0, atol=LOGITS_TOLERANCE
    )


def test_longrope_takes_the_short_list_for_short_service(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, tokenizer=False, max_position_embeddings=256, **LONGROPE)
    got = Sequences(load(path, max_model_len=32)).run({0: PROMPT[:30]})[0]
    want = their_logits(theirs(path), PROMPT[:30])
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS_TOLERANCE)


def test_sharded_and_renamed_files_load_like_one(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, tokenizer=False, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    got = Sequences(load(path)).run({0: PROMPT})[0]
    want = their_logits(theirs(path), PROMPT)
    torch.testing.assert_close(got, want, rtol=0, atol=LOGITS_TOLERANCE)
    (tmp_path / "model.safetensors.index.json").unlink()  # then every shard there is counts
    torch.testing.assert_close(Sequences(load(path)).run({0: PROMPT})[0], got, rtol=0, atol=0)


def test_sliding_windows_of_each_layer(tmp_path: Path) -> None:
    def windows(family: str, **overrides: Any) -> list[int | None]:
        path = tmp_path / f"{family}-{len(list(tmp_path.iterdir()))}"
        make_tiny(family, path, tokenizer=False, num_hidden_layers=3)
        edit_config(path, layer_types=None)
        edit_config(path, **overrides)
        config = ModelConfig.from_directory(str(path))
        model = build_model(config, torch.float32, CPU)
        return [spec.sliding_window for spec in model.attention_specs]

    assert windows("llama", sliding_window=8) == [None] * 3
    assert windows("mistral", sliding_window=8) == [8] * 3
    assert windows("qwen2", sliding_window=8, use_sliding_window=False) == [None] * 3
    asked = {"sliding_window": 8, "use_sliding_window": True}
    assert windows("qwen2", **asked, max_window_layers=2) == [None, None, 8]
    assert windows("qwen3", **asked, max_window_layers=28) == [None] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows("qwen2", **asked, layer_types=types) == [8, None, 8]


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    path = make_tiny("qwen3", tmp_path, tokenizer=False)
    config = ModelConfig.from_directory(path)

    def logits(seed: int) -> Tensor:
        model = load_model(path, config, torch.float32, CPU, dummy=True, seed=seed)
        return Sequences(model).run({0: PROMPT})[0]

    first = logits(1)
    assert torch.isfinite(first).all()
    assert first.std() > 0.1
    assert torch.equal(first, logits(1))
    assert not torch.equal(first, logits(2))
