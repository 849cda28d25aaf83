"""The scheduler, one rule at a time, on the toy engine (which checks all KV on the way)."""

import random

import numpy as np
import pytest

from engine.api.messages import AbortReason, FinishReason
from engine.api.sampling import SamplingParams
from engine.plan import RowLogprobs, StepPlan, StepResult
from engine.request import Request, RequestStatus
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.decisions import DecisionLog, Reason, StepRecord
from engine.scheduler.decode_batch import DecodeBatch
from engine.scheduler.draft import StepDraft
from engine.scheduler.policy import WaitingQueue, queue_key
from tests.unit.test_kv_manager import make as make_request
from tests.unit.toy_engine import EOS, MODEL_LEN, STOP_TOKEN, ToyEngine, undisturbed

IN_FLIGHT = pytest.mark.parametrize("depth", [0, 1])  # in sequence, overlapped


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first * 13 + i * 7) % 50 for i in range(length)]


def free_run(max_tokens: int | None, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def prompt_that_says(token: int, at: int) -> list[int]:
    """A prompt whose undisturbed output has `token` at index `at`, and nothing special before."""
    for first in range(5000):
        prompt = [first % 50, first // 50, 3]
        output = undisturbed(prompt, free_run(at + 1), MODEL_LEN)
        if output[at] == token and not {EOS, STOP_TOKEN} & set(output[:at]):
            return prompt
    raise AssertionError("no such prompt")


# --- the plan ---------------------------------------------------------------------------------------


def test_nothing_to_do_is_no_plan():
    engine = ToyEngine()
    assert engine.scheduler.schedule(0) is None
    assert engine.scheduler.take_output(0, 0) is None
    assert not engine.scheduler.has_work()


def test_first_plan_of_a_request():
    engine = ToyEngine()
    engine.add(5, prompt_of(6), free_run(4))
    plan = engine.step()
    assert plan is not None
    assert plan.num_decodes == 0
    assert plan.req_ids == [5]
    assert plan.num_tokens.tolist() == [6]
    assert plan.num_computed.tolist() == [0]
    assert plan.samples.tolist() == [True]
    assert plan.prompt_tokens.tolist() == prompt_of(6)
    assert plan.prompt_tokens.dtype == plan.rows.dtype == np.int32
    (init,) = plan.new_rows
    assert init.row == plan.rows[0] > 0
    assert (init.num_prompt_tokens, init.num_computed, len(init.block_ids)) == (6, 0, 2)
    assert plan.appended == []


def test_blocks_are_appended_as_decoding_needs_them():
    engine = ToyEngine(block_size=4)
    engine.add(1, prompt_of(3), free_run(12))
    plans = [engine.step() for _ in range(8)]
    appended = [plan.appended for plan in plans if plan]
    assert [bool(a) for a in appended] == [False, False, True, False, False, False, True, False]
    row = int(plans[0].rows[0])
    assert [(r, index, len(ids)) for r, index, ids in appended[2]] == [(row, 1, 1)]


def test_decodes_come_first_and_get_their_token_before_prefills():
    engine = ToyEngine(budget=8, num_blocks=60)
    engine.add(1, prompt_of(8), free_run(20))
    engine.step()
    engine.add(2, prompt_of(30, 2), free_run(20))
    plan = engine.step()
    assert plan.req_ids == [1, 2]
    assert plan.num_decodes == 1
    assert plan.num_tokens.tolist() == [1, 7]
    assert plan.samples.tolist() == [True, False]
    engine.add(3, prompt_of(30, 3), free_run(20))
    plan = engine.step()  # the running prefill continues before a new one starts
    assert plan.req_ids == [1, 2]
    engine.run()
    engine.assert_clean()


def test_a_long_prompt_is_split_and_samples_with_its_last_chunk():
    engine = ToyEngine(budget=8)
    engine.add(1, prompt_of(20), free_run(2))
    plans = [engine.step() for _ in range(3)]
    assert [p.total_tokens for p in plans] == [8, 8, 4]
    assert [bool(p.samples[0]) for p in plans] == [False, False, True]
    assert [p.num_decodes for p in plans] == [0, 0, 0]


def test_a_last_chunk_of_one_token_is_a_prefill_row():
    engine = ToyEngine(budget=8)
    engine.add(1, prompt_of(9), free_run(2))
    engine.step()
    plan = engine.step()
    assert plan.num_decodes == 0
    assert plan.prompt_tokens.tolist() == prompt_of(9)[8:]


def test_max_num_seqs_bounds_the_batch():
    engine = ToyEngine(max_num_seqs=2, budget=64, num_blocks=60)
    for req_id in range(4):
        engine.add(req_id, prompt_of(3, req_id), free_run(5))
    engine.step()
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 2)
    engine.run()
    engine.assert_clean()


def test_a_budget_below_the_number_of_decodes_is_kept():
    engine = ToyEngine(budget=3, num_blocks=60, max_num_seqs=8)
    for req_id in range(6):
        engine.add(req_id, [req_id], free_run(6))
    engine.run()
    engine.assert_clean()
    for req_id in range(6):
        assert engine.completions[req_id].tokens == undisturbed([req_id], free_run(6), MODEL_LEN)


# --- order ------------------------------------------------------------------------------------------


def test_arrival_order_and_priority():
    engine = ToyEngine(max_num_seqs=1, num_blocks=60)
    engine.add(1, prompt_of(3), free_run(2))
    engine.step()
    engine.add(2, prompt_of(3), free_run(2), priority=1)
    engine.add(3, prompt_of(3), free_run(2), priority=0)
    engine.add(4, prompt_of(3), free_run(2), priority=0)
    engine.add(5, prompt_of(3), free_run(2), priority=-5)
    started = []
    while engine.has_work:
        plan = engine.step()
        started += plan.req_ids[: len(plan.new_rows)] if plan.new_rows else []
    assert started == [5, 3, 4, 2]


def test_nobody_overtakes_a_waiting_request():
    engine = ToyEngine(num_blocks=12, admission="greedy")  # 11 blocks
    engine.add(1, prompt_of(28), free_run(4))
    engine.step()
    engine.step()
    engine.add(2, prompt_of(30, 2), free_run(4))  # does not fit now
    engine.add(3, prompt_of(2, 3), free_run(2))  # would
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.run()
    engine.assert_clean()


def test_waiting_queue_keeps_order_and_finds_its_members():
    queue = WaitingQueue()
    requests = [make_request([1], req_id=i) for i in range(5)]
    for i, priority in enumerate((2, 0, 1, 0, 2)):
        requests[i].priority = priority
        queue.add(requests[i])
    assert [r.req_id for r in queue] == [1, 3, 2, 0, 4]
    preempted = make_request([1], req_id=9)
    preempted.status = RequestStatus.PREEMPTED
    preempted.arrival_ns = 5  # clocks may disagree with the order of arrival
    queue.add(preempted)
    assert queue.first() is preempted
    queue.remove(preempted)
    queue.remove(requests[2])
    assert [r.req_id for r in queue] == [1, 3, 0, 4]
    with pytest.raises(KeyError):
        queue.remove(requests[2])
    assert queue.first() is requests[1]


def test_removal_from_the_waiting_queue_moves_nothing_until_half_is_empty():
    queue, rng = WaitingQueue(), random.Random(1)
    requests = [make_request([1], req_id=i) for i in range(200)]
    for request in requests:
        request.priority = rng.randrange(3)
    inside: list[Request] = []
    for _ in range(3000):
        request = rng.choice(requests)
        if request in inside:
            places = queue._requests
            queue.remove(request)
            inside.remove(request)
            assert (
                queue._requests is places or len(queue._requests) == len(inside) <= len(places) / 2
            )
        else:
            queue.add(request)
            inside.append(request)
        expected = sorted(inside, key=queue_key)
        assert (list(queue), len(queue)) == (expected, len(inside))
        if inside:
            assert queue.first() is expected[0]
    with pytest.raises(KeyError):
        queue.remove(next(r for r in requests if r not in inside))


# --- endings ----------------------------------------------------------------------------------------


@IN_FLIGHT
def test_length_limit(depth: int) -> None:
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt_of(5), free_run(7))
    engine.run()
    completion = engine.completions[1]
    assert completion.finish is FinishReason.LENGTH
    assert completion.stop_token is None
    assert completion.tokens == undisturbed(prompt_of(5), free_run(7), MODEL_LEN)
    assert engine.num_wasted == 0, "a request at its limit is not planned again"


