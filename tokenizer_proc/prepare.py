"""A `Generate` to the requests that the engine runs: lengths checked, defaults resolved, blocks named."""

import random
from dataclasses import dataclass

import msgspec

from engine.api.hashing import block_names
from engine.api.messages import AddRequest, EngineLimits, Generate, TextPrompt, TokenPrompt
from engine.api.sampling import SamplingParams, choice_seed
from tokenizer_proc.constraints import Constraints
from tokenizer_proc.encode import (
    EncodedPrompt,
    Encoder,
    Int32Array,
    check_token_ids,
    prompt_param,
)
from tokenizer_proc.errors import PromptError

PROMPT_END_CHARS = 64  # of the prompt's text, for the server to look at


@dataclass(frozen=True)
class PreparedRequest:
    token_ids: Int32Array  # the prompt
    prompt_text: str | None  # only if the request wants it
    requests: list[AddRequest]  # one for each choice, ids req_id .. req_id + n - 1
    copies: int = 1  # choices that each of `requests` stands for: equal ones are computed once
    added: tuple[int, ...] = ()  # places of prompt tokens that are not of the text
    prompt_end: str = ""  # where a template may have opened something
    token_texts: list[str] | None = None  # what each prompt token adds to prompt_text, if wanted

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids)


def prepare(
    encoder: Encoder,
    generate: Generate,
    limits: EngineLimits,
    default_seed: int = 0,
    constraints: Constraints | None = None,
) -> PreparedRequest:
    """Encode the prompt once and make one request per choice; they share its block names, hence its KV.

    Choices that cannot differ are one request. Only the first reports the prompt's log-probabilities.
    `default_seed` is for requests that name none; 0 draws a fresh one. `constraints` is needed if the
    parameters have a grammar or bad words. Raises PromptError.
    """
    params = generate.params
    check_param_ids(params, limits.vocab_size)
    longest = None if params.truncate_prompt_tokens else limits.max_model_len
    prompt = encoder.encode(generate.prompt, longest)
    prompt_end = (prompt.text or "")[-PROMPT_END_CHARS:]
    if generate.structured_after_mark and prompt_end.rstrip().endswith(generate.reasoning_mark):
        params = msgspec.structs.replace(params, structured=generate.structured_after_mark)
    if isinstance(generate.prompt, TextPrompt) and generate.prompt.suffix:
        params = end_with_middle(params, encoder, limits.vocab_size)
    if constraints is not None:
        params = constraints.resolve(params)
    prompt = truncate(prompt, params, limits)
    is_text = not isinstance(generate.prompt, TokenPrompt)
    check_token_ids(prompt.token_ids, limits.vocab_size, prompt_param(generate.prompt), is_text)
    param, clamp = prompt_param(generate.prompt), generate.clamp_max_tokens
    max_tokens = resolve_max_tokens(len(prompt), params, limits, param, clamp)
    token_ids = prompt.token_ids.tobytes()
    names = b""
    if limits.enable_prefix_caching:
        names = block_names(token_ids, limits.block_size, generate.cache_salt)
    seed = resolve_seed(params.seed, default_seed)
    copies = params.n if params.is_deterministic else 1
    requests = [
        AddRequest(
            req_id=generate.req_id + choice,
            token_ids=token_ids,
            block_names=names,
            params=msgspec.structs.replace(
                params,
                n=1,
                max_tokens=max_tokens,
                seed=as_int64(choice_seed(seed, choice)),
                prompt_logprobs=params.prompt_logprobs if choice == 0 else None,
            ),
            arrival_ns=generate.arrival_ns,
            priority=generate.priority,
            cache_salt=generate.cache_salt,
        )
        for choice in range(params.n // copies)
    ]
    text = prompt_text(encoder, prompt) if generate.want_prompt_text else None
    return PreparedRequest(prompt.token_ids, text, requests, copies, prompt.added, prompt_end)


def end_with_middle(params: SamplingParams, encoder: Encoder, vocab_size: int) -> SamplingParams:
    """Also stop where a model that fills in the middle ends it; unless the end is to be ignored."""
    if encoder.fill_in is None or params.ignore_eos:
        return params
    ends = {token_id for token_id in encoder.fill_in.end_ids if token_id < vocab_size}
    return msgspec.structs.replace(params, stop_token_ids=sorted(ends.union(params.stop_token_ids)))


def truncate(prompt: EncodedPrompt, params: SamplingParams, limits: EngineLimits) -> EncodedPrompt:
    """The last `truncate_prompt_tokens` of the prompt; with -1 as many as leave room for max_tokens."""
    keep = params.truncate_prompt_tokens
    if keep == -1:
        room = 1 if params.max_tokens is None else params.max_tokens
        keep = max(1, limits.max_model_len - room)
    if keep is None or len(prompt) <= keep:
        return prompt
    cut = len(prompt) - keep
    added = tuple(place - cut for place in prompt.added if place >= cut)
    return EncodedPrompt(prompt.token_ids[cut:], None, added)


def prompt_text(encoder: Encoder, prompt: EncodedPrompt) -> str:
    """What `echo` returns: the text exactly as it came, or the ids decoded."""
    return encoder.decode(prompt.token_ids.tolist()) if prompt.text is None else prompt.text


def resolve_max_tokens(
    num_prompt: int, params: SamplingParams, limits: EngineLimits, param: str, clamp: bool = False
) -> int:
    """How many tokens may be generated. Raises PromptError if the lengths cannot work.

    The last token generated needs no KV, hence the -1 below. Without max_tokens the completion may
    fill the context, or the KV cache if that is smaller; with `clamp`, max_tokens is lowered to that.
    Without any new token the prompt may be as long as the context.
    """
    # Clients (LiteLLM, agents that shorten their history) look for "this model's maximum context length is".
    longest, asked = limits.max_model_len, params.max_tokens
    if num_prompt == 0:
        raise PromptError(400, "empty_prompt", "the prompt has no tokens; send some text", param)
    least_room = 0 if asked == 0 else 1
    if num_prompt > longest - least_room:
        raise PromptError(
            400,
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens, but this model's maximum context length is "
            f"{longest} tokens, prompt and completion together; shorten the prompt by at least "
            f"{num_prompt - longest + least_room} tokens",
            param,
        )
    room = longest - num_prompt
    capacity = limits.num_blocks * limits.block_size - num_prompt + 1
    if clamp and asked is not None:
        asked = min(asked, room, max(capacity, 1))
    if asked is not None and asked > room:
        raise PromptError(
            400,
            "context_length_exceeded",
            f"the prompt has {num_prompt} tokens and max_tokens is {asked}, together "
            f"{num_prompt + asked}, but this model's maximum context length is {longest} tokens; "
            f"the largest max_tokens that fits is {room}",
            "max_tokens",
        )
    if capacity < (asked or 1):
        blocks = -(-(num_prompt + (asked or 1) - 1) // limits.block_size)
        remedy = (
            f"the largest max_tokens that fits is {capacity}"
            if capacity > 0
            else ("shorten the prompt, or give the server a larger KV cache")
        )
        raise PromptError(
            400,
            "exceeds_kv_capacity",
            f"{num_prompt} prompt tokens and max_tokens {asked or 1} need {blocks} KV blocks, but "
            f"the server has {limits.num_blocks} of {limits.block_size} tokens; {remedy}",
            param,
        )
    resolved = min(room, capacity) if asked is None else asked
    if resolved < params.min_tokens:
        raise PromptError(
            400,
            "context_length_exceeded",
            f"min_tokens is {params.min_tokens}, but after {num_prompt} prompt tokens only "
            f"{resolved} fit",
            "min_tokens",
        )
    return resolved


def check_param_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise PromptError unless the token ids among the parameters exist in the model."""
    known = f"ids of this model are 0 to {vocab_size - 1}"
    for field, ids in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids or []),
    ):
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                where = f"{field}[{place}]"
                message = f"{where} is token id {token_id}; {known}"
                raise PromptError(400, "invalid_token_id", message, where)
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            message = f"logit_bias has token id {token_id}; {known}"
            raise PromptError(400, "invalid_value", message, "logit_bias")


def resolve_seed(seed: int | None, default_seed: int) -> int:
    """The request's seed, else the server's, else a random one of 63 bits."""
    if seed is not None and seed != -1:
        return seed
    return default_seed or random.getrandbits(63)


def as_int64(seed: int) -> int:
    """The same 64 bits as a signed number, which is what `SamplingParams.seed` holds."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
