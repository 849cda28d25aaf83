"""What the server knows about the engine, and whether that is healthy."""

import time
from dataclasses import dataclass, field

from engine.api.messages import EngineFailed, EngineLimits, EngineState, EngineStats, Phase

HEARTBEAT_LIMIT_S = 10.0  # the engine sends two a second, and its loop turns as often when idle
PHASE_NAMES = {
    Phase.LOADING: "loading weights",
    Phase.SIZING: "sizing the KV cache",
    Phase.CAPTURING: "capturing graphs",
    Phase.SERVING: "serving",
}


@dataclass(slots=True)
class Verdict:
    """The answer of a health path: `status` "ok" means 200, everything else 503."""

    status: str
    reason: str = ""
    since: float = 0.0  # unix time

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(slots=True)
class EngineStatus:
    """Start-up progress, heartbeats and statistics. Times are `time.monotonic()` unless said."""

    stall_timeout_s: float
    phase: str = "starting"
    progress: float = 0.0  # 0..1 within the phase
    detail: str = ""
    limits: EngineLimits | None = None  # known once requests can be served
    chat_template: str = ""  # known then, too
    stats: EngineStats | None = None
    failure: EngineFailed | None = None
    is_serving: bool = False
    is_draining: bool = False  # for good: the process is about to end
    is_paused: bool = False  # by an operator, until told otherwise
    dead_reason: str = ""
    rss_bytes: int = 0
    gpu_memory_bytes: int = 0
    heartbeat_at: float = 0.0
    loop_count: int = -1  # of the engine's step loop
    loop_moved_at: float = 0.0  # when it last turned
    step_in_flight: bool = False
    step_ended_at: float = 0.0  # when the last step is known to have ended
    progress_at: float = 0.0  # when a reply came or a prompt was computed, or work last began
    changed_at: float = field(default_factory=time.time)  # unix time of the last change of status
    has_work: bool = False

    def starting(self, phase: str, progress: float = 0.0, detail: str = "") -> None:
        """A phase before the engine speaks for itself."""
        self.phase, self.progress, self.detail = phase, progress, detail

    def on_state(self, state: EngineState) -> None:
        now = time.monotonic()
        self.heartbeat_at = now
        self.rss_bytes = state.rss_bytes
        self.gpu_memory_bytes = state.gpu_memory_bytes
        self.step_in_flight = state.step_in_flight_ms > 0
        if state.loop_count != self.loop_count or state.phase is not Phase.SERVING:
            self.loop_count = state.loop_count
            self.loop_moved_at = now
        self.phase = PHASE_NAMES[state.phase]
        self.progress, self.detail = state.progress, state.detail
        serving = state.phase is Phase.SERVING
        if serving != self.is_serving:
            self.is_serving = serving
            self.progress_at = now
            self.changed_at = time.time()

    def on_stats(self, stats: EngineStats) -> None:
        """Steps that only compute prompts bring no reply. Steps that generate tokens must."""
        before = self.stats
        if before is None or (
            stats.steps != before.steps and stats.generation_tokens == before.generation_tokens
        ):
            self.progress_at = time.monotonic()
        if stats.steps != (before.steps if before else 0):
            self.step_ended_at = time.monotonic()
        self.stats = stats

    def on_reply(self) -> None:
        """Proof that tokenizer_proc works, and mostly the engine as well."""
        self.progress_at = time.monotonic()

    def set_has_work(self, has_work: bool) -> None:
        """Stalls count only while there is work: without any, nothing need come."""
        if has_work and not self.has_work:
            self.progress_at = time.monotonic()
        self.has_work = has_work

    def set_dead(self, reason: str) -> None:
        if not self.dead_reason:
            self.dead_reason = reason
            self.changed_at = time.time()

    def set_draining(self) -> None:
        if not self.is_draining:
            self.is_draining = True
            self.changed_at = time.time()

    def set_paused(self, is_paused: bool) -> None:
        """Take no new requests, though the process stays; or take them again."""
        if is_paused != self.is_paused:
            self.is_paused = is_paused
            self.changed_at = time.time()

    @property
    def takes_requests(self) -> bool:
        return not (self.is_draining or self.is_paused)

    @property
    def last_step_age_s(self) -> float:
        """0 before the first step."""
        return time.monotonic() - self.step_ended_at if self.step_ended_at else 0.0

    @property
    def is_loaded(self) -> bool:
        return self.is_serving and self.limits is not None

    def health(self) -> Verdict:
        """Is the engine alive and moving?"""
        now = time.monotonic()
        if self.dead_reason:
            return Verdict("dead", self.dead_reason, self.changed_at)
        if not self.is_loaded:
            return Verdict("loading", self.describe_phase(), self.changed_at)
        silence = now - self.heartbeat_at
        if silence > HEARTBEAT_LIMIT_S:
            reason = f"no heartbeat from the engine for {silence:.0f} s"
            return Verdict("stalled", reason, time.time() - silence)
        # A step may take long. Between steps nothing does.
        hang = self.heartbeat_at - self.loop_moved_at
        if hang > (self.stall_timeout_s if self.step_in_flight else HEARTBEAT_LIMIT_S):
            reason = f"the engine's step loop has not moved for {hang:.0f} s"
            return Verdict("stalled", reason, time.time() - hang)
        standstill = now - self.progress_at
        if self.has_work and standstill > self.stall_timeout_s:
            reason = (
                f"requests are waiting, but neither engine nor tokenizer has done anything for them "
                f"for {standstill:.0f} s"
            )
            return Verdict("stalled", reason, time.time() - standstill)
        return Verdict("ok")

    def readiness(self) -> Verdict:
        """Should new requests be sent here? (The queue limit is the client's to add.)"""
        if not self.takes_requests and not self.dead_reason:
            what = "the server is shutting down" if self.is_draining else "an operator asked for it"
            return Verdict("draining", what, self.changed_at)
        return self.health()

    def describe_phase(self) -> str:
        if self.is_serving:
            return "waiting for the tokenizer"
        detail = f" ({self.detail})" if self.detail else ""
        return f"{self.phase} {self.progress:.0%}{detail}" if self.progress else self.phase + detail
