"""The result of a whole run, as it is reported, written to JSON and compared."""

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.loadtest.figures import FALLS_BEHIND, Round, Spread, over_rounds
from scripts.loadtest.foreign import decode, printable
from scripts.loadtest.knee import Knee, Point, find_knee
from scripts.loadtest.records import Level

FORMAT = 1
LARGEST = 1e300  # of a figure: what is computed of two must not overflow


@dataclass
class LevelResult:
    level: Level
    rounds: list[Round] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Spread]:
        return over_rounds(self.rounds)

    @property
    def errors(self) -> dict[str, int]:
        """Of all rounds, by kind."""
        found: dict[str, int] = {}
        for one in self.rounds:
            for kind, number in one.errors.items():
                found[kind] = found.get(kind, 0) + number
        return found

    @property
    def verdict(self) -> str:
        """What most rounds say of an open loop; empty of a closed one."""
        return statistics.mode(one.verdict for one in self.rounds)

    def value(self, name: str) -> float | None:
        found = self.figures.get(name)
        return None if found is None else found.median


@dataclass
class RunResult:
    settings: dict[str, Any] = field(default_factory=dict)
    server: dict[str, Any] = field(default_factory=dict)
    levels: list[LevelResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    when: str = ""  # ISO 8601

    @property
    def measured(self) -> list[LevelResult]:
        return [level for level in self.levels if level.rounds]

    def knee(self) -> Knee | None:
        points = []
        for level in sorted(self.measured, key=lambda item: item.level.value):
            throughput, latency = level.value("output_tps"), level.value("e2e_p50_ms")
            if throughput is not None and latency is not None:
                met = level.value("slo_met_percent")
                behind = level.verdict == FALLS_BEHIND
                points.append(Point(level.level.name, throughput, latency, met, behind))
        return find_knee(points)

    def as_json(self) -> dict[str, Any]:
        knee = self.knee()
        return {
            "format": FORMAT,
            "when": self.when,
            "settings": self.settings,
            "server": self.server,
            "levels": [
                {
                    "mode": level.level.mode,
                    "value": level.level.value,
                    "figures": {name: asdict(figure) for name, figure in level.figures.items()},
                    "errors": level.errors,
                    "verdict": level.verdict,
                    "rounds": [one.as_json() for one in level.rounds],
                }
                for level in self.measured
            ],
            "knee": None if knee is None else asdict(knee),
            "notes": self.notes,
        }


def write(result: RunResult, path: Path) -> None:
    text = json.dumps(finite(result.as_json()), indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def finite(tree: Any) -> Any:
    """JSON has no NaN and no infinity: both become null."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def read(path: Path) -> dict[str, Any]:
    """A result that `write` wrote. Raises ValueError with advice."""
    try:
        found = decode(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): give a file written by --json") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} is no result of this version: give a file written by --json")
    wrong = what_is_wrong(found)
    if wrong:
        raise ValueError(f"{path} is incomplete ({wrong}): give a file written by --json")
    for level in found["levels"]:
        level["value"] = math.inf if level["value"] is None else level["value"]  # --rate inf
    return found


def what_is_wrong(found: dict[str, Any]) -> str:
    """The first part that `compare` reads and that is missing or of another kind; empty if there is none."""
    for name, kind in (("when", str), ("settings", dict), ("server", dict), ("levels", list)):
        if not isinstance(found.get(name), kind):
            return f"`{name}`"
    for number, level in enumerate(found["levels"], 1):
        if not is_level(level):
            return f"level {number}"
        for name, figure in level["figures"].items():
            if not is_figure(figure):
                return f"level {number}, figure {printable(name)}"
    return ""


def is_level(level: Any) -> bool:
    return (
        isinstance(level, dict)
        and isinstance(level.get("mode"), str)
        and "value" in level
        and (level["value"] is None or is_number(level["value"]))
        and isinstance(level.get("figures"), dict)
        and isinstance(level.get("errors"), dict)
        and all(type(count) is int and is_number(count) for count in level["errors"].values())
    )


def is_figure(figure: Any) -> bool:
    """As `Spread` is written: what was not finite is null."""
    return (
        isinstance(figure, dict)
        and type(figure.get("rounds")) is int
        and all(
            name in figure and (figure[name] is None or is_number(figure[name]))
            for name in ("median", "low", "high")
        )
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST
