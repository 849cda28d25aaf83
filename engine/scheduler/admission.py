"""May a request run at all? May a waiting one start now?

`greedy` starts a request when its known tokens fit into the free blocks now. Running requests then
grow until blocks run out, and the scheduler preempts.

`peak` looks ahead (the idea of LightLLM's router). Assume each running request grows by one token a
step until its expected end, then frees its blocks. Demand can only peak at a moment just before a
request ends, so it is enough to look at those:

    tokens |          /|            request   holds now   still to come
           |    /| /|/ |  /|        A             5             2
           |   / |/    |_/ |        B             3             6
           |__/            |__      peak = max over ends of the sum of holders at that moment
           +-------------------- steps

Sort requests by what is still to come, longest first: the i-th end finds requests 0..i alive, so
demand_i = sum(held[0..i]) + (i + 1) * to_come[i]. One sort and one cumulative sum. A candidate that
keeps the peak within the pool starts. Preemption becomes the exception; it stays correct when
expectations fail.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.api.messages import FinishReason
from engine.kv.manager import KVCacheManager
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request can never run: `size` against `limit`, and advice."""

    code: str
    message: str
    size: int
    limit: int


def why_never(
    request: Request, kv: KVCacheManager, max_model_len: int, max_prompt_tokens: int | None
) -> Rejection | None:
    """What makes a request impossible whatever the load; None if it can be served.

    `max_prompt_tokens`: the token budget when prompts may not be split, else None.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt < 1:
        return Rejection("empty_prompt", "The prompt has no tokens. Send at least one.", 0, 1)
    if num_prompt > max_model_len - (request.params.max_tokens != 0):
        message = (
            f"The prompt has {num_prompt} tokens, which leaves no room for a completion in the "
            f"context of {max_model_len} tokens. Shorten it to {max_model_len - 1} or fewer, or "
            "start the server with a larger --max-model-len."
        )
        return Rejection("context_length_exceeded", message, num_prompt, max_model_len)
    need, have = kv.blocks_for(request.max_kv_tokens), kv.num_usable_blocks
    if need > have:
        num_output = request.max_total_tokens - num_prompt
        message = (
            f"{num_prompt} prompt tokens and up to {num_output} new ones need {need} KV blocks of "
            f"{kv.block_size} tokens, but the cache has {have}. Lower max_tokens, shorten the "
            "prompt, or start the server with a larger KV cache."
        )
        return Rejection("exceeds_kv_capacity", message, need, have)
    if max_prompt_tokens is not None and num_prompt > max_prompt_tokens:
        message = (
            f"The prompt has {num_prompt} tokens, but a step computes at most {max_prompt_tokens} "
            "and chunked prefill is off. Shorten the prompt, or start the server with "
            "--enable-chunked-prefill or a larger --max-num-batched-tokens."
        )
        return Rejection("context_length_exceeded", message, num_prompt, max_prompt_tokens)
    return None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`need` against `have` blocks: at the future peak in all, or for this request now."""

    need: int
    have: int

    @property
    def fits(self) -> bool:
        return self.need <= self.have


class Admission(Protocol):
    """Decides for one step, candidate after candidate. A lone request that fits always starts."""

    def check(self, request: Request, num_shared_blocks: int) -> Verdict:
        """Would it fit? `num_shared_blocks`: blocks of its cached prefix that others hold."""

    def admit(self, request: Request) -> None:
        """It has started: count it in. `request.num_shared_blocks` is set."""


