"""From records to figures: of one round, and over rounds."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.loadtest.records import Record

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
BEHIND_SHARE = 0.1  # open loop: see `judge`
KEEPS_UP, FALLS_BEHIND, TOO_SHORT = "keeps up", "falls behind", "too short to tell"


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) of ascending values, linear between the two nearest; NaN of nothing."""
    if not ordered:
        return math.nan
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def distribution(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Mean and quantiles in milliseconds, as name_mean_ms, name_p50_ms and so on; empty of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {f"{name}_mean_ms": 1e3 * statistics.fmean(ordered)}
    found |= {f"{name}_{key}_ms": 1e3 * percentile(ordered, q) for key, q in QUANTILES.items()}
    return found


@dataclass
class Round:
    """What one round of one level gave. `values`: figures by name, units in the names."""

    values: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)  # by kind
    error_examples: dict[str, str] = field(default_factory=dict)
    tokens_from: str = "usage"  # "usage", "chunks" or "both"
    verdict: str = ""  # open loop: of `judge`
    interrupted: bool = False
    # each complete request: seconds from the round's start, then TTFT, then to the end
    timeline: list[tuple[float, float | None, float]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    records: list[Record], meets_slo: Callable[[Record], bool] | None = None, is_open: bool = False
) -> Round:
    """Only complete answers count in times and throughput; duration is first start to last end."""
    result = Round()
    for record in records:
        if record.error is not None:
            result.errors[record.error] = result.errors.get(record.error, 0) + 1
            result.error_examples.setdefault(record.error, record.detail)
    good = sorted((r for r in records if r.error is None), key=lambda r: r.start)
    values = result.values
    values["requests"] = len(records)
    values["completed"] = len(good)
    values["failed"] = len(records) - len(good)
    if not records:
        return result
    start, end = min(r.start for r in records), max(r.end for r in records)
    duration = max(end - start, 1e-9)
    values["duration_s"] = duration
    values |= retry_values(records)
    if is_open:
        values["late_p99_ms"] = 1e3 * percentile(sorted(r.late for r in records), 0.99)
        result.verdict = judge(records)
    if meets_slo is not None:
        met = sum(map(meets_slo, good))
        values["goodput_rps"] = met / duration
        values["slo_met_percent"] = 100 * met / len(records)
    if not good:
        return result
    counted = sum(r.completion_tokens is not None for r in good)
    result.tokens_from = {0: "chunks", len(good): "usage"}.get(counted, "both")
    values["request_rps"] = len(good) / duration
    values["output_tps"] = sum(r.tokens for r in good) / duration
    values["output_tokens_mean"] = statistics.fmean(r.tokens for r in good)
    values["output_asked_mean"] = statistics.fmean(r.asked_tokens for r in good)
    inputs = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    if inputs:
        values["input_tokens_mean"] = statistics.fmean(inputs)
        values["total_tps"] = values["output_tps"] + sum(inputs) / duration
    values["chunks"] = sum(len(r.pieces) for r in good)
    values["without_text"] = sum(not r.pieces for r in good)
    values["in_flight_mean"] = sum(r.e2e for r in good) / duration
    values |= distribution("ttft", (r.ttft for r in good if r.ttft is not None))
    values |= distribution("itl", (gap for r in good for gap in r.gaps))
    values |= distribution("tpot", (r.tpot for r in good if r.tpot is not None))
    values |= distribution("e2e", (r.e2e for r in good))
    result.timeline = [(r.start - start, r.ttft, r.e2e) for r in good]
    return result


def retry_values(records: list[Record]) -> dict[str, float]:
    """What the server's Retry-After headers said, and how often we did as told."""
    found: dict[str, float] = {}
    told = [r.retry_after for r in records if r.retry_after is not None]
    if told:
        found["retry_after_mean_s"] = statistics.fmean(told)
    retries = sum(r.retries for r in records)
    if retries:
        found["retries"] = retries
    return found


def judge(records: list[Record]) -> str:
    """Does the server keep up with the arrivals of an open loop, or does its queue grow?

    The requests under way are compared at half time and at the last arrival. Growth counts if it is more
    than a tenth of the arrivals in between and more than three standard deviations of chance (Poisson:
    the square root). While early requests, which met no queue, have not ended at half time, any server's
    number grows, and nothing can be told.
    """
    ordered = sorted(records, key=lambda r: r.start)
    half, last = ordered[len(ordered) // 2].start, ordered[-1].start
    early = [r.e2e for r in ordered[: max(1, len(ordered) // 4)]]
    if statistics.median(early) > half - ordered[0].start:
        return TOO_SHORT

    def under_way(moment: float) -> int:
        return sum(r.start <= moment < r.end for r in records)

    growth = under_way(last) - under_way(half)
    arrivals = len(ordered) - len(ordered) // 2
    chance = 3 * math.sqrt(under_way(half) + 1)
    return FALLS_BEHIND if growth > max(BEHIND_SHARE * arrivals, chance) else KEEPS_UP


@dataclass(frozen=True)
class Spread:
    """A figure over rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @property
    def noise(self) -> float | None:
        """Half the range, relative to the median; None of one round, which cannot tell."""
        if self.rounds < 2:
            return None
        return (self.high - self.low) / 2 / abs(self.median) if self.median else 0.0


def over_rounds(rounds: list[Round]) -> dict[str, Spread]:
    """Median and range of each figure. An interrupted round counts only if there is no other."""
    whole = [r for r in rounds if not r.interrupted] or rounds
    columns: dict[str, list[float]] = {}
    for one in whole:
        for name, value in one.values.items():
            columns.setdefault(name, []).append(value)
    return {
        name: Spread(statistics.median(column), min(column), max(column), len(column))
        for name, column in columns.items()
    }