@IN_FLIGHT
@pytest.mark.parametrize("max_tokens", [None, 500])
def test_the_context_ends_a_completion(depth: int, max_tokens: int | None) -> None:
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt_of(5), free_run(max_tokens))
    engine.run()
    assert engine.completions[1].finish is FinishReason.LENGTH
    assert len(engine.completions[1].tokens) == MODEL_LEN - 5
    engine.assert_clean()


@IN_FLIGHT
def test_a_single_token(depth: int) -> None:
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt_of(MODEL_LEN - 1), free_run(None))
    engine.run()
    assert len(engine.completions[1].tokens) == 1
    engine.assert_clean()


@IN_FLIGHT
def test_end_of_sequence(depth: int) -> None:
    prompt = prompt_that_says(EOS, at=3)
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt, SamplingParams(max_tokens=20))
    engine.run()
    completion = engine.completions[1]
    assert completion.finish is FinishReason.STOP
    assert completion.stop_token is None
    assert len(completion.tokens) == 4
    assert completion.tokens[-1] == EOS
    assert engine.num_wasted == depth
    engine.assert_clean()


@IN_FLIGHT
def test_ignore_eos(depth: int) -> None:
    prompt = prompt_that_says(EOS, at=3)
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt, free_run(9))
    engine.add(2, prompt, free_run(9, stop_token_ids=[EOS]))
    engine.run()
    assert len(engine.completions[1].tokens) == 9
    assert len(engine.completions[2].tokens) == 4
    assert engine.completions[2].stop_token == EOS, "asked for by the request itself"


