"""Service-level objectives: what a request must meet to count as good."""

from dataclasses import dataclass

from scripts.loadtest.figures import percentile
from scripts.loadtest.records import Record

NAMES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class Slo:
    """Limits in milliseconds. `itl`: 99% of a request's gaps are within it; others: the one value."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """From `ttft:500,itl:60`. Raises ValueError with advice."""
        limits = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            try:
                limits[name] = float(number)
            except ValueError:
                limits[name] = -1.0
            if name not in NAMES or not limits[name] > 0:
                raise ValueError(
                    f"{part!r} is no objective: write NAME:MILLISECONDS with a name of "
                    f"{', '.join(NAMES)}, as in ttft:500,itl:60"
                )
        return cls(limits)

    def __str__(self) -> str:
        """As `parse` takes it."""
        return ",".join(f"{name}:{limit:g}" for name, limit in self.limits.items())

    def is_met(self, record: Record) -> bool:
        """A failed request meets none; what a short answer does not have, it does not violate."""
        if record.error is not None:
            return False
        for name, limit in self.limits.items():
            match name:
                case "ttft":
                    seconds = record.ttft
                case "tpot":
                    seconds = record.tpot
                case "e2e":
                    seconds = record.e2e
                case _:
                    gaps = record.gaps
                    seconds = percentile(sorted(gaps), 0.99) if gaps else None
            if seconds is None:
                if name == "ttft":
                    return False
            elif 1e3 * seconds > limit:
                return False
        return True
