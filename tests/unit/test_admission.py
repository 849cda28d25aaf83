"""Admission: what can never run, what fits now, and the future peak against a brute-force simulation."""

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.messages import AddRequest, FinishReason
from engine.api.sampling import SamplingParams
from engine.kv.manager import KVCacheManager
from engine.request import Request, RequestStatus, make_request
from engine.scheduler.admission import (
    GreedyAdmission,
    OutputLengths,
    PeakAdmission,
    why_never,
)

SIZE = 4
MODEL_LEN = 10_000


def make(num_prompt: int, max_tokens: int | None, req_id: int = 1, num_prior: int = 0) -> Request:
    msg = AddRequest(
        req_id=req_id,
        token_ids=array("i", range(num_prompt + num_prior)).tobytes(),
        block_names=b"",
        params=SamplingParams(max_tokens=max_tokens),
        arrival_ns=0,
        num_prior_output=num_prior,
    )
    return make_request(msg, req_id, MODEL_LEN, SIZE, frozenset())


def start(kv: KVCacheManager, request: Request, num_output: int = 0) -> Request:
    """Bring a request into the state after its prefill and `num_output` committed tokens."""
    request.status = RequestStatus.RUNNING
    request.num_prefill_tokens = request.num_prompt_tokens
    assert kv.extend(request, request.num_prompt_tokens + max(0, num_output - 1))
    request.num_computed = request.num_prompt_tokens + max(0, num_output - 1)
    request.token_ids.extend([0] * num_output)
    return request


# --- never ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "code", "advice"),
    [
        (0, 5, "empty_prompt", "at least one"),
        (100, 5, "context_length_exceeded", "--max-model-len"),
        (150, None, "context_length_exceeded", "99 or fewer"),
        (30, 20, "exceeds_kv_capacity", "need 13 KV blocks of 4 tokens, but the cache has 10"),
    ],
)
def test_impossible_requests_are_named_with_advice(
    num_prompt: int, max_tokens: int | None, code: str, advice: str
) -> None:
    rejection = why_never(make(num_prompt, max_tokens), KVCacheManager(11, SIZE, True), 100, None)
    assert rejection is not None
    assert rejection.code == code
    assert advice in rejection.message


def test_the_last_token_needs_no_kv():
    kv = KVCacheManager(11, SIZE, True)
    assert why_never(make(30, 11), kv, 100, None) is None  # 41 tokens, 40 of them in 10 blocks
    assert why_never(make(30, 12), kv, 100, None) is not None


def test_without_chunks_a_prompt_has_to_fit_the_budget():
    kv = KVCacheManager(100, SIZE, True)
    assert why_never(make(16, 5), kv, 100, 16) is None
    rejection = why_never(make(17, 5), kv, 100, 16)
    assert rejection is not None
    assert "--enable-chunked-prefill" in rejection.message
    assert (rejection.size, rejection.limit) == (17, 16)
    assert why_never(make(10, 20, num_prior=9), kv, 100, 16) is None  # a resumed one may be split


# --- greedy -----------------------------------------------------------------------------------------


def test_greedy_looks_at_free_blocks_and_shared_ones_only():
    kv = KVCacheManager(6, SIZE, True)
    start(kv, make(8, 100))
    admission = GreedyAdmission(kv)
    assert admission.check(make(12, 5000), 0).fits
    assert not admission.check(make(13, 1), 0).fits
    assert admission.check(make(13, 1), 1).fits


# --- peak -------------------------------------------------------------------------------------------