@IN_FLIGHT
def test_stop_token_ids(depth: int) -> None:
    prompt = prompt_that_says(STOP_TOKEN, at=2)
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt, SamplingParams(max_tokens=20, stop_token_ids=[STOP_TOKEN]))
    engine.run()
    completion = engine.completions[1]
    assert (completion.finish, completion.stop_token) == (FinishReason.STOP, STOP_TOKEN)
    assert completion.tokens[-1] == STOP_TOKEN
    assert len(completion.tokens) == 3


def test_min_tokens_holds_stops_back():
    prompt = prompt_that_says(EOS, at=2)
    lengths = []
    for min_tokens in (3, 4):
        engine = ToyEngine()
        engine.add(1, prompt, SamplingParams(max_tokens=10, min_tokens=min_tokens))
        engine.run()
        lengths.append(len(engine.completions[1].tokens))
    assert lengths[0] == 3
    assert lengths[1] > 3


def test_stop_at_the_length_limit_is_a_stop():
    engine = ToyEngine()
    engine.add(1, prompt_that_says(EOS, at=3), SamplingParams(max_tokens=4))
    engine.run()
    assert engine.completions[1].finish is FinishReason.STOP


@IN_FLIGHT
def test_continuation_after_a_restart_counts_earlier_output(depth: int) -> None:
    prompt, params = prompt_of(6), free_run(12)
    whole = undisturbed(prompt, params, MODEL_LEN)
    engine = ToyEngine(depth=depth)
    engine.add(1, prompt, params, prior=whole[:5])
    plan = engine.step()
    assert plan.new_rows[0].num_prompt_tokens == 6
    assert len(plan.new_rows[0].token_ids) == 11
    engine.run()
    assert engine.completions[1].tokens == whole[5:]
    assert engine.completions[1].finish is FinishReason.LENGTH


def test_a_request_complete_before_the_restart_ends_at_once():
    engine = ToyEngine()
    engine.add(1, [1, 2], free_run(3), prior=[4, 5, 6])
    assert engine.step() is None
    assert engine.completions[1].finish is FinishReason.LENGTH
    assert engine.completions[1].tokens == []
    engine.assert_clean()