class OutputLengths:
    """What completions of late have taken, and hence what a running one may still take.

    Chat clients send a large `max_tokens` or none, and few completions reach it; reserving for the
    limit would leave most of the cache idle. So each request is given a length drawn from those of
    the last completions that were longer than it is already (the idea of "Past-Future Scheduler for
    LLM Serving", Gong et al. 2025). Draws spread evenly over requests, and one holds until it is
    outgrown: the sum over many is then close to the truth, which a high percentile for each is not.

    The memory starts with a few guesses, as the first completions to end are the short ones. One
    that was cut by its limit says only "at least this long": it counts only if above average.
    """

    GUESS = 1024
    NUM_GUESSES = 32
    MEMORY = 256
    REFRESH = 16  # completions between two evaluations
    GOLDEN_RATIO = 0.6180339887498949  # its multiples, modulo 1, are spread evenly

    def __init__(self) -> None:
        self.mean = float(self.GUESS)
        self._lengths = deque([self.GUESS] * self.NUM_GUESSES, maxlen=self.MEMORY)
        self._sorted = sorted(self._lengths)
        self._count = 0

    def record(self, request: Request, reason: FinishReason) -> None:
        """Learn from a finished request; errors and aborts teach nothing."""
        length = request.num_output_tokens
        if reason is FinishReason.LENGTH and length <= self.mean:
            return
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        self._lengths.append(length)
        self._count += 1
        if self._count % self.REFRESH == 0:
            self._sorted = sorted(self._lengths)
            self.mean = sum(self._sorted) / len(self._sorted)

    def draw_kv_tokens(self, request: Request) -> int:
        """KV tokens at the request's likely end; at most its limit."""
        done = len(request.token_ids) + request.num_uncommitted - request.num_prompt_tokens
        first = bisect_right(self._sorted, done)
        num_longer = len(self._sorted) - first
        if num_longer == 0:  # outlived them all: half as much again
            output = done + max(64, done // 2)
        else:
            share = (request.sequence + done) * self.GOLDEN_RATIO % 1.0
            output = self._sorted[first + int(share * num_longer)]
        return min(request.max_kv_tokens, request.num_prompt_tokens + output)


class GreedyAdmission:
    """Start whatever fits now."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    def check(self, request: Request, num_shared_blocks: int) -> Verdict:
        need = self._kv.blocks_for(len(request.token_ids)) - num_shared_blocks
        return Verdict(need, self._kv.num_free_blocks)

    def admit(self, request: Request) -> None:
        """Its blocks are taken already."""


class PeakAdmission:
    """Start what keeps the future peak within the pool.

    A shared block is charged to the request that brought it. Blocks whose bringer is gone are
    charged once, as if they stayed for ever. `need` rounds each request up by at most a block.
    """

    def __init__(
        self, kv: KVCacheManager, lengths: OutputLengths, running: Iterable[Request]
    ) -> None:
        self._block_size = kv.block_size
        self._lengths = lengths
        self._capacity = kv.num_usable_blocks
        self._held: list[int] = []  # tokens, prompts counted in full from the start
        self._to_come: list[int] = []  # tokens
        self._final_blocks = 0  # all at their ends at once: a bound that is cheap to keep
        own_blocks = 0
        for request in running:
            own_blocks += len(request.block_ids) - request.num_shared_blocks
            self.admit(request)
        self._orphaned = max(0, self._capacity - kv.num_free_blocks - own_blocks)

    def check(self, request: Request, num_shared_blocks: int) -> Verdict:
        held, to_come = self._outlook(request, num_shared_blocks)
        need = self._final_blocks + self._blocks(held + to_come) + self._orphaned
        if need > self._capacity:  # not all at once: look closer
            need = self._peak([*self._held, held], [*self._to_come, to_come]) + self._orphaned
        return Verdict(need, self._capacity)

    def admit(self, request: Request) -> None:
        held, to_come = self._outlook(request, request.num_shared_blocks)
        self._held.append(held)
        self._to_come.append(to_come)
        self._final_blocks += self._blocks(held + to_come)

    def _outlook(self, request: Request, num_shared_blocks: int) -> tuple[int, int]:
        """Own tokens (held, to come)."""
        held = len(request.token_ids)
        if request.likely_kv_tokens < held:
            request.likely_kv_tokens = self._lengths.draw_kv_tokens(request)
        to_come = max(0, request.likely_kv_tokens - held)
        return held - num_shared_blocks * self._block_size, to_come

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _peak(self, held: list[int], to_come: list[int]) -> int:
        """Most blocks held at one time."""
        growth = np.array(to_come, np.int64)
        order = np.argsort(-growth, kind="stable")
        alive = np.arange(1, len(held) + 1)
        tokens = np.cumsum(np.array(held, np.int64)[order]) + alive * growth[order]
        blocks = (tokens + alive * (self._block_size - 1)) // self._block_size
        return int(blocks.max())
