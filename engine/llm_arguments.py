"""What `LLM` takes, checked: settings, prompts, conversations, sampling parameters.

Whatever cannot work is a ValueError that names it, before anything runs.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from engine.api.config import ConfigError, EngineConfig, arg_of
from engine.api.messages import Prompt, TextPrompt, TokenPrompt
from engine.api.sampling import SamplingParams

PromptInput = str | Sequence[int] | dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")

# Settings of vLLM that mean what this engine does anyway.
FIXED_SETTINGS: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False,),
    "quantization": (None,),
}

# What `dtype` takes beside names.
NAME_OF_DTYPE = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
}

KINDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}


def make_config(model: str, tokenizer: str, settings: dict[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments; None leaves a setting at its default.

    Raises ConfigError naming a wrong one and its remedy.
    """
    known = {f.name: f for f in dataclasses.fields(EngineConfig)}
    chosen: dict[str, Any] = {"log_level": "warning"}
    for name, value in settings.items():
        if name in FIXED_SETTINGS:
            if value not in FIXED_SETTINGS[name]:
                raise ConfigError(
                    f"{name}={value!r} is not supported; leave it out or use "
                    f"{FIXED_SETTINGS[name][0]!r}"
                )
        elif name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = (
                f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"LLM has no setting {name!r}{hint}")
        elif value is not None:
            chosen[name] = as_setting(known[name], value)
    return EngineConfig(model=model, tokenizer=tokenizer, **chosen)


def as_setting(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """`value` in the type of the field. Raises ConfigError where it has another."""
    choices, kind = arg_of(field).choices, type(field.default)
    if isinstance(value, bool) and "off" in (choices or ()):
        value = "on" if value else "off"
    if isinstance(value, Path) or (field.name == "max_model_len" and type(value) is int):
        value = str(value)
    if field.name == "dtype" and isinstance(value, torch.dtype):
        value = NAME_OF_DTYPE.get(value, value)
    if choices is not None and not (isinstance(value, str) and value in choices):
        shown = ", ".join((*choices, *map(str, NAME_OF_DTYPE if field.name == "dtype" else ())))
        raise ConfigError(f"{field.name}={value!r}: choose one of {shown}")
    if field.name == "max_model_len" and not isinstance(value, str):
        raise ConfigError(f"max_model_len={value!r}: expected a whole number, or a text like '8k'")
    accepted = int | float if kind is float else kind
    if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{field.name}={value!r}: expected {KINDS[kind]}")
    return value


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt (a string, a dict, or a list of ids) or a list of prompts, as a list of prompts."""
    if isinstance(prompts, str | dict):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise wrong_prompt(prompts)
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int | float | np.number) for item in items):
        return [items]
    return items


def as_prompt(prompt: PromptInput) -> Prompt:
    if isinstance(prompt, dict):
        if "prompt_token_ids" in prompt:
            return token_prompt(prompt["prompt_token_ids"])
        if "prompt" not in prompt:
            raise ValueError(
                "a prompt given as a dict needs 'prompt' or 'prompt_token_ids', got "
                f"{sorted(map(str, prompt))}"
            )
        prompt = prompt["prompt"]
        if not isinstance(prompt, str):
            raise ValueError(f"'prompt' in a dict is a string, got {prompt!r:.80}")
    if isinstance(prompt, str):
        return TextPrompt(text=prompt)
    return token_prompt(prompt)


def token_prompt(token_ids: Any) -> TokenPrompt:
    """From a list or array of ids. Raises ValueError unless all are whole numbers of 32 bits."""
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError):  # lists of different lengths; no numbers at all
        raise wrong_prompt(token_ids) from None
    if ids.ndim != 1:
        raise wrong_prompt(token_ids)
    limits = np.iinfo(np.int32)
    if ids.size and (
        ids.dtype.kind not in "iu" or ids.min() < limits.min or ids.max() > limits.max
    ):
        raise ValueError(
            f"a prompt of token ids holds whole numbers below 2**31, got {token_ids!r:.80}"
        )
    return TokenPrompt(ids.astype(np.int32).tobytes())


def wrong_prompt(prompt: object) -> ValueError:
    return ValueError(
        f"a prompt is a string, a list of token ids, or a dict with one of them, got {prompt!r:.80}"
    )


def check_conversations(conversations: Sequence[Any]) -> None:
    """Raise ValueError unless each is a list of messages with a role and a content."""
    if not isinstance(conversations, list | tuple):
        raise ValueError(
            f"chat takes a list of messages or a list of conversations, got {conversations!r:.80}"
        )
    for conversation in conversations:
        if not isinstance(conversation, list) or not conversation:
            raise ValueError(
                f"a conversation is a list of messages such as [{{'role': 'user', 'content': ...}}], "
                f"got {conversation!r:.80}"
            )
        for message in conversation:
            role = message.get("role") if isinstance(message, dict) else None
            if role not in ROLES or "content" not in message:
                raise ValueError(
                    f"a message needs a content and a role of {', '.join(ROLES)}, got {message!r:.80}"
                )


def params_for(
    prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [msgspec.structs.replace(given) for _ in prompts]
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"sampling_params is a SamplingParams or a list of them, got {given!r:.80}"
        )
    if len(given) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(given)} sampling parameters")
    for i, params in enumerate(given):
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params[{i}] is no SamplingParams: {params!r:.80}")
    return list(given)