def test_nan_ends_only_its_own_request_and_its_blocks_are_not_found_again():
    engine = ToyEngine(num_blocks=60, budget=64)
    scheduler = engine.scheduler
    engine.add(1, prompt_of(9), free_run(5))
    engine.add(2, prompt_of(9, 2), free_run(5))
    plan = scheduler.schedule(0)
    result = engine.runner.launch(plan)
    result.is_bad = np.array([True, False])
    scheduler.commit(plan, result)
    engine.receive(scheduler.take_output(0, 0))
    assert engine.completions[1].finish is FinishReason.ERROR
    assert engine.completions[1].tokens == []
    engine.add(3, prompt_of(9), free_run(5))
    engine.run()
    assert engine.completions[3].num_cached == 0
    assert engine.completions[2].tokens == undisturbed(prompt_of(9, 2), free_run(5), MODEL_LEN)
    engine.assert_clean()


# --- aborts -----------------------------------------------------------------------------------------


@IN_FLIGHT
@pytest.mark.parametrize("steps_before", range(6))
def test_abort_in_any_phase(depth: int, steps_before: int) -> None:
    engine = ToyEngine(depth=depth, budget=8, max_num_seqs=2)
    for req_id in (1, 2, 3):
        engine.add(req_id, prompt_of(14, req_id), free_run(6))
    for _ in range(steps_before):
        engine.step()
    engine.abort(1, 3, 99, 1)
    engine.abort(1)
    engine.run()
    for req_id in (1, 3):
        assert engine.completions[req_id].finish in (FinishReason.ABORT, FinishReason.LENGTH)
    assert engine.completions[2].tokens == undisturbed(prompt_of(14, 2), free_run(6), MODEL_LEN)
    engine.assert_clean()


def test_aborts_are_counted_and_unknown_ids_ignored():
    engine = ToyEngine()
    engine.scheduler.abort([4, 5], AbortReason.TIMEOUT)
    assert engine.scheduler.take_output(0, 0) is None
    engine.add(1, [1], free_run(5))
    engine.abort(1, 1)
    engine.abort(1)
    assert engine.scheduler.aborts == 1


def test_a_reused_id_does_not_get_its_predecessors_token():
    engine = ToyEngine(depth=1)
    engine.add(1, prompt_of(5), free_run(9))
    engine.step()  # in flight
    engine.abort(1)
    engine.receive(engine.scheduler.take_output(0, 0))
    engine.add(1, prompt_of(6, 2), free_run(9))
    engine.run()
    assert engine.completions[1].tokens == undisturbed(prompt_of(6, 2), free_run(9), MODEL_LEN)


def test_a_freed_row_and_its_blocks_may_be_given_away_in_the_next_plan():
    engine = ToyEngine(depth=1, max_num_seqs=1, num_blocks=6)
    engine.add(1, prompt_of(9), free_run(9))
    engine.step()
    engine.step()
    engine.add(2, prompt_of(9, 2), free_run(9))
    engine.abort(1)
    plan = engine.step()
    assert plan.freed_rows == [init.row for init in plan.new_rows] != []
    engine.run()
    assert engine.completions[2].tokens == undisturbed(prompt_of(9, 2), free_run(9), MODEL_LEN)
    engine.assert_clean()


# --- refusals ---------------------------------------------------------------------------------------


def test_a_duplicate_of_a_live_request_is_ignored():
    engine = ToyEngine()
    engine.add(1, prompt_of(5), free_run(4))
    engine.step()
    completion = engine.completions[1]
    engine.add(1, prompt_of(7), free_run(4))
    engine.completions[1] = completion
    engine.run()
    assert completion.tokens == undisturbed(prompt_of(5), free_run(4), MODEL_LEN)
    engine.assert_clean()


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "code"),
    [
        (0, 4, "empty_prompt"),
        (MODEL_LEN, 4, "context_length_exceeded"),
        (40, 20, "exceeds_kv_capacity"),
    ],
)
def test_what_can_never_run_is_rejected_at_once(
    prompt_length: int, max_tokens: int, code: str
) -> None:
    engine = ToyEngine(num_blocks=12)
    engine.add(1, prompt_of(prompt_length), free_run(max_tokens))
    engine.add(2, prompt_of(5), free_run(3))
    engine.run()
    assert engine.completions[1].rejected == code
    assert engine.completions[2].finish is FinishReason.LENGTH
    engine.assert_clean()


