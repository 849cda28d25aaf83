"""What a tool found, line by line, for people and for programs."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from scripts.operate.output import is_terminal, say

COLORS = {"ok": "32", "pass": "32", "warn": "33", "fail": "31", "skip": "2"}
NAME_WIDTH = 16


@dataclass(frozen=True)
class Finding:
    level: str  # ok, warn, fail; of selftest pass, fail, skip
    name: str
    detail: str
    remedy: str = ""  # what to do, if anything is wrong
    ms: float | None = None

    def lines(self, colored: bool) -> list[str]:
        level = f"{self.level:<5}"
        if colored:
            level = f"\x1b[{COLORS[self.level]}m{level}\x1b[0m"
        time = "" if self.ms is None else f"{self.ms:8.0f} ms  "
        found = [f"{level} {self.name:<{NAME_WIDTH}} {time}{self.detail}"]
        if self.remedy:
            found.append(f"{'':5} {'':{NAME_WIDTH}} → {self.remedy}")
        return found


@dataclass
class Findings:
    """Prints each line as it comes, unless `quiet`; then `add` may raise OutputLost."""

    quiet: bool = False
    all: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.all.append(finding)
        if not self.quiet:
            say("\n".join(finding.lines(is_terminal())))

    def ok(self, name: str, detail: str) -> None:
        self.add(Finding("ok", name, detail))

    def warn(self, name: str, detail: str, remedy: str) -> None:
        self.add(Finding("warn", name, detail, remedy))

    def fail(self, name: str, detail: str, remedy: str) -> None:
        self.add(Finding("fail", name, detail, remedy))

    def count(self, level: str) -> int:
        return sum(finding.level == level for finding in self.all)

    @property
    def has_failed(self) -> bool:
        return self.count("fail") > 0

    def as_json(self, **more: Any) -> str:
        return json.dumps(
            {"passed": not self.has_failed, "findings": [asdict(f) for f in self.all], **more},
            indent=1,
        )
