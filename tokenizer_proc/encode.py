"""Prompts to token ids."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.api.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from tokenizer_proc.bound import TokenBound
from tokenizer_proc.chat import ChatRenderer
from tokenizer_proc.errors import PromptError
from tokenizer_proc.fill_in import find_fill_in
from tokenizer_proc.loading import Tokenizer

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodedPrompt:
    token_ids: Int32Array  # [num_tokens]
    text: str | None  # as given or as rendered; None for a prompt given as ids, or with a suffix
    added: tuple[int, ...] = ()  # places of tokens that are not of the text, such as BOS

    def __len__(self) -> int:
        return len(self.token_ids)


class Encoder:
    """Encodes prompts and decodes whole id sequences. Safe to use from several threads.

    It goes to the Rust tokenizer directly: transformers' call sets truncation on the shared object
    each time, which threads cannot do at once.
    """

    def __init__(self, tokenizer: Tokenizer, bound: TokenBound | None = None) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.bos_token: str | None = tokenizer.bos_token
        self.bound = bound
        self.chat = ChatRenderer(tokenizer)
        self.fill_in = find_fill_in(self.backend)

    def encode(self, prompt: Prompt, max_tokens: int | None = None) -> EncodedPrompt:
        """Raises PromptError for messages the template refuses and for text that is not Unicode.

        Also for text whose mere length shows that it has more than `max_tokens` tokens.
        """
        if isinstance(prompt, TokenPrompt):
            return EncodedPrompt(np.frombuffer(prompt.token_ids, dtype="<i4"), None)
        if isinstance(prompt, TextPrompt) and prompt.suffix:
            return self._encode_with_suffix(prompt, max_tokens)
        if isinstance(prompt, TextPrompt):
            return self._encode_text(prompt.text, prompt.add_special_tokens, "prompt", max_tokens)
        text = self.chat.render(prompt)
        has_bos = bool(self.bos_token) and text.startswith(str(self.bos_token))
        add_special_tokens = prompt.add_special_tokens and not has_bos
        return self._encode_text(text, add_special_tokens, "messages", max_tokens)

    def decode(self, token_ids: list[int]) -> str:
        """The whole text, special tokens as their names."""
        return self.backend.decode(token_ids, skip_special_tokens=False)

    def _encode_with_suffix(self, prompt: TextPrompt, max_tokens: int | None) -> EncodedPrompt:
        if self.fill_in is None:
            raise PromptError(
                400,
                "unsupported_value",
                "suffix needs a model trained to fill in the middle, and this one has no tokens for it; "
                "leave suffix out, or serve a model such as Qwen2.5-Coder, DeepSeek-Coder or Code Llama",
                "suffix",
            )
        self._check_text(prompt.text, "prompt", max_tokens)
        self._check_text(prompt.suffix, "suffix", max_tokens)
        ids, num_added = self.fill_in.encode(prompt.text, prompt.suffix, prompt.add_special_tokens)
        return EncodedPrompt(np.array(ids, dtype=np.int32), None, tuple(range(num_added)))

    def _encode_text(
        self, text: str, add_special_tokens: bool, param: str, max_tokens: int | None
    ) -> EncodedPrompt:
        self._check_text(text, param, max_tokens)
        # Of all ways to encode, this one alone lets other threads run meanwhile: with `encode`, every
        # stream would stand still for the second that a long prompt takes. It also makes no offsets.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        added: list[int] = []
        if add_special_tokens:
            added = np.flatnonzero(encoding.special_tokens_mask).tolist()
        return EncodedPrompt(np.array(encoding.ids, dtype=np.int32), text, tuple(added))

    def _check_text(self, text: str, param: str, max_tokens: int | None) -> None:
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                400,
                "invalid_unicode",
                f"{param} has a lone surrogate at character {error.start}, which no text can hold",
                param,
            ) from error
        if max_tokens is not None and self.bound is not None:
            at_least = self.bound.least_tokens(utf8)
            if at_least > max_tokens:
                raise PromptError(
                    400,
                    "context_length_exceeded",
                    f"the prompt has {len(utf8)} bytes, hence at least {at_least} tokens, but this "
                    f"model's maximum context length is {max_tokens} tokens, prompt and completion "
                    f"together; shorten the prompt",
                    param,
                )


def prompt_param(prompt: Prompt) -> str:
    """The HTTP field that holds the prompt."""
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"


def check_token_ids(
    token_ids: Int32Array, vocab_size: int, param: str, is_text: bool = False
) -> None:
    """Raise PromptError unless all ids are in [0, vocab_size).

    `is_text`: the field `param` holds text, so that it has no element that could be blamed.
    """
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(outside):
        position = int(outside[0])
        raise PromptError(
            400,
            "invalid_token_id",
            f"{param}[{position}] is token id {token_ids[position]}; ids of this model are 0 to "
            f"{vocab_size - 1}",
            param if is_text else f"{param}[{position}]",
        )