def simulate_peak(held: list[int], to_come: list[int]) -> int:
    """Most blocks at any time when all grow one token a step and leave at their end, by stepping."""
    peak = 0
    for now in range(max(to_come) + 1):
        alive = [h + now for h, t in zip(held, to_come, strict=True) if t >= now]
        peak = max(peak, sum(-(-tokens // SIZE) for tokens in alive))
    return peak


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=12))
def test_peak_bounds_the_simulated_peak_closely(shapes: list[tuple[int, int]]) -> None:
    kv = KVCacheManager(2000, SIZE, True)
    lengths = OutputLengths()
    *others, (num_prompt, max_tokens) = shapes
    running = [start(kv, make(p, m, i), num_output=1) for i, (p, m) in enumerate(others)]
    candidate = make(num_prompt, max_tokens, 99)
    requests = [*running, candidate]
    held = [min(len(r.token_ids), r.max_kv_tokens) for r in requests]
    to_come = [r.max_kv_tokens - h for r, h in zip(requests, held, strict=True)]
    exact = simulate_peak(held, to_come)

    need = kv.num_usable_blocks + 1  # what is surely too much
    admission = PeakAdmission(kv, lengths, running)
    admission._capacity = 0  # look closely
    need = admission.check(candidate, 0).need
    assert exact <= need <= exact + len(requests)
    if not running:
        assert need == exact == kv.blocks_for(candidate.max_kv_tokens)


def test_short_requests_that_end_first_make_room():
    """A leaves before B needs its space: together they fit, though their sums do not."""
    kv = KVCacheManager(26, SIZE, True)  # 100 tokens
    running = [start(kv, make(60, 4), num_output=1)]
    admission = PeakAdmission(kv, OutputLengths(), running)
    long, longer = make(20, 60), make(40, 60)
    assert kv.blocks_for(63) + kv.blocks_for(79) > 25
    assert admission.check(long, 0).fits
    verdict = admission.check(longer, 0)
    assert not verdict.fits
    assert verdict.have == 25


def test_admitted_requests_count_for_the_next_candidate():
    kv = KVCacheManager(21, SIZE, True)
    admission = PeakAdmission(kv, OutputLengths(), [])
    first, second = make(20, 30, 1), make(20, 30, 2)
    assert admission.check(first, 0).fits
    start(kv, first)
    admission.admit(first)
    assert not admission.check(second, 0).fits
    assert admission.check(make(20, 10, 3), 0).fits


def test_shared_blocks_are_charged_once():
    kv = KVCacheManager(16, SIZE, True)
    first = make(41, 4, 1)
    assert kv.extend(first, 41)
    first.status = RequestStatus.RUNNING
    first.num_prefill_tokens = first.num_computed = 41
    kv.name_full_blocks(first)
    admission = PeakAdmission(kv, OutputLengths(), [first])
    second = make(41, 4, 2)
    assert not admission.check(second, 0).fits
    assert admission.check(second, 10).fits

    # the bringer leaves: its blocks still count, through the one who shares them
    second.block_names = first.block_names.copy()
    kv.attach_prefix(second, kv.find_prefix(second))
    assert second.num_shared_blocks == 10
    assert kv.extend(second, 1)
    second.num_computed = second.num_prefill_tokens = 41
    kv.release(first)
    alone = PeakAdmission(kv, OutputLengths(), [second])
    assert alone.check(make(12, 4, 3), 0).fits
    assert not alone.check(make(16, 4, 4), 0).fits


def test_a_lone_request_that_fits_the_pool_is_always_admitted():
    for num_blocks in range(2, 12):
        kv = KVCacheManager(num_blocks, SIZE, True)
        for num_prompt in range(1, SIZE * num_blocks):
            for max_tokens in range(1, 10):
                request = make(num_prompt, max_tokens)
                if why_never(request, kv, MODEL_LEN, None) is None:
                    assert PeakAdmission(kv, OutputLengths(), []).check(request, 0).fits
                    assert GreedyAdmission(kv).check(request, 0).fits


# --- learnt lengths ---------------------------------------------------------------------------------


def finish(lengths: OutputLengths, num_output: int, reason: FinishReason, times: int = 1) -> None:
    request = make(5, None)
    request.token_ids.extend([0] * num_output)
    for _ in range(times):
        lengths.record(request, reason)


def test_large_limits_are_replaced_by_what_completions_really_take():
    lengths = OutputLengths()
    request = make(10, 5000)
    assert lengths.draw_kv_tokens(request) == 10 + OutputLengths.GUESS
    finish(lengths, 40, FinishReason.STOP, times=OutputLengths.MEMORY)
    assert lengths.mean == 40
    assert lengths.draw_kv_tokens(request) == 50
    assert lengths.draw_kv_tokens(make(10, 20)) == 29  # its own limit is lower
    request.token_ids.extend([0] * 100)  # outlived them all
    assert 110 < lengths.draw_kv_tokens(request) < 10 + 5000


def test_aborts_errors_and_short_cuts_teach_nothing():
    lengths = OutputLengths()
    for reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.LENGTH):
        finish(lengths, 3, reason, times=OutputLengths.MEMORY)
    assert lengths.mean == OutputLengths.GUESS
    finish(lengths, 3000, FinishReason.LENGTH, times=OutputLengths.MEMORY)
    assert lengths.mean == 3000


def test_draws_spread_over_the_lengths_that_are_still_possible():
    lengths = OutputLengths()
    for length in np.tile(np.arange(1, 101), 4):
        finish(lengths, int(length), FinishReason.STOP)
    fresh = [lengths.draw_kv_tokens(make(5, None, i)) - 5 for i in range(200)]
    assert 45 <= np.mean(fresh) <= 56
    assert (min(fresh), max(fresh)) == (1, 100)
    old = [lengths.draw_kv_tokens(make(5, None, i, num_prior=60)) - 5 for i in range(200)]
    assert min(old) == 61
    assert 75 <= np.mean(old) <= 86
    assert [lengths.draw_kv_tokens(make(5, None, 7)) for _ in range(3)] == [fresh[7] + 5] * 3
