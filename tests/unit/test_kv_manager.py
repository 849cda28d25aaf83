"""Block tables, prefix look-up and naming, without a scheduler."""

from array import array

import pytest

from engine.api.hashing import block_names
from engine.api.messages import AddRequest
from engine.api.sampling import SamplingParams
from engine.kv.block_pool import BlockState
from engine.kv.host_tier import HostTier
from engine.kv.manager import KVCacheManager
from engine.request import Request, RequestStatus, make_request

SIZE = 4


def runs(kv: KVCacheManager) -> list[tuple[BlockState, int]]:
    states, lengths = kv.map()
    return [(BlockState(s), n) for s, n in zip(states.tolist(), lengths.tolist(), strict=True)]


def make(token_ids: list[int], names: bool = True, salt: str = "", req_id: int = 1) -> Request:
    raw = array("i", token_ids).tobytes()
    msg = AddRequest(
        req_id=req_id,
        token_ids=raw,
        block_names=block_names(raw, SIZE, salt) if names else b"",
        params=SamplingParams(max_tokens=20),
        arrival_ns=0,
        cache_salt=salt,
    )
    request = make_request(msg, req_id, 100, SIZE, frozenset())
    request.status = RequestStatus.RUNNING
    return request


def prefill(kv: KVCacheManager, request: Request) -> int:
    """Attach what is cached and compute the rest in one step. Returns the cached tokens."""
    cached = kv.attach_prefix(request, kv.find_prefix(request))
    assert kv.extend(request, len(request.token_ids) - cached)
    request.num_computed = len(request.token_ids)
    kv.name_full_blocks(request)
    return cached


def test_extend_takes_what_is_missing_and_no_more():
    kv = KVCacheManager(10, SIZE, True)
    request = make(list(range(10)))
    assert kv.extend(request, 4)
    assert len(request.block_ids) == 1
    request.num_computed = 4
    assert kv.extend(request, 1)
    assert len(request.block_ids) == 2
    request.num_computed = 5
    assert kv.extend(request, 3)
    assert len(request.block_ids) == 2
    assert kv.num_free_blocks == 7


def test_extend_is_all_or_nothing():
    kv = KVCacheManager(4, SIZE, True)
    request = make(list(range(16)))
    assert not kv.extend(request, 16)
    assert request.block_ids == []
    assert kv.num_free_blocks == 3
    assert kv.extend(request, 12)


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (15, 12)])
def test_a_prefix_hit_leaves_at_least_one_token_to_compute(length: int, cached: int) -> None:
    kv = KVCacheManager(20, SIZE, True)
    prefill(kv, make(list(range(16))))
    second = make(list(range(length)), req_id=2)
    assert prefill(kv, second) == cached


def test_blocks_are_shared_while_used_and_found_after_release():
    kv = KVCacheManager(20, SIZE, True)
    first, second, third = (make(list(range(10)), req_id=i) for i in (1, 2, 3))
    prefill(kv, first)
    prefill(kv, second)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.num_shared_blocks == 2
    kv.check_invariants([first, second])
    table = first.block_ids.copy()
    kv.release(first)
    kv.release(second)
    assert kv.num_free_blocks == kv.num_usable_blocks
    assert prefill(kv, third) == 8
    assert third.block_ids[:2] == table[:2]
    assert third.num_shared_blocks == 0
    kv.check_invariants([third])


def test_different_prefixes_and_salts_do_not_share():
    kv = KVCacheManager(30, SIZE, True)
    prefill(kv, make([9, 1, 2, 3, 4, 5, 6, 7, 8]))
    other_start = make([0, 1, 2, 3, 4, 5, 6, 7, 8], req_id=2)
    other_salt = make([9, 1, 2, 3, 4, 5, 6, 7, 8], salt="tenant", req_id=3)
    assert kv.find_prefix(other_start) == []
    assert kv.find_prefix(other_salt) == []


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_output_blocks_continue_the_chain_of_names(salt: str) -> None:
    kv = KVCacheManager(30, SIZE, True)
    request = make([1, 2], salt=salt)
    prefill(kv, request)
    for token in range(3, 12):
        request.token_ids.append(token)
        assert kv.extend(request, 1)
        request.num_computed += 1
        kv.name_full_blocks(request)
    assert request.num_named_blocks == 2
    kv.release(request)
    longer = make(list(range(1, 20)), salt=salt, req_id=2)
    assert prefill(kv, longer) == 8


def test_names_are_computed_when_the_message_brought_none():
    kv = KVCacheManager(30, SIZE, True)
    request = make(list(range(9)), names=False)
    prefill(kv, request)
    assert b"".join(request.block_names) == block_names(array("i", range(8)).tobytes(), SIZE)
    assert len(kv.find_prefix(make(list(range(9)), req_id=2))) == 2


