"""The knee of a throughput-latency curve, and what to do about it."""

from dataclasses import dataclass

# Levels whose power is within this share of the greatest count as equal: runs differ by as much.
TIE = 0.05
RULE = (
    "the level with the greatest power (output tok/s divided by median latency); of those within "
    f"{TIE:.0%} of it, the one with the most throughput"
)


@dataclass(frozen=True)
class Point:
    """One level: its name, output tok/s, median end-to-end milliseconds, share that met the SLO."""

    name: str
    throughput: float
    latency_ms: float
    slo_met_percent: float | None = None
    falls_behind: bool = False

    @property
    def power(self) -> float:
        """Throughput per latency: Kleinrock, "Power and deterministic rules of thumb for
        probabilistic problems in computer communications", ICC 1979."""
        return self.throughput / self.latency_ms


@dataclass(frozen=True)
class Knee:
    name: str
    advice: str
    rule: str = RULE


def find_knee(points: list[Point], slo_share: float = 99.0) -> Knee | None:
    """The knee of levels in rising order; None of fewer than two.

    `slo_share`: percentage of requests that must meet the SLO for a level to be advised by it.
    """
    points = [p for p in points if p.throughput > 0 and p.latency_ms > 0]
    if len(points) < 2:
        return None
    best = max(p.power for p in points)
    steady = [p for p in points if not p.falls_behind] or points
    ties = [p for p in steady if p.power >= best * (1 - TIE)] or [
        max(steady, key=lambda p: p.power)
    ]
    knee = max(ties, key=lambda p: p.throughput)
    return Knee(knee.name, f"{advise(points, knee)}{advise_slo(points, slo_share)}")


def advise(points: list[Point], knee: Point) -> str:
    last, first = points[-1], points[0]
    behind = [p.name for p in points if p.falls_behind]
    text = ""
    if behind:
        text = f"The server falls behind at {behind[0]}: its queue grows without end. "
    if knee is last:
        return text + (
            f"Throughput still rises as fast as latency at {knee.name}, the last level: the knee is "
            "there or beyond, so measure higher levels."
        )
    more = last.throughput / knee.throughput - 1
    longer = last.latency_ms / knee.latency_ms
    beyond = (
        f"from there to {last.name} throughput changes by {more:+.0%} "
        f"and a request takes {longer:.1f} times as long"
    )
    if knee is first:
        return text + (
            f"The first level, {knee.name}, is already the knee: {beyond}. "
            "The knee may be lower; more load than this buys little."
        )
    return text + f"Run at about {knee.name}: {beyond}."


def advise_slo(points: list[Point], share: float) -> str:
    judged = [p for p in points if p.slo_met_percent is not None]
    if not judged:
        return ""
    meeting = [p for p in judged if (p.slo_met_percent or 0.0) >= share]
    if not meeting:
        return f" No level meets the SLO for {share:g}% of requests: load it less."
    top = max(meeting, key=lambda p: p.throughput)
    return f" {top.name.capitalize()} gives the most throughput with {share:g}% within the SLO."
