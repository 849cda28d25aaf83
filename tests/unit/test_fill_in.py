"""Prompts with a suffix: which vocabularies have the marks, the order, what is added and refused."""

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from engine.api.messages import EngineLimits, Generate, TextPrompt
from engine.api.sampling import SamplingParams
from tests.unit.tokenizers_for_tests import byte_fallback, byte_level
from tokenizer_proc.encode import Encoder
from tokenizer_proc.errors import PromptError
from tokenizer_proc.prepare import PreparedRequest, prepare

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
CODE_LLAMA = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>")
DEEPSEEK = (
    "<\uff5cfim\u2581begin\uff5c>",
    "<\uff5cfim\u2581hole\uff5c>",
    "<\uff5cfim\u2581end\uff5c>",
)


def with_tokens(tokenizer: PreTrainedTokenizerFast, *names: str) -> PreTrainedTokenizerFast:
    tokenizer.backend_tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    return tokenizer


def make(encoder: Encoder, prompt: TextPrompt, **params: Any) -> PreparedRequest:
    limits = EngineLimits(
        block_size=4, num_blocks=100, max_model_len=64, max_num_seqs=8, vocab_size=2000,
        enable_prefix_caching=True, eos_token_ids=[2], dtype="float32", device="cpu",
    )  # fmt: skip
    generate = Generate(req_id=1, prompt=prompt, params=SamplingParams(**params), arrival_ns=0)
    return prepare(encoder, generate, limits)


@pytest.mark.parametrize("marks", [QWEN, STARCODER, DEEPSEEK])
def test_the_text_behind_comes_before_the_gap(marks: tuple[str, str, str]) -> None:
    """As if the client had written the marks itself."""
    encoder = Encoder(with_tokens(byte_level(), *reversed(marks)))
    given = encoder.encode(TextPrompt(text="def main():\n", suffix="\n  return 1 "))
    prefix, suffix, middle = marks
    by_hand = encoder.encode(TextPrompt(text=f"{prefix}def main():\n{suffix}\n  return 1 {middle}"))
    assert given.token_ids.tolist() == by_hand.token_ids.tolist()
    assert given.token_ids.dtype == np.int32
    assert encoder.decode(given.token_ids.tolist()) == by_hand.text
    assert given.text is None


def test_code_llama_joins_the_suffix_to_its_mark() -> None:
    tokenizer = with_tokens(byte_fallback(), *CODE_LLAMA, "\u2581<EOT>")
    encoder, backend = Encoder(tokenizer), tokenizer.backend_tokenizer
    prompt = encoder.encode(TextPrompt(text="the dog", suffix="fox the"))
    names = [backend.id_to_token(i) for i in prompt.token_ids.tolist()]
    assert prompt.added == (0,)
    assert names[:2] == ["<s>", CODE_LLAMA[0]]
    middle = names.index(CODE_LLAMA[1])
    assert "".join(names[2:middle]) == "\u2581the\u2581dog"
    assert "".join(names[middle + 1 : -1]) == "fox\u2581the", "no space before the first word"
    assert names[-1] == CODE_LLAMA[2]
    bare = encoder.encode(TextPrompt(text="the dog", suffix="fox the", add_special_tokens=False))
    assert bare.token_ids.tolist() == prompt.token_ids.tolist()[1:]
    assert bare.added == ()


def test_bos_comes_first_and_nothing_before_may_be_there() -> None:
    tokenizer = with_tokens(byte_level(), *QWEN)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    ids = Encoder(tokenizer).encode(TextPrompt(text="", suffix="x")).token_ids.tolist()
    want = ["<|endoftext|>", QWEN[0], QWEN[1], "x", QWEN[2]]
    assert [backend.id_to_token(i) for i in ids] == want


def test_a_middle_ends_at_the_marks_of_its_family() -> None:
    tokenizer = with_tokens(byte_level(), *QWEN, "<|fim_pad|>", "<|file_sep|>")
    encoder = Encoder(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["<|endoftext|>", *QWEN, "<|fim_pad|>", "<|file_sep|>"])
    gap = TextPrompt(text="a", suffix="b")
    [request] = make(encoder, gap, stop_token_ids=[7]).requests
    assert request.params.stop_token_ids == sorted([7, *ids])
    [plain] = make(encoder, TextPrompt(text="a"), stop_token_ids=[7]).requests
    assert plain.params.stop_token_ids == [7]
    [endless] = make(encoder, gap, ignore_eos=True).requests
    assert endless.params.stop_token_ids == []


def test_length_rules_count_everything() -> None:
    encoder = Encoder(with_tokens(byte_level(), *QWEN))
    prepared = make(encoder, TextPrompt(text="a", suffix="b"), max_tokens=3)
    assert prepared.num_prompt_tokens == 5
    with pytest.raises(PromptError, match="maximum context length") as caught:
        make(encoder, TextPrompt(text="a b c d e " * 10, suffix="a b c d e " * 10))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("names", [(), QWEN[:2], (QWEN[0], *STARCODER[1:])])
def test_a_model_without_the_marks_refuses(names: tuple[str, ...]) -> None:
    encoder = Encoder(with_tokens(byte_level(), *names))
    with pytest.raises(PromptError, match="trained to fill in the middle") as caught:
        encoder.encode(TextPrompt(text="a", suffix="b"))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "unsupported_value", "suffix")


def test_a_lone_surrogate_is_named_where_it_is() -> None:
    encoder = Encoder(with_tokens(byte_level(), *QWEN))
    with pytest.raises(PromptError) as caught:
        encoder.encode(TextPrompt(text="a", suffix="\ud800"))
    assert (caught.value.code, caught.value.param) == ("invalid_unicode", "suffix")