def test_configuration_errors_name_field_and_remedy():
    fields = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
        "block_size": 4,
        "enable_chunked_prefill": True,
        "admission": "peak",
        "eos_token_ids": (),
        "check_invariants": False,
        "num_rows": 5,
    }
    SchedulerConfig(**fields)
    with pytest.raises(ValueError, match="num_rows must be above max_num_seqs"):
        SchedulerConfig(**{**fields, "num_rows": 4})
    with pytest.raises(ValueError, match="peak or greedy"):
        SchedulerConfig(**{**fields, "admission": "lucky"})


# --- whole prompts ----------------------------------------------------------------------------------


def test_without_chunks_prompts_are_never_split():
    engine = ToyEngine(chunked=False, budget=16, num_blocks=60)
    engine.add(0, prompt_of(17), free_run(4))
    for req_id, length in enumerate((10, 16, 4, 9, 16), start=1):
        engine.add(req_id, prompt_of(length, req_id), free_run(4))
    while engine.has_work:
        plan = engine.step()
        if plan is not None:
            assert plan.samples.all(), "a part of a prompt samples nothing"
    assert engine.completions[0].rejected == "context_length_exceeded"
    engine.assert_clean()


def test_without_chunks_a_preempted_request_may_outgrow_the_budget():
    engine = ToyEngine(chunked=False, budget=10, num_blocks=12, prefix_caching=False)
    for req_id in range(3):
        engine.add(req_id, prompt_of(8, req_id), free_run(24))
    engine.run()
    assert engine.scheduler.preemptions > 0
    for req_id in range(3):
        expected = undisturbed(prompt_of(8, req_id), free_run(24), MODEL_LEN)
        assert engine.completions[req_id].tokens == expected
    engine.assert_clean()


# --- preemption -------------------------------------------------------------------------------------


@IN_FLIGHT
def test_the_latest_request_gives_way_and_resumes_first(depth: int) -> None:
    engine = ToyEngine(num_blocks=11, admission="greedy", depth=depth)
    for req_id in (1, 2, 3):
        engine.add(req_id, prompt_of(10, req_id), free_run(14))
    engine.run()
    preempted: list[int] = []
    resumed: list[int] = []
    for record in engine.scheduler.log.steps():
        victims = [d.req_id for d in record.decisions if d.reason is Reason.PREEMPTED_FOR]
        starters = [d.req_id for d in record.decisions if d.reason is Reason.RESUMED]
        assert not (victims and starters), "nobody starts in a step that lacked blocks"
        preempted += victims
        resumed += starters
    assert preempted[0] == 3
    assert 1 not in preempted
    assert sorted(preempted) == sorted(resumed)
    for req_id in (1, 2, 3):
        expected = undisturbed(prompt_of(10, req_id), free_run(14), MODEL_LEN)
        assert engine.completions[req_id].tokens == expected
    engine.assert_clean()


def test_nobody_starts_in_a_step_that_lacked_blocks():
    """Request 3 fits into what 2 had to give back for 1, but may start only in the next step."""
    engine = ToyEngine(num_blocks=8, admission="greedy", budget=64)
    engine.add(1, prompt_of(12, 1), free_run(8))
    engine.add(2, prompt_of(16, 2), free_run(8), priority=5)
    engine.step()
    engine.add(3, prompt_of(7, 3), free_run(2), priority=1)
    engine.step()
    assert engine.scheduler.preemptions == 1
    assert list(engine.scheduler._running) == [1]
    engine.step()
    assert list(engine.scheduler._running) == [1, 3]
    engine.run()
    engine.assert_clean()


def test_a_preempted_request_waits_for_its_own_sample():
    """With two steps in flight a victim's last token may still be unknown when there is room again."""
    engine = ToyEngine(num_blocks=9, admission="greedy", depth=2, budget=64)
    for req_id in (1, 2):
        engine.add(req_id, prompt_of(10, req_id), free_run(14))
    while engine.scheduler.preemptions == 0:
        engine.step()
    (request,) = engine.scheduler._waiting
    assert request.req_id == 2
    assert request.num_uncommitted > 0
    engine.abort(1)  # now there is room, but its last token is not known yet
    assert engine.step() is None
    last = engine.scheduler.log.steps()[-1].decisions[-1]
    assert (last.req_id, last.reason) == (2, Reason.WAIT_COMMIT)
    engine.run()
    assert engine.completions[2].tokens == undisturbed(prompt_of(10, 2), free_run(14), MODEL_LEN)
    engine.assert_clean()


