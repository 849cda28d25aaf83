"""Rows whose next token depends on the ones before: grammars, allowed ids, bad words.

Each such row has a mask of the tokens that may come next, made anew when its token is known. With
overlap a step is launched before the tokens of the one before are known; the forward pass does not
need them, but sampling does. So the loop commits in between:

    CPU  | plan n+1 | forward n+1 | commit n: advance, masks | sample n+1 | plan n+2 | ...
    GPU  | ... forward, sample n ........| forward n+1 ................| sample n+1 ...

Steps without such rows sample at once, and pay for nothing here. A row that is preempted takes its
state along in its tokens: it is made again from them when the row comes back.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from engine.api.grammar import why_it_gave_up
from engine.ops.token_masks import ALL, num_words
from engine.plan import RowEnd, RowInit, StepResult
from engine.runner.grammars import Grammars

logger = logging.getLogger(__name__)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

MOST_MASK_THREADS = 8


@dataclass(slots=True, eq=False)
class Constraint:
    """What one row may do next. It outlives its row if a step of the row is still under way."""

    matcher: LLMatcher | None
    allowed: Int32Array | None  # mask [W] of allowed_token_ids
    never: Int64Array  # ids that are always forbidden
    sequences: list[tuple[tuple[int, ...], int]]  # after these tokens not that one
    stop_ids: Int64Array  # forbidden before min_tokens, by the sampler
    min_tokens: int
    output: list[int]  # the last tokens generated, as many as `sequences` look at
    num_output: int
    mask: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))  # [W]
    end: RowEnd | None = None  # nothing may follow
    reason: str = ""  # of RowEnd.FAILED, for the client

    def advance(self, token: int) -> None:
        self.num_output += 1
        if self.sequences:
            self.output.append(token)
        if self.matcher is not None:
            self.matcher.consume_token(token)

    def finish_mask(self) -> None:
        """From what the grammar allows to what the row may do; or find that there is nothing."""
        matcher = self.matcher
        if matcher is not None and matcher.is_error():
            error = matcher.get_error()
            logger.warning("a grammar gave up: %s", " ".join(error.split())[:200])
            self.end, self.reason = RowEnd.FAILED, why_it_gave_up(error)
            return
        if matcher is not None and matcher.is_stopped():
            self.end = RowEnd.COMPLETE
            return
        if self.allowed is not None:
            self.mask &= self.allowed
        clear(self.mask, self.never)
        banned = [last for before, last in self.sequences if self._ends_with(before)]
        clear(self.mask, np.array(banned, np.int64))
        rest = self.mask
        if self.num_output < self.min_tokens:
            rest = rest.copy()
            clear(rest, self.stop_ids)
        if not rest.any():
            self.end = RowEnd.COMPLETE

    def report(self, index: int, result: StepResult) -> None:
        """Note in `result`, of whose samples this is number `index`, that nothing may follow."""
        if self.end is not None:
            result.ends[index] = self.end
            if self.reason:
                result.reasons[index] = self.reason

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return self.output[-len(tokens) :] == list(tokens)


class RowConstraints:
    """The constraints of running rows, and the masks of a step."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.grammars = Grammars()
        self.of_row: dict[int, Constraint] = {}
        self.executor: LLExecutor | None = None  # threads for the masks of several rows

    def learn(self, pieces: Sequence[bytes], special_ids: Sequence[int]) -> None:
        """The vocabulary, before the first grammar."""
        self.grammars.learn(pieces, special_ids, self.eos_token_ids)

    def add(self, init: RowInit) -> None:
        """A request starts or resumes on row `init.row`; its grammar has been compiled."""
        self.free(init.row)
        if not init.params.has_constraints:
            return
        constraint = self._make(init)
        self.of_row[init.row] = constraint
        self._renew([constraint])

    def free(self, row: int) -> None:
        """The request on `row` is gone; a row that is free already stays so."""
        if self.of_row:
            self.of_row.pop(row, None)

    def among(self, rows: Int32Array) -> list[tuple[int, Constraint]]:
        """(index, constraint) of those of `rows` that have one."""
        if not self.of_row:
            return []
        found = ((index, self.of_row.get(row)) for index, row in enumerate(rows.tolist()))
        return [(index, constraint) for index, constraint in found if constraint is not None]

    def masks(self, constrained: list[tuple[int, Constraint]]) -> tuple[Int64Array, Int32Array]:
        """Places [n] of those that go on, ascending, and their masks [n, W] (engine/ops/token_masks.py)."""
        going_on = [(index, one.mask) for index, one in constrained if one.end is None]
        masks = np.empty((len(going_on), num_words(self.vocab_size)), np.int32)
        for place, (_, mask) in enumerate(going_on):
            masks[place] = mask
        return np.array([index for index, _ in going_on], np.int64), masks

    def advance(self, constrained: list[tuple[int, Constraint]], result: StepResult) -> None:
        """Take in the tokens of a step, and note in `result.ends` which rows have ended."""
        going_on = []
        for index, constraint in constrained:
            if constraint.end is not None:  # its mask was empty: the token means nothing
                if constraint.end is RowEnd.COMPLETE:
                    result.ends[index] = RowEnd.STUCK
                else:
                    constraint.report(index, result)
            elif result.is_bad is None or not result.is_bad[index]:
                constraint.advance(int(result.token_ids[index]))
                going_on.append((index, constraint))
        self._renew([constraint for _, constraint in going_on])
        for index, constraint in going_on:
            constraint.report(index, result)

    def _make(self, init: RowInit) -> Constraint:
        params = init.params
        output = init.token_ids[init.num_prompt_tokens :].tolist()
        matcher = None
        if params.structured is not None:
            matcher = self.grammars.matcher(params.structured)
            matcher.consume_tokens(output)
        never = [ids[0] for ids in params.bad_word_ids if len(ids) == 1]
        stops = list(params.stop_token_ids)
        if not params.ignore_eos:
            stops += self.eos_token_ids
        elif matcher is not None:
            never += self.eos_token_ids  # it would end the text
        allowed = None
        if params.allowed_token_ids is not None:
            allowed = np.zeros(num_words(self.vocab_size), np.int32)
            set_bits(allowed, self._known(params.allowed_token_ids))
        return Constraint(
            matcher=matcher,
            allowed=allowed,
            never=self._known(never),
            sequences=[(tuple(ids[:-1]), ids[-1]) for ids in params.bad_word_ids if len(ids) > 1],
            stop_ids=self._known(stops),
            min_tokens=params.min_tokens,
            output=output,
            num_output=len(output),
        )

    def _known(self, ids: list[int]) -> Int64Array:
        return np.array([t for t in ids if 0 <= t < self.vocab_size], np.int64)

    def _renew(self, constraints: list[Constraint]) -> None:
        """Masks after the tokens known now."""
        masks = np.full((len(constraints), num_words(self.vocab_size)), ALL, np.int32)
        matchers = []
        for index, constraint in enumerate(constraints):
            constraint.mask = masks[index]
            if constraint.matcher is not None:
                matchers.append((constraint.matcher, index))
        row_bytes = masks.shape[1] * masks.itemsize
        if len(matchers) == 1:
            matcher, index = matchers[0]
            matcher.unsafe_compute_mask_ptr(masks[index].ctypes.data, row_bytes)
        elif matchers:
            if self.executor is None:
                threads = (os.cpu_count() or 2) // 2
                self.executor = LLExecutor(max(1, min(threads, MOST_MASK_THREADS)))
            self.executor.unsafe_compute_mask_ptr(
                matchers, masks.ctypes.data, row_bytes, len(masks)
            )
        for constraint in constraints:
            constraint.finish_mask()


def set_bits(mask: Int32Array, ids: Int64Array) -> None:
    np.bitwise_or.at(mask.view(np.uint32), ids // 32, bits_of(ids))


def clear(mask: Int32Array, ids: Int64Array) -> None:
    if ids.size:
        np.bitwise_and.at(mask.view(np.uint32), ids // 32, ~bits_of(ids))


def bits_of(ids: Int64Array) -> npt.NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32))
