"""What the engine tells of itself, from the true scheduler on the toy engine."""

from array import array

import pytest

from engine.api.inspection import (
    BLOCK_STATES,
    KvReport,
    RequestReport,
    RequestsReport,
    StepsReport,
    TimelineReport,
)
from engine.api.messages import AddRequest, Inspect, Inspection, Subject
from engine.api.sampling import SamplingParams, StructuredOutput
from engine.grammar_gate import GrammarGate
from engine.inspection import Inspector
from engine.kv.block_pool import BlockState
from engine.runner.grammars import Grammars
from engine.scheduler.decisions import DecisionLog, Reason, StepRecord
from tests.unit.test_scheduler import free_run, prompt_of
from tests.unit.toy_engine import ToyEngine


class Watch:
    """An inspector and the answers it gave."""

    def __init__(self, engine: ToyEngine) -> None:
        self.gate = GrammarGate(Grammars())
        self.answers: list[Inspection] = []
        self.inspector = Inspector(engine.scheduler, self.gate, self.answers.append)

    def ask(self, subject: Subject, last: int = 100, req_ids: list[int] | None = None):
        question = Inspect(call_id=9, subject=subject, last=last, req_ids=req_ids or [])
        self.inspector.answer(question)
        answer = self.answers.pop()
        assert answer.call_id == 9
        assert self.answers == [], "one answer each"
        return answer.report

    def requests(self, last: int = 100) -> dict[int, RequestReport]:
        report = self.ask(Subject.REQUESTS, last)
        assert isinstance(report, RequestsReport)
        assert len(report.requests) <= last
        return {row.req_id: row for row in report.requests}


def test_an_idle_engine_has_little_to_tell():
    watch = Watch(ToyEngine(num_blocks=12))
    assert watch.requests() == {}
    kv = watch.ask(Subject.KV)
    assert isinstance(kv, KvReport)
    assert list(kv.states) == [BlockState.RESERVED, BlockState.FREE]
    assert array("i", kv.lengths).tolist() == [1, 11]
    assert kv.host is None
    assert watch.ask(Subject.STEPS) == StepsReport(steps=[])
    assert watch.ask(Subject.TIMELINE, req_ids=[4]) == TimelineReport(timelines=[(4, [])])


def test_names_of_block_states():
    assert [state.name.lower() for state in BlockState] == list(BLOCK_STATES)


def test_requests_that_run_and_that_wait_say_why():
    engine = ToyEngine(max_num_seqs=1, budget=8)
    watch = Watch(engine)
    for req_id in (1, 2, 3, 4):
        engine.add(req_id, prompt_of(12, req_id), free_run(5))
    assert watch.requests()[1].reason == "is the next to start"
    engine.step()
    rows = watch.requests()
    first = rows[1]
    assert (first.state, first.phase, first.row > 0, first.reason) == (
        "running",
        "prefill",
        True,
        "",
    )
    assert (first.prompt_tokens, first.computed_tokens, first.max_output_tokens) == (12, 8, 5)
    assert first.blocks == engine.scheduler.kv.blocks_for(8)
    engine.step()
    engine.step()
    rows = watch.requests()
    assert list(rows) == [1, 2, 3, 4]
    assert rows[1].phase == "decode"
    assert rows[1].output_tokens > 0
    assert (rows[2].state, rows[2].phase, rows[2].blocks) == ("waiting", "queued", 0)
    assert rows[2].reason == "waits for a seat: 1 requests are running, 1 may"
    assert rows[3].reason == "1 request is before it in the queue"
    assert rows[4].reason == "2 requests are before it in the queue"
    engine.run()
    assert watch.requests() == {}


def test_the_number_of_requests_is_bounded_and_the_counts_are_not():
    engine = ToyEngine(max_num_seqs=2)
    watch = Watch(engine)
    for req_id in range(1, 30):
        engine.add(req_id, prompt_of(4, req_id), free_run(5))
    engine.step()
    for last in (1, 2, 3, 10):
        assert len(watch.requests(last)) == last
    report = watch.ask(Subject.REQUESTS, 3)
    assert isinstance(report, RequestsReport)
    assert (report.num_running, report.num_waiting) == (2, 27)


def test_a_preempted_request_is_told_as_such():
    engine = ToyEngine(num_blocks=8, block_size=4)
    watch = Watch(engine)
    for req_id in (1, 2, 3):
        engine.add(req_id, prompt_of(6, req_id), free_run(16))
    seen = []
    for _ in range(200):
        if not engine.has_work:
            break
        engine.step()
        seen += [row for row in watch.requests().values() if row.state == "preempted"]
    assert seen, "blocks were to run out"
    assert all(row.reason.startswith("preempted: ") for row in seen)
    assert all(row.preemptions > 0 and row.row == row.blocks == 0 for row in seen)
    assert any("waits for KV blocks" in row.reason for row in seen)


def test_requests_behind_their_grammar_wait_in_front_of_the_scheduler():
    watch = Watch(ToyEngine())
    params = SamplingParams(max_tokens=6, structured=StructuredOutput(kind="regex", value="a"))
    watch.gate.held[8] = AddRequest(
        req_id=8, token_ids=bytes(20), block_names=b"", params=params, arrival_ns=5
    )
    row = watch.requests()[8]
    assert (row.state, row.phase, row.prompt_tokens) == ("waiting", "grammar", 5)
    assert "grammar" in row.reason


def test_steps_and_timelines_are_those_of_the_log():
    engine = ToyEngine(max_num_seqs=1, budget=8)
    watch = Watch(engine)
    engine.add(1, prompt_of(12), free_run(4))
    engine.add(2, prompt_of(3, 2), free_run(2))
    engine.run()
    report = watch.ask(Subject.STEPS)
    assert isinstance(report, StepsReport)
    first = report.steps[0]
    assert (first.prefill_tokens, first.decode_tokens, first.prefills) == (8, 0, 1)
    assert (first.running, first.waiting) == (1, 1)
    assert (1, "arrived with 12 tokens, 0 requests waiting before it") in first.decisions
    assert sum(step.decode_tokens for step in report.steps) == 3 + 1
    newest = watch.ask(Subject.STEPS, last=2)
    assert isinstance(newest, StepsReport)
    assert newest.steps == report.steps[-2:]
    lines = watch.ask(Subject.TIMELINE, req_ids=[2, 77])
    assert isinstance(lines, TimelineReport)
    (second, told), unknown = lines.timelines
    assert (second, unknown) == (2, (77, []))
    assert told[0][1].startswith("arrived")
    assert told[-1][1] == "finished (length) after 2 output tokens"


@pytest.mark.parametrize("pending", [False, True])
def test_the_latest_decision_is_found(pending: bool):
    log = DecisionLog()
    log.note(1, Reason.ARRIVED, 5, 0)
    log.append(StepRecord(1, 1, 0, 0, 0, 0, 0, 0, log.take_pending()))
    log.note(1, Reason.WAIT_SEATS, 1, 1)
    log.note(2, Reason.ARRIVED, 5, 0)
    if not pending:
        log.append(StepRecord(2, 2, 0, 0, 0, 0, 0, 0, log.take_pending()))
    latest = log.latest(1)
    assert latest is not None
    assert latest.reason is Reason.WAIT_SEATS
    assert log.latest(3) is None