def test_a_draft_withdraws_what_a_victim_was_granted():
    decodes = DecodeBatch(block_size=4)
    draft = StepDraft(10, decodes)
    first, second, third = (make_request([1, 2, 3], req_id=i) for i in (1, 2, 3))
    decodes.join([first])
    draft.grown.append((first, 1))
    draft.add_prefill(second, 3)
    draft.add_prefill(third, 2)
    assert draft.budget_left == 4
    draft.withdraw(first)
    decodes.leave(first)
    assert (draft.num_decodes, draft.grown, draft.budget_left) == (0, [], 5)
    draft.withdraw(second)
    assert draft.prefills == [(third, 2)]
    assert draft.budget_left == 8
    assert draft.has_preempted


def test_the_worst_priority_gives_way_even_if_it_came_first():
    engine = ToyEngine(num_blocks=8, admission="greedy")
    engine.add(1, prompt_of(10, 1), free_run(14), priority=5)
    engine.step()
    engine.add(2, prompt_of(10, 2), free_run(14), priority=0)
    engine.run()
    log = engine.scheduler.log
    victims = [
        d.req_id for r in log.steps() for d in r.decisions if d.reason is Reason.PREEMPTED_FOR
    ]
    assert set(victims) == {1}
    engine.assert_clean()


def test_a_resumed_request_finds_its_own_blocks_again():
    engine = ToyEngine(num_blocks=9, admission="greedy")
    for req_id in (1, 2):
        engine.add(req_id, prompt_of(10, req_id), free_run(14))
    engine.run()
    log = engine.scheduler.log
    resumed = [d for r in log.steps() for d in r.decisions if d.reason is Reason.RESUMED]
    assert resumed
    assert any(d.a > 0 for d in resumed), "no cached tokens at resumption"


def test_peak_admission_avoids_preemption_where_greedy_needs_it():
    preemptions = {}
    for admission in ("greedy", "peak"):
        engine = ToyEngine(num_blocks=20, admission=admission, budget=64)
        for req_id in range(8):
            engine.add(req_id, prompt_of(8, req_id), free_run(20))
        engine.run()
        engine.assert_clean()
        preemptions[admission] = engine.scheduler.preemptions
    assert preemptions["greedy"] > 0
    assert preemptions["peak"] == 0


# --- prefix cache -----------------------------------------------------------------------------------


def test_requests_of_one_step_share_their_prompt():
    """n > 1: equal prompts arrive together; all but the first compute only the tail."""
    engine = ToyEngine(budget=64, num_blocks=60)
    for req_id in range(4):
        engine.add(req_id, prompt_of(10), free_run(3))
    plan = engine.step()
    assert plan.num_tokens.tolist() == [10, 2, 2, 2]
    assert [engine.completions[i].num_cached for i in range(4)] == [0, 8, 8, 8]
    scheduler = engine.scheduler
    assert (scheduler.prompt_tokens, scheduler.prefix_query_tokens) == (40, 40)
    assert scheduler.prefix_hit_tokens == 24


@IN_FLIGHT
def test_the_next_turn_of_a_chat_finds_prompt_and_answer(depth: int) -> None:
    engine = ToyEngine(num_blocks=60, depth=depth)
    engine.add(1, prompt_of(6), free_run(11))
    engine.run()
    answer = engine.completions[1].tokens
    engine.add(2, prompt_of(6) + answer + [1, 2, 3], free_run(4))
    engine.run()
    assert engine.completions[2].num_cached == 16  # of 17 - 1 tokens with KV


def test_prefix_caching_off_counts_no_queries():
    engine = ToyEngine(prefix_caching=False)
    engine.add(1, prompt_of(10), free_run(2))
    engine.add(2, prompt_of(10), free_run(2))
    engine.run()
    assert engine.scheduler.prefix_query_tokens == 0
    assert engine.completions[2].num_cached == 0


# --- outputs and records ----------------------------------------------------------------------------


