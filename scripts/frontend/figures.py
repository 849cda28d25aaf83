"""From the client's columns and the CPU times to the figures of one level of load."""

from dataclasses import dataclass, field

from scripts.frontend.client import Job, Result
from scripts.frontend.processes import CpuWatch

SETTLE_NS = 300_000_000  # after the last stream's first token


@dataclass
class Level:
    """Over the time in which all streams run."""

    offered: float  # tokens/s that the stand-in sends when it keeps its times
    tokens_per_s: float
    p50_ms: float  # from the engine's send to the client's read
    p99_ms: float
    tokens_per_event: float  # more than 1 where events were merged for a reader behind
    cpu_ms_per_1k: dict[str, float] = field(default_factory=dict)  # by process
    cpu_percent: dict[str, float] = field(default_factory=dict)

    @property
    def pair_ms_per_1k(self) -> float:
        return self.cpu_ms_per_1k["server"] + self.cpu_ms_per_1k["tokenizer_proc"]

    def is_sustained(self) -> bool:
        """Nearly all that was offered arrived, and hardly anything late."""
        return self.tokens_per_s >= 0.97 * self.offered and self.p99_ms < 100


def percentile(values: list[int], share: float) -> float:
    """Nearest rank; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def level_of(job: Job, result: Result, watch: CpuWatch) -> Level:
    """Raises ValueError if the streams never all ran together."""
    start, end = max(result.first_ns) + SETTLE_NS, min(result.last_ns)
    if end <= start:
        raise ValueError("the streams did not run together for long enough: use more --seconds")
    seconds = (end - start) * 1e-9
    columns = zip(result.times_ns, result.words, result.ages_ns, strict=True)
    rows = [row for row in columns if start <= row[0] < end]
    ages = [age for _, _, age in rows]
    tokens = sum(words for _, words, _ in rows)
    used = watch.used(start * 1e-9, end * 1e-9)
    used["client"] = result.cpu_s * tokens / max(1, sum(result.words))
    return Level(
        offered=job.streams / job.step_us * 1e6,
        tokens_per_s=tokens / seconds,
        p50_ms=percentile(ages, 0.5) * 1e-6,
        p99_ms=percentile(ages, 0.99) * 1e-6,
        tokens_per_event=tokens / max(1, len(rows)),
        cpu_ms_per_1k={name: s / tokens * 1e6 for name, s in used.items()},
        cpu_percent={name: s / seconds * 100 for name, s in used.items()},
    )
