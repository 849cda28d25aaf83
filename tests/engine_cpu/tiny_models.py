"""Tiny random checkpoints with tokenizers, made on the spot (about 0.5 MB and 0.1 s each).

Weights are drawn wide (standard deviation 0.25), so that logits are well apart: with the usual 0.02
nearly every next-token distribution is flat, and equal greedy tokens would prove little.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
BOS_ID, EOS_ID = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "A server answers requests; a request has a prompt and a completion.",
    "One two three four five six seven eight nine ten, and then again from one to ten.",
    "When the blocks run out, a request is preempted and later resumed where it stopped.",
    "def add(a, b):\n    return a + b\n\nprint(add(12, 30))\n",
    "Streaming sends every token as soon as it is known; joining the pieces gives the same text.",
    "Please write a short story about a small harbour town in which nothing ever happens.",
    "Explain why the sky looks blue during the day and red in the evening, in simple words.",
    "Der schnelle braune Fuchs springt über den faulen Hund. Où est la bibliothèque?",
]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# name -> (transformers config class, what differs from BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "llama3": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE}),
    "llama_tied": ("LlamaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama_biases": ("LlamaConfig", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", {}),  # biases on q, k and v
    "qwen3": ("Qwen3Config", {"head_dim": 32}),  # q and k norms; head_dim != hidden / heads
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 8}),
}
BASE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


def make_tiny(
    name: str,
    directory: str | Path,
    *,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> str:
    """Write a random float32 checkpoint of family `name` (a key of FAMILIES) and return its path.

    `overrides` are fields of the transformers config. The same arguments give the same weights. The
    tokenizer is byte-level BPE with 512 tokens, a ChatML template, bos 1, eos and pad 2.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    class_name, changes = FAMILIES[name]
    config = getattr(transformers, class_name)(**{**BASE, **changes, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        write_tokenizer(path)
    return str(path)


def randomize(model: torch.nn.Module, seed: int = 1) -> None:
    """Overwrite all parameters with wide random values, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                is_vocabulary = "embed" in name or "lm_head" in name
                std = 0.5 if is_vocabulary else 2.0 / parameter.shape[1] ** 0.5
                parameter.normal_(0, std, generator=generator)
            elif "bias" in name:
                parameter.normal_(0, 0.2, generator=generator)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(0, 0.1, generator=generator))


def train_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of exactly VOCAB_SIZE tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    return tokenizer


def write_tokenizer(directory: str | Path) -> None:
    """tokenizer.json, tokenizer_config.json and special_tokens_map.json in `directory`."""
    path = Path(directory)
    train_tokenizer().save(str(path / "tokenizer.json"))
    named = {
        "bos_token": SPECIAL_TOKENS[BOS_ID],
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "pad_token": SPECIAL_TOKENS[EOS_ID],
        "unk_token": SPECIAL_TOKENS[0],
    }
    config = {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": BASE["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "special_tokens_map.json").write_text(json.dumps(named))


def edit_config(directory: str | Path, **changes: Any) -> None:
    """Set keys of config.json; a value of None removes the key."""
    file = Path(directory) / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def copy_model(source: str | Path, directory: str | Path) -> Path:
    """A copy of a checkpoint, to be changed or damaged."""
    return Path(shutil.copytree(source, directory))