def test_output_columns_and_logprobs():
    engine = ToyEngine(num_blocks=60, budget=64)
    scheduler = engine.scheduler
    engine.add(1, prompt_of(4, 1), free_run(5))
    engine.add(2, prompt_of(4, 2), free_run(1, logprobs=2))
    plan = scheduler.schedule(5_000_000)
    result = engine.runner.launch(plan)
    result.logprobs = {
        1: RowLogprobs(-0.5, 2, np.array([3, 4], np.int32), np.array([-0.1, -0.5], np.float32))
    }
    scheduler.commit(plan, result)
    engine.abort(1)
    output = scheduler.take_output(epoch=3, step_id=17)
    assert (output.epoch, output.step_id) == (3, 17)
    assert output.req_ids == [1, 2, 1]
    assert output.counts == [1, 1, 0]
    assert output.token_ids == result.token_ids.tolist()
    assert output.finished == [(1, FinishReason.LENGTH, None), (2, FinishReason.ABORT, None)]
    (entry,) = output.logprobs
    assert (entry.index, entry.sampled, entry.rank) == (1, -0.5, 2)
    assert np.frombuffer(entry.top_ids, np.int32).tolist() == [3, 4]
    assert np.frombuffer(entry.top_logprobs, np.float32).tolist() == pytest.approx([-0.1, -0.5])
    assert [(req_id, cached) for req_id, cached, _ in output.started] == [(1, 0), (2, 0)]
    assert output.started[0][2] == 4999  # us in the queue
    assert scheduler.take_output(3, 18) is None


def test_plans_are_committed_in_order():
    engine = ToyEngine()
    engine.add(1, prompt_of(4), free_run(5))
    first = engine.scheduler.schedule(0)
    engine.runner.launch(first)
    wrong = StepPlan(
        step_id=first.step_id + 1,
        num_decodes=0,
        rows=first.rows,
        num_tokens=first.num_tokens,
        num_computed=first.num_computed,
        samples=first.samples,
        prompt_tokens=first.prompt_tokens,
    )
    with pytest.raises(AssertionError, match="committed before"):
        engine.scheduler.commit(wrong, StepResult(np.zeros(1, np.int32)))


def test_counters():
    engine = ToyEngine()
    engine.add(1, prompt_of(6), free_run(5))
    engine.add(2, prompt_of(3, 2), free_run(2))
    engine.run()
    scheduler = engine.scheduler
    assert scheduler.prompt_tokens == 9
    assert scheduler.generation_tokens == 7
    assert (scheduler.preemptions, scheduler.aborts) == (0, 0)


def test_a_timeline_explains_a_request():
    engine = ToyEngine(num_blocks=12, admission="peak", budget=8)
    engine.add(1, prompt_of(9, 1), free_run(10))
    engine.add(2, prompt_of(20, 2), free_run(20))
    engine.run()
    sentences = [text for _, text in engine.scheduler.log.timeline(2)]
    assert sentences[0] == "arrived with 20 tokens, 1 requests waiting before it"
    assert any(text.startswith("waits for") for text in sentences)
    assert any(text.startswith("started: 0 tokens found") for text in sentences)
    assert any("was cut to" in text for text in sentences)
    assert sentences[-1] == "finished (length) after 20 output tokens"
    assert len(sentences) <= 8, "a repeated reason appears once"
    times = [time for time, _ in engine.scheduler.log.timeline(2)]
    assert times == sorted(times)


def test_step_records_describe_the_batch_and_are_bounded():
    engine = ToyEngine(budget=8)
    engine.add(1, prompt_of(12), free_run(4))
    engine.run()
    records = engine.scheduler.log.steps()
    assert [(r.num_decodes, r.num_prefills, r.num_tokens) for r in records if r.num_tokens] == [
        (0, 1, 8),
        (0, 1, 4),
        (1, 0, 1),
        (1, 0, 1),
        (1, 0, 1),
    ]
    steady = [r for r in records if r.num_decodes]
    assert all(not r.decisions for r in steady)
    log = DecisionLog(size=3)
    for step in range(10):
        log.append(StepRecord(step, step, 1, 0, 1, 1, 0, 5, []))
    assert [r.step_id for r in log.steps()] == [7, 8, 9]
    assert [r.step_id for r in log.steps(last=2)] == [8, 9]


def test_every_reason_has_a_sentence():
    log = DecisionLog()
    for reason in Reason:
        log.note(1, reason, 2, 3)
    assert len(log.timeline(1)) == len(Reason)
    assert all("{" not in text for _, text in log.timeline(1))