def test_a_block_is_named_only_when_all_its_tokens_are_known_and_computed():
    kv = KVCacheManager(30, SIZE, True)
    request = make(list(range(7)))
    kv.extend(request, 8)
    request.num_computed = 8  # the eighth token is launched, its value unknown
    kv.name_full_blocks(request)
    assert request.num_named_blocks == 1
    request.token_ids.append(7)
    kv.name_full_blocks(request)
    assert request.num_named_blocks == 2
    request.token_ids.extend(range(8, 12))  # known, not computed
    kv.name_full_blocks(request)
    assert request.num_named_blocks == 2


def test_without_prefix_caching_nothing_is_named_or_found():
    kv = KVCacheManager(30, SIZE, False)
    first = make(list(range(9)))
    assert prefill(kv, first) == 0
    kv.release(first)
    assert runs(kv) == [(BlockState.RESERVED, 1), (BlockState.FREE, 29)]
    assert prefill(kv, make(list(range(9)), req_id=2)) == 0


def test_release_gives_the_end_of_a_prefix_back_first():
    kv = KVCacheManager(5, SIZE, True)
    first = make(list(range(17)))
    kv.extend(first, 16)
    first.num_computed = 16
    kv.name_full_blocks(first)
    kv.release(first)
    small = make([50, 51, 52], req_id=2)
    prefill(kv, small)  # evicts one block: the last of the prefix
    assert len(kv.find_prefix(make(list(range(17)), req_id=3))) == 3


def test_release_and_forget_leaves_nothing_to_find():
    kv = KVCacheManager(20, SIZE, True)
    first, second = make(list(range(9))), make(list(range(9)), req_id=2)
    prefill(kv, first)
    prefill(kv, second)
    kv.release(first)
    kv.retire(first, is_bad=True)
    assert kv.find_prefix(make(list(range(9)), req_id=3)) == []
    kv.check_invariants([second])
    kv.release(second)
    assert runs(kv) == [(BlockState.RESERVED, 1), (BlockState.FREE, 19)]


def test_start_is_all_or_nothing():
    kv = KVCacheManager(6, SIZE, True, HostTier(4, keeps_all=True))
    first = make(list(range(9)))
    prefill(kv, first)
    kv.release(first)
    other = make(list(range(20, 37)), req_id=2)
    prefill(kv, other)  # takes all five blocks: those of the first one go to the host
    kv.release(other)
    small = make([50, 51], req_id=3)
    prefill(kv, small)
    again = make(list(range(17)), req_id=4)
    prefix = kv.find_prefix(again)
    assert prefix == [0, 0]
    assert not kv.start(again, prefix, 9)  # five blocks, and four are free
    assert again.block_ids == []
    assert kv.num_free_blocks == 4
    kv.check_invariants([small])
    assert kv.start(again, prefix, 8)
    assert (len(again.block_ids), again.num_computed, again.num_named_blocks) == (4, 8, 2)
    assert [kv.pool.name_of(block) for block in again.block_ids[:2]] == again.block_names[:2]
    kv.check_invariants([small, again])


def test_a_request_gone_bad_leaves_nothing_on_the_host():
    kv = KVCacheManager(5, SIZE, True, HostTier(4, keeps_all=True))
    first, other = make(list(range(9))), make(list(range(20, 36)), req_id=2)
    prefill(kv, first)
    kv.release(first)
    prefill(kv, other)
    assert kv.find_prefix(make(list(range(9)), req_id=3)) == [0, 0]
    kv.retire(first, is_bad=True)
    assert kv.find_prefix(make(list(range(9)), req_id=3)) == []


def test_map_shows_states_run_length_encoded():
    kv = KVCacheManager(12, SIZE, True)
    first, second = make(list(range(9))), make(list(range(9)), req_id=2)
    prefill(kv, first)
    prefill(kv, second)
    gone = make([7] * 4, req_id=3)
    prefill(kv, gone)
    kv.release(gone)
    states = [state for state, length in runs(kv) for _ in range(length)]
    assert len(states) == 12
    assert states[0] is BlockState.RESERVED
    assert [states[b] for b in first.block_ids] == [
        BlockState.SHARED,
        BlockState.SHARED,
        BlockState.USED,
    ]
    assert states[second.block_ids[2]] is BlockState.USED
    assert states.count(BlockState.CACHED) == 1
    assert states.count(BlockState.FREE) == 6


def test_check_invariants_notices_a_lost_reference():
    kv = KVCacheManager(12, SIZE, True)
    request = make(list(range(9)))
    prefill(kv, request)
    with pytest.raises(AssertionError, match="0 owners"):
        kv.check_invariants([])
    request.block_ids[0] = request.block_ids[1]
    with pytest.raises(AssertionError, match="holds a block twice"):
        kv.check_invariants([request])
