"""Sampling parameters by row, as arrays, with a bit mask of the stages each row needs."""

from collections.abc import Sequence
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from engine.api.sampling import SamplingParams
from engine.ops.penalties import PenaltyParams
from engine.ops.sample import DrawParams
from engine.plan import RowInit

Int64Array = npt.NDArray[np.int64]

MIN_REPETITION_PENALTY = 1e-6


class Needs(IntFlag):
    """Stages beyond one argmax over the raw logits. Rows without bits pay for none of them."""

    DRAW = 1  # temperature and noise
    PENALTIES = 2
    LOGIT_BIAS = 4
    MIN_TOKENS = 8
    LOGPROBS = 16


class SamplingTable:
    """What each row asks for. Arrays are indexed by row; row 0 is the padding row and stays empty."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.needs = np.zeros(num_rows, np.uint8)
        self.temperature = np.ones(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float64)
        self.min_p = np.zeros(num_rows, np.float64)
        self.seed = np.zeros(num_rows, np.int64)
        self.repetition = np.ones(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float32)
        self.num_logprobs = np.zeros(num_rows, np.int64)
        self.min_length = np.zeros(num_rows, np.int64)  # position from which the row may stop
        self.bias_ids: dict[int, Int64Array] = {}
        self.bias_values: dict[int, npt.NDArray[np.float32]] = {}
        self.stop_ids: dict[int, Int64Array] = {}  # masked before min_length

    def set(self, init: RowInit) -> None:
        """Fill in row `init.row`. Raises ValueError if the request has no seed."""
        row, params = init.row, init.params
        if params.seed is None:
            raise ValueError(f"row {row} has no seed: draw one where the request is accepted")
        self.clear(row)
        needs = Needs(0)
        if draws(params):
            needs |= Needs.DRAW
            self.temperature[row] = params.temperature
            self.top_k[row] = min(params.top_k, self.vocab_size)
            self.top_p[row] = params.top_p
            self.min_p[row] = params.min_p
            self.seed[row] = params.seed
        if params.has_penalties:
            needs |= Needs.PENALTIES
            # float32 could not divide by less
            self.repetition[row] = max(params.repetition_penalty, MIN_REPETITION_PENALTY)
            self.frequency[row] = params.frequency_penalty
            self.presence[row] = params.presence_penalty
        bias = {t: b for t, b in params.logit_bias.items() if 0 <= t < self.vocab_size}
        if bias:
            needs |= Needs.LOGIT_BIAS
            self.bias_ids[row] = np.array(list(bias.keys()), np.int64)
            self.bias_values[row] = np.array(list(bias.values()), np.float32)
        if params.min_tokens > 0:
            needs |= Needs.MIN_TOKENS
            self.min_length[row] = init.num_prompt_tokens + params.min_tokens
            stops = set(params.stop_token_ids)
            if not params.ignore_eos:
                stops.update(self.eos_token_ids)
            in_vocab = sorted(t for t in stops if 0 <= t < self.vocab_size)
            self.stop_ids[row] = np.array(in_vocab, np.int64)
        if params.logprobs is not None:
            needs |= Needs.LOGPROBS
            self.num_logprobs[row] = params.logprobs
        self.needs[row] = needs

    def clear(self, row: int) -> None:
        """Back to an empty row. Other fields are not read without their bit in `needs`."""
        self.needs[row] = 0
        self.temperature[row] = 1
        for by_row in (self.bias_ids, self.bias_values, self.stop_ids):
            by_row.pop(row, None)

    def draw_params(self, rows: npt.NDArray[np.int32], positions: Int64Array) -> DrawParams:
        return DrawParams(
            self.seed[rows], positions, self.top_k[rows], self.top_p[rows], self.min_p[rows]
        )

    def penalty_params(self, rows: npt.NDArray[np.int32]) -> PenaltyParams:
        return PenaltyParams(self.repetition[rows], self.frequency[rows], self.presence[rows])


def draws(params: SamplingParams) -> bool:
    """Whether more than the single best token can come out."""
    return not params.is_deterministic
