"""Small tokenizers made on the spot, one for each family of vocabularies, and a file form of each."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "Hello world, hello again! Numbers 12345 and code: def main(): return {'a': [1, 2]}",
    "Ein schöner Tag für Übungen, naïve café, señor, œuvre, Straße",
    "Съешь ещё этих мягких французских булок, да выпей чаю",
    "东京大学的学生们在图书馆里学习机器学习。今日はとても良い天気ですね。한국어 문장입니다",
    "مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧‍👦 😀🎉 🇩🇪🇯🇵 e\u0301 a\u0308 \u200d\u200f END STOP stop the end",
] * 4

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level(vocab_size: int = 600, **settings: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML; ids 0, 1, 2 are special, `<tool> call` is an added ordinary token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool> call", "été"])
    settings = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE} | settings
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def byte_fallback(strip: bool = True, **settings: Any) -> PreTrainedTokenizerFast:
    """SentencePiece-like BPE as in Llama 2: `<0xNN>` pieces, U+2581 for spaces, BOS added."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS[:3], trainers.BpeTrainer(vocab_size=300, show_progress=False)
    )
    spec = trained.to_str()
    import json

    model = json.loads(spec)["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [name for name in model["vocab"] if name not in names]
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def word_piece() -> PreTrainedTokenizerFast:
    """A vocabulary whose text depends on neighbours: `##` continuations, spaces added in decoding."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[SEP]")


def save(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    tokenizer.save_pretrained(directory)
    return directory
