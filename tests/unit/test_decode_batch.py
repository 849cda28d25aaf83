"""The columns of decoding requests: who is due, who leaves, and that plans keep what they were given."""

import random

from engine.request import Request
from engine.scheduler.decode_batch import DecodeBatch, DecodeRows
from tests.unit.test_kv_manager import make

BLOCK = 4


def decoding(req_id: int, num_tokens: int, max_tokens: int = 40) -> Request:
    """A request whose prompt has just been computed, with blocks for no more than that."""
    request = make([1] * num_tokens, req_id=req_id)
    request.row = 100 + req_id
    request.max_total_tokens = num_tokens + max_tokens
    request.num_computed = num_tokens
    request.num_uncommitted = 1
    request.block_ids = list(range(1, 1 - -num_tokens // BLOCK))
    return request


def columns(rows: DecodeRows) -> list[tuple[int, int, int]]:
    """(request id, row, tokens computed before the step)"""
    assert rows.req_ids == [request.req_id for request in rows.requests]
    return list(zip(rows.req_ids, rows.rows.tolist(), rows.num_computed.tolist(), strict=True))


def test_a_request_is_due_when_its_blocks_are_full_and_at_its_last_token():
    batch = DecodeBatch(BLOCK)
    first, second = decoding(1, 8), decoding(2, 6, max_tokens=2)
    batch.join([first, second])
    assert batch.due(10) == [(0, first)]
    first.block_ids.append(50)
    batch.renew_pause(0)
    assert batch.due(10) == []
    batch.advance(10)
    assert batch.due(10) == [(1, second)]  # 7 of its 8 tokens have KV: the last one never gets any
    batch.leave(second)
    assert columns(batch.advance(10)) == [(1, 101, 9)]
    assert (first.num_computed, first.num_uncommitted) == (10, 3)


def test_beyond_the_budget_nobody_is_due_and_nobody_advances():
    batch = DecodeBatch(BLOCK)
    requests = [decoding(i, n) for i, n in ((1, 5), (2, 5), (3, 8))]
    batch.join(requests)
    assert batch.due(2) == []
    assert columns(batch.advance(2)) == [(1, 101, 5), (2, 102, 5)]
    assert [request.num_computed for request in requests] == [6, 6, 8]
    batch.leave(requests[0])
    assert batch.due(2) == [(1, requests[2])]  # it has moved up
    batch.check_invariants()


def test_one_that_left_may_join_again():
    batch = DecodeBatch(BLOCK)
    request = decoding(1, 5)
    batch.join([request])
    batch.leave(request)
    request.row = 7
    batch.join([request])
    assert columns(batch.advance(5)) == [(1, 7, 5)]
    batch.leave(decoding(9, 5))  # never was here
    assert len(batch) == 1


def test_plans_keep_their_columns():
    """Whatever happens later, what a step was given stays as it was."""
    rng = random.Random(5)
    batch, requests, given = DecodeBatch(BLOCK), [], []
    for step in range(200):
        if rng.random() < 0.4:
            new = [decoding(10 * step + i, rng.randrange(1, 12)) for i in range(rng.randrange(3))]
            requests += new
            batch.join(new)
        while due := batch.due(6):
            for place, request in due:
                if request.num_computed >= request.max_kv_tokens or rng.random() < 0.1:
                    batch.leave(request)
                    requests.remove(request)
                else:
                    request.block_ids.append(0)
                    batch.renew_pause(place)
        rows = batch.advance(6)
        assert rows.requests == requests[:6]
        given.append((rows, columns(rows)))
        batch.check_invariants()
    assert all(columns(rows) == before for rows, before in given)
    assert max(len(rows) for rows, _ in given) == 6
