"""`sample.sample` on the CPU: the same tokens without sorting or drawing for the whole vocabulary.

Each row is worked on alone, so its result cannot depend on the others. Two shortcuts, both exact:

* Truncation needs only the best tokens. A value that at least `budget` tokens reach is read off
  group maxima; the tokens that reach it are a prefix of the wanted order, all ties included. If the
  cut does not fall within them, the budget grows, at last to the whole vocabulary. What is sorted
  are values, not ids: the kept tokens are those above the value at the cut, and of the tokens equal
  to it those with the lowest ids.
* Without truncation, the coarse bits of all tokens bound their scores from both sides, and only
  the few rivals whose upper bound reaches the best lower bound go on.

What is left of all rows, rivals and kept tokens, gets its exact noise in one go.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engine.ops.philox import (
    COARSE_PER_BLOCK,
    COARSE_STREAM,
    Words,
    block_words,
    gumbel,
    token_noise,
)

FloatArray = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

FIRST_BUDGET = 256  # candidates for top_p alone: most nuclei of a language model are smaller
BUDGET_GROWTH = 16
GROUPS_PER_CANDIDATE = 3
MIN_GROUPS = 256  # fewer would be slow: their maxima are taken as one vector
CHUNK_BLOCKS = 12288  # Philox blocks at a time: enough to hide call overhead, few enough for caches
MASS_UNITS = 2**40  # for a weight of 1
LN2 = math.log(2.0)
SLACK = 1e-3  # far above the rounding of bounds in float32


def sample(
    rows: list[FloatArray],
    seeds: Int64Array,
    positions: Int64Array,
    top_k: Int64Array,
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> Int64Array:
    """int64 [n]: a token per row [V] of logits; 0 where the largest logit is not finite."""
    vocab_size = rows[0].size
    best = [row.max() for row in rows]
    left: dict[int, Int64Array] = {}  # row -> tokens that can still win, ascending
    whole: dict[int, FloatArray] = {}  # row -> logits, for rows with (nearly) all tokens left
    for i, row in enumerate(rows):
        if not np.isfinite(best[i]):
            continue
        k = int(top_k[i]) if 1 <= top_k[i] < vocab_size else 0
        if not k and top_p[i] >= 1 and min_p[i] <= 0:
            whole[i] = row
            continue
        kept = kept_tokens(row, best[i], k, float(top_p[i]), float(min_p[i]))
        if kept.size <= vocab_size // 16:
            left[i] = kept
        else:
            whole[i] = np.full_like(row, -np.inf)
            whole[i][kept] = row[kept]
    for i, words in coarse_words(list(whole), vocab_size, seeds, positions):
        left[i] = rivals(whole[i], best[i], words)

    token_ids = np.zeros(len(rows), np.int64)
    contested = []
    for i, ids in left.items():
        token_ids[i] = ids[0]
        if ids.size > 1:
            contested.append(i)
    if contested:
        token_ids[contested] = draw(
            [left[i] for i in contested],
            [rows[i][left[i]] for i in contested],
            seeds[contested],
            positions[contested],
        )
    return token_ids


def draw(
    ids: list[Int64Array], logits: list[FloatArray], seeds: Int64Array, positions: Int64Array
) -> Int64Array:
    """int64 [n]: for each row the one of `ids` with the largest logit + noise.

    `ids` are ascending and not empty in each row; `logits` are theirs; seeds, positions: [n].
    """
    counts = np.array([row_ids.size for row_ids in ids])
    starts = np.cumsum(counts) - counts
    flat_ids = np.concatenate(ids)
    noise = token_noise(np.repeat(seeds, counts), np.repeat(positions, counts), flat_ids)
    scores = np.concatenate(logits) + noise
    highest = np.repeat(np.maximum.reduceat(scores, starts), counts)
    winners = np.flatnonzero(scores == highest)
    return flat_ids[winners[np.searchsorted(winners, starts)]]


def coarse_words(
    rows: list[int], vocab_size: int, seeds: Int64Array, positions: Int64Array
) -> Iterator[tuple[int, list[Words]]]:
    """For each of `rows`, the four words of all Philox blocks with the coarse bits."""
    blocks = np.arange(-(-vocab_size // COARSE_PER_BLOCK))
    rows_at_once = max(1, CHUNK_BLOCKS // len(blocks))
    for first in range(0, len(rows), rows_at_once):
        chunk = rows[first : first + rows_at_once]
        words = block_words(seeds[chunk, None], positions[chunk, None], blocks, COARSE_STREAM)
        for i, row in enumerate(chunk):
            yield row, [word[i] for word in words]


def rivals(row: FloatArray, best: np.float32, words: list[Words]) -> Int64Array:
    """Tokens of `row` [V] that can have the largest logit + noise, given their coarse bits c.

    With u in [c, c + 1) / 2**16 and -log(1 - u) >= u, the noise g is at most -log(c / 2**16). A float's
    bits, read as an integer, are a piecewise linear lower bound of its logarithm, so

        estimate = -ln2 * (bits(c + 1) / 2**23 - 127 - 16) >= -log((c + 1) / 2**16) >= g - ln2

    for c >= 1. Tokens with c = 0, one in 65,536, are always rivals.
    """
    packed = np.empty((len(words[0]), 4), np.uint32)
    for number in range(4):
        packed[:, number] = words[number]
    coarse = packed.view(np.uint16).reshape(-1)[: row.size]  # little-endian: low half first
    scores = coarse.astype(np.float32)
    scores += 1
    scores = scores.view(np.int32).astype(np.float32)
    scores *= -LN2 / 2**23
    scores += LN2 * (127 + 16)
    scores += row - best  # relative to the best logit, so that rounding is small where it matters

    leader = scores.argmax()
    least_noise = gumbel(coarse[leader : leader + 1].astype(np.int64), 2**32 - 1)
    reach = row[leader] - best + least_noise[0] - LN2 - SLACK
    ids = np.flatnonzero((scores >= reach) | (coarse == 0))
    return ids[row[ids] > -np.inf]


def kept_tokens(
    row: FloatArray, best: np.float32, top_k: int, top_p: float, min_p: float
) -> Int64Array:
    """Ids, ascending, of the tokens of `row` [V] left by min_p, top_k (0: off) and top_p."""
    floor = best + np.float32(math.log(min_p)) if min_p > 0 else np.float32(-np.inf)
    total = None
    if top_p < 1 and not top_k:
        eligible = row if min_p <= 0 else row[row >= floor]
        total = weights(eligible, best).sum()
    budget = top_k or (FIRST_BUDGET if top_p < 1 else row.size)
    while True:
        reached = max(value_reached_by(row, budget), floor)
        candidates = np.flatnonzero(row >= reached)
        values = np.sort(row[candidates])[::-1]
        if top_k:
            values = values[:top_k]
        num_kept = values.size
        if top_p < 1:
            sums = weights(values, best).cumsum()
            left = sums[-1] if total is None else total
            # token i stays if the sum of those before it is below the limit; the first always does
            num_kept = 1 + int(np.searchsorted(sums[:-1].astype(np.float64), top_p * float(left)))
        # a cut by top_k, or a cut before the last candidate, or no token beyond the candidates
        if top_k or num_kept < values.size or reached == floor:
            break
        budget *= BUDGET_GROWTH
    cut = values[num_kept - 1]
    kept = candidates[row[candidates] >= cut]
    if kept.size > num_kept:
        equal = np.flatnonzero(row[kept] == cut)
        kept = np.delete(kept, equal[num_kept - kept.size :])
    return kept


def weights(values: FloatArray, best: np.float32) -> Int64Array:
    """Those of tokens with logits `values`, as sample.py defines them."""
    return (np.exp(values - best) * np.float32(MASS_UNITS)).astype(np.int64)


def best_tokens(row: FloatArray, k: int) -> Int64Array:
    """Ids of the `k` largest of `row` [V], ordered by (value descending, id ascending)."""
    ids = kept_tokens(row, row.max(), k, 1.0, 0.0)
    return ids[np.argsort(-row[ids], kind="stable")]


def value_reached_by(row: FloatArray, budget: int) -> np.float32:
    """A value that at least `budget` entries of `row` reach, hardly more if possible; -inf: all."""
    num_groups = max(MIN_GROUPS, GROUPS_PER_CANDIDATE * budget)
    group_size = row.size // num_groups
    if group_size < 2:
        return np.float32(-np.inf)
    maxima = row[: group_size * num_groups].reshape(group_size, num_groups).max(axis=0)
    return np.partition(maxima, num_groups - budget)[num_groups - budget]
