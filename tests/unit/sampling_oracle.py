"""Sampling written down a second time: one row, one token at a time, in Python and numpy scalars."""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from engine.api.sampling import SamplingParams

FloatArray = npt.NDArray[np.float32]
NEVER = np.float32(-np.inf)


def philox_words(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 (Salmon et al. 2011) in Python integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b % 2**32, (a >> 32) ^ x3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


@lru_cache(maxsize=100_000)
def uniform(seed: int, position: int, token_id: int) -> float:
    """The 48-bit uniform number of a token, as engine/ops/philox.py documents it."""
    key = (seed % 2**32, (seed // 2**32) % 2**32)

    def words(block: int, stream: int) -> tuple[int, ...]:
        return philox_words((block, position % 2**32, position // 2**32, stream), key)

    word = words(token_id // 8, 0)[token_id % 8 // 2]
    coarse = word // 2**16 if token_id % 2 else word % 2**16
    fine = words(token_id // 4, 1)[token_id % 4]
    return (coarse * 2**32 + fine + 0.5) / 2**48


def noise(seed: int, position: int, token_id: int) -> float:
    return -math.log(-math.log1p(-uniform(seed, position, token_id)))


def processed(
    logits: FloatArray, params: SamplingParams, prompt: list[int], output: list[int], eos: list[int]
) -> FloatArray:
    """The row after bias, min_tokens and penalties, in that order."""
    row = logits.copy()
    for token_id, bias in params.logit_bias.items():
        row[token_id] += np.float32(bias)
    if len(output) < params.min_tokens:
        for token_id in params.stop_token_ids + ([] if params.ignore_eos else eos):
            row[token_id] = NEVER
    repetition = np.float32(params.repetition_penalty)
    for token_id in sorted(set(prompt + output)):
        value = row[token_id]
        value = value / repetition if value > 0 else value * repetition
        count = output.count(token_id)
        value = value - np.float32(count) * np.float32(params.frequency_penalty)
        if count:
            value = value - np.float32(params.presence_penalty)
        row[token_id] = value
    return row


def survivors(scaled: FloatArray, params: SamplingParams) -> list[int]:
    """Token ids left by min_p, top_k and top_p, best first."""
    ids = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    best = scaled[ids[0]]
    if params.min_p > 0:
        floor = best + np.float32(math.log(params.min_p))
        ids = [token_id for token_id in ids if scaled[token_id] >= floor]
    if params.top_k >= 1:
        ids = ids[: params.top_k]
    if params.top_p >= 1:
        return ids
    weights = [float(np.exp(scaled[token_id] - best)) for token_id in ids]
    limit = params.top_p * math.fsum(weights)
    kept, mass = [], 0.0
    for token_id, weight in zip(ids, weights, strict=True):
        if kept and mass >= limit:
            break
        kept.append(token_id)
        mass += weight
    return kept


def choose(
    logits: FloatArray, params: SamplingParams, prompt: list[int], output: list[int], eos: list[int]
) -> int:
    """The token that the sampler must return after `prompt` and `output`."""
    row = processed(logits, params, prompt, output, eos)
    if params.temperature < 1e-5 or params.top_k == 1 or params.top_p == 0:
        return int(np.flatnonzero(row == row.max())[0])
    assert params.seed is not None
    scaled = row / np.float32(params.temperature)
    position = len(prompt) + len(output)
    score = {
        token_id: float(scaled[token_id]) + noise(params.seed, position, token_id)
        for token_id in survivors(scaled, params)
    }
    return min(score, key=lambda token_id: (-score[token_id], token_id))
