"""Philox4x32-10 and the noise of sampling: a pure function of (seed, position, token id).

Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
easy as 1, 2, 3" (SC 2011). It has no state to advance: a key and a counter give four random words.
So the noise of a token does not depend on who else is in the batch, on the order of requests, on
chunking or on preemption, and another device can compute the same bits.

A token's uniform number has 48 bits, in two parts from two counters. The 16 coarse bits, eight
tokens to a Philox block, bound the noise well enough to rule out nearly every token; the 32 fine
bits are needed for the few that could be the largest, and give rare tokens their exact share.

    key      (seed & 0xffffffff, seed >> 32)                    seed as an unsigned 64-bit number
    coarse   16 bits of counter (token_id >> 3, position & 0xffffffff, position >> 32, 0):
             word (token_id & 7) >> 1, its low half for even token ids and its high half for odd
    fine     32 bits of counter (token_id >> 2, position & 0xffffffff, position >> 32, 1):
             word token_id & 3
    uniform  u = (coarse * 2**32 + fine + 0.5) / 2**48          exact in float64, 0 < u < 1
    Gumbel   g = -log(-log(1 - u))                              in float64

A large g belongs to a small u. Other uses of a seed take other values of the last counter word.

Everything here accepts torch tensors and numpy arrays alike: 32-bit words are held in int64, whose
product wraps around to exactly the 64 bits of the unsigned product.
"""

from typing import Any

import numpy as np
import torch

Words = Any  # int64 tensor or array of at least one dimension, values in [0, 2**32)

MASK = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1, as 32-bit fractions
NUM_ROUNDS = 10

COARSE_STREAM, FINE_STREAM = 0, 1  # last counter word
COARSE_PER_BLOCK = 8  # tokens; fine bits: 4


def philox4x32(
    c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words
) -> tuple[Words, Words, Words, Words]:
    """The four output words for counter (c0, c1, c2, c3), all of one shape, and key (k0, k1)."""
    for _ in range(NUM_ROUNDS):
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        # In place, as this is bound by memory. The next c1 and c3 are the low halves of the products;
        # their high bits, and those of the keys, stay until the masks drop them.
        c0 = product_1 >> 32
        c0 ^= c1
        c0 ^= k0
        c0 &= MASK
        c2 = product_0 >> 32
        c2 ^= c3
        c2 ^= k1
        c2 &= MASK
        c1, c3 = product_1, product_0
        k0 = k0 + WEYL_0
        k1 = k1 + WEYL_1
    return c0, c1 & MASK, c2, c3 & MASK


def block_words(
    seeds: Words, positions: Words, blocks: Words, stream: Words | int
) -> tuple[Words, Words, Words, Words]:
    """The words of `blocks` (token ids divided by tokens per block); int64 arguments broadcast."""
    zero = (seeds ^ positions ^ blocks ^ stream) & 0  # of the common shape
    return philox4x32(
        blocks + zero,
        (positions & MASK) + zero,
        ((positions >> 32) & MASK) + zero,
        zero + stream,
        seeds & MASK,
        (seeds >> 32) & MASK,
    )


def token_bits(seeds: Words, positions: Words, token_ids: Words) -> tuple[Words, Words]:
    """Coarse and fine bits of each (seed, position, token id); int64 arguments broadcast."""
    stack = np.stack if isinstance(token_ids, np.ndarray) else torch.stack
    blocks = stack([token_ids >> 3, token_ids >> 2])
    streams = stack([token_ids * 0 + COARSE_STREAM, token_ids * 0 + FINE_STREAM])
    numbers = stack([(token_ids & 7) >> 1, token_ids & 3])
    word = pick(block_words(seeds, positions, blocks, streams), numbers)
    return (word[0] >> ((token_ids & 1) << 4)) & 0xFFFF, word[1]


def pick(words: tuple[Words, Words, Words, Words], number: Words) -> Words:
    """words[number] at each place."""
    low = words[0] + (words[1] - words[0]) * (number == 1)
    high = words[2] + (words[3] - words[2]) * (number == 3)
    return low + (high - low) * (number >= 2)


def gumbel(coarse: Words, fine: Words | int) -> Words:
    """Standard Gumbel noise, float64, from the two parts of a uniform number."""
    if isinstance(coarse, np.ndarray):
        return -np.log(-np.log1p(-(((coarse << 32) + fine + 0.5) * 2.0**-48)))
    u = (((coarse << 32) + fine).to(torch.float64) + 0.5) * 2.0**-48
    return -torch.log(-torch.log1p(-u))


def token_noise(seeds: Words, positions: Words, token_ids: Words) -> Words:
    """Gumbel noise, float64, of each (seed, position, token id); int64 arguments broadcast."""
    return gumbel(*token_bits(seeds, positions, token_ids))
