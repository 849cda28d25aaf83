"""The requests that decode, kept as columns from step to step.

In most steps the same requests compute one more token each. Such a step costs a few operations on
whole columns and two counts for each request; only those that need something are looked at:

    num_computed  [ 17  31  80  64 ]   + 1 with every step
    pause_at      [ 32  32  90  64 ]   where the blocks at hand are full, or the last token is launched
                                ▲ due: it needs a block, or has to leave

Plans and launched steps refer to the columns of `DecodeRows`. These are never written to, but replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan import Int32Array
from engine.request import Request


@dataclass(slots=True)
class DecodeRows:
    """Requests with one token each in a step, in columns."""

    requests: list[Request]
    req_ids: list[int]
    rows: Int32Array
    max_tokens: Int32Array  # prompt and output
    num_computed: Int32Array  # before the step

    def __len__(self) -> int:
        return len(self.requests)

    def first(self, n: int) -> "DecodeRows":
        if n >= len(self):
            return self
        return DecodeRows(
            self.requests[:n],
            self.req_ids[:n],
            self.rows[:n],
            self.max_tokens[:n],
            self.num_computed[:n],
        )


class DecodeBatch:
    """Running requests behind their prefill that have tokens to come, in the order of joining."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        none = np.zeros(0, np.int32)
        self._rows = DecodeRows([], [], none, none, none)
        self._pause_at = none
        self._left: set[Request] = set()  # to be taken out before the columns are used again

    def __len__(self) -> int:
        self._take_out()
        return len(self._rows)

    def join(self, requests: Sequence[Request]) -> None:
        """The steps that complete their prefills are planned: from now on they decode."""
        self._take_out()
        old = self._rows
        self._rows = DecodeRows(
            [*old.requests, *requests],
            [*old.req_ids, *(r.req_id for r in requests)],
            joined(old.rows, [r.row for r in requests]),
            joined(old.max_tokens, [r.max_total_tokens for r in requests]),
            joined(old.num_computed, [r.num_computed for r in requests]),
        )
        self._pause_at = joined(self._pause_at, [self._pause_of(r) for r in requests])

    def leave(self, request: Request) -> None:
        """No more tokens for this request. One that is not here stays away."""
        self._left.add(request)

    def due(self, most: int) -> list[tuple[int, Request]]:
        """(place, request) of those among the first `most` that cannot go on as they are.

        Places are good until the next call of anything but `leave` and `renew_pause`.
        """
        self._take_out()
        is_due = self._rows.num_computed[:most] >= self._pause_at[:most]
        return [(place, self._rows.requests[place]) for place in places(is_due)]

    def renew_pause(self, place: int) -> None:
        """The request there has got blocks."""
        self._pause_at[place] = self._pause_of(self._rows.requests[place])

    def advance(self, most: int) -> DecodeRows:
        """One token more for the first `most`, none of which may be due: computed, and uncommitted."""
        self._take_out()
        rows = self._rows
        granted = rows.first(most)
        for request in granted.requests:
            request.num_computed += 1
            request.num_uncommitted += 1
        num_computed = rows.num_computed + 1
        num_computed[len(granted) :] -= 1
        self._rows = DecodeRows(
            rows.requests, rows.req_ids, rows.rows, rows.max_tokens, num_computed
        )
        return granted

    def _pause_of(self, request: Request) -> int:
        return min(len(request.block_ids) * self._block_size, request.max_kv_tokens)

    def _take_out(self) -> None:
        if not self._left:
            return
        old = self._rows
        keep = [i for i, request in enumerate(old.requests) if request not in self._left]
        self._left.clear()
        if len(keep) == len(old):
            return
        self._rows = DecodeRows(
            [old.requests[i] for i in keep],
            [old.req_ids[i] for i in keep],
            old.rows[keep],
            old.max_tokens[keep],
            old.num_computed[keep],
        )
        self._pause_at = self._pause_at[keep]

    def check_invariants(self) -> None:
        """Raise AssertionError unless the columns say what the requests say."""
        self._take_out()
        rows = self._rows
        for request, req_id, row, max_tokens, num_computed, pause_at in zip(
            rows.requests,
            rows.req_ids,
            rows.rows.tolist(),
            rows.max_tokens.tolist(),
            rows.num_computed.tolist(),
            self._pause_at.tolist(),
            strict=True,
        ):
            assert (req_id, row) == (request.req_id, request.row), "a column is out of order"
            assert max_tokens == request.max_total_tokens, "a length limit has changed"
            assert num_computed == request.num_computed, "computed tokens miscounted"
            assert num_computed <= pause_at == self._pause_of(request), "a pause was missed"


def places(mask: npt.NDArray[np.bool_]) -> list[int]:
    """Where it is set."""
    return mask.nonzero()[0].tolist()


def joined(column: Int32Array, values: list[int]) -> Int32Array:
    return np.concatenate([column, np.array(values, np.int32)])
