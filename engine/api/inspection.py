"""What the engine tells of itself when asked (`Inspect` in engine.api.messages). Never prompts or texts.

Like all messages positional; tagged, as they share one field of `Inspection`. Times are
`time.monotonic_ns()`.
"""

import msgspec

BLOCK_STATES = ("reserved", "free", "cached", "used", "shared")


class Report(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    """Base of all answers."""


class HostReport(Report):
    """The host tier (`--swap-space`), in blocks."""

    num_slots: int
    num_used: int
    num_saved: int  # copied out since the start
    num_loaded: int  # copied back
    num_swapped: int  # preempted requests whose blocks are kept here


class KvReport(Report):
    """Every KV block in order, the reserved block 0 included, run-length encoded."""

    block_size: int
    enable_prefix_caching: bool
    states: bytes  # of each run, uint8: an index into BLOCK_STATES
    lengths: bytes  # of each run, int32
    host: HostReport | None = None


class RequestReport(Report):
    req_id: int
    state: str  # running, waiting or preempted
    phase: str  # queued, grammar, prefill or decode
    priority: int
    row: int  # in the device tables; 0: none
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int  # whose KV is written or under way
    max_output_tokens: int
    blocks: int
    shared_blocks: int  # that others were using when it started
    preemptions: int
    arrival_ns: int
    reason: str  # why it waits, in words; "" if it runs


class RequestsReport(Report):
    """Running requests in the order of their start, then waiting ones in order of the queue."""

    now_ns: int
    num_running: int
    num_waiting: int
    requests: list[RequestReport]  # at most as many as asked for


class StepReport(Report):
    step: int
    time_ns: int  # when it was planned
    decode_tokens: int
    prefill_tokens: int
    prefills: int  # prompt chunks
    running: int
    waiting: int
    free_blocks: int  # cached ones included
    decisions: list[tuple[int, str]]  # (request, sentence)


class StepsReport(Report):
    steps: list[StepReport]  # oldest first


class TimelineReport(Report):
    """What happened to each request, as far back as the engine remembers."""

    timelines: list[tuple[int, list[tuple[int, str]]]]  # (request, [(time in ns, sentence)])


AnyReport = KvReport | RequestsReport | StepsReport | TimelineReport
