"""The table in the terminal, and the line that shows how far a run is."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from scripts.loadtest.figures import FALLS_BEHIND, TOO_SHORT, Spread
from scripts.loadtest.result import LevelResult, RunResult
from scripts.loadtest.worker import Progress

# Figure, heading, format of its number, factor
COLUMNS = (
    ("completed", "done", ",.0f", 1.0),
    ("failed", "failed", ",.0f", 1.0),
    ("given_up", "given up", ",.0f", 1.0),
    ("request_rps", "req/s", ",.2f", 1.0),
    ("output_tps", "out tok/s", ",.1f", 1.0),
    ("total_tps", "all tok/s", ",.1f", 1.0),
    ("goodput_rps", "good req/s", ",.2f", 1.0),
    ("slo_met_percent", "in SLO %", ".0f", 1.0),
)
TIMES = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "e2e"))
MACHINE = (
    ("in_flight_mean", "in flight", ".1f", 1.0),
    ("late_p99_ms", "late p99 ms", ".1f", 1.0),
    ("client_cpu_percent", "client CPU %", ".0f", 1.0),
    ("server_kv_use_peak", "KV peak %", ".0f", 100.0),
    ("server_memory_bytes_peak", "memory peak GiB", ".2f", 2.0**-30),
    ("server_gpu_memory_bytes_peak", "GPU peak GiB", ".2f", 2.0**-30),
    ("server_running_peak", "running peak", ".0f", 1.0),
    ("server_waiting_peak", "waiting peak", ".0f", 1.0),
    ("server_prefix_hit_percent", "prefix hit %", ".0f", 1.0),
    ("server_preemptions", "preempted", ".0f", 1.0),
    ("retries", "retries", ".0f", 1.0),
)


def render(result: RunResult) -> str:
    """Everything a person wants to see at the end of a run."""
    levels = result.measured
    if not levels:
        return "\n".join(["Nothing was measured.", *result.notes])
    parts = [
        "Throughput (median of rounds ± half their range)",
        table(levels, COLUMNS, spread_of="output_tps"),
        "\nTimes in ms: p50 / p90 / p99 (medians of rounds)",
        times_table(levels),
        "\nClient and server",
        table(levels, MACHINE),
    ]
    parts += [f"\n{line}" for line in tokens_lines(levels)]
    parts += error_lines(levels)
    knee = result.knee()
    if knee is not None:
        parts.append(f"\nKnee: {knee.name}, {knee.rule}.\n{knee.advice}")
    parts += [f"\nNote: {note}" for note in result.notes]
    return "\n".join(parts)


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def table(
    levels: list[LevelResult],
    columns: Sequence[tuple[str, str, str, float]],
    spread_of: str | None = None,
) -> str:
    """One row a level; columns that no level has are left out."""
    figures = [level.figures for level in levels]
    shown = [column for column in columns if any(column[0] in found for found in figures)]
    rows = [["", *(heading for _, heading, _, _ in shown)]]
    for level, found in zip(levels, figures, strict=True):
        row = [level.level.name]
        for name, _, form, factor in shown:
            text = show(found.get(name), form, factor)
            if name == spread_of:
                text += noise_of(found.get(name))
            row.append(text)
        rows.append(row)
    return grid(rows)


def show(figure: Spread | None, form: str, factor: float) -> str:
    return "-" if figure is None else format(figure.median * factor, form)


def noise_of(figure: Spread | None) -> str:
    if figure is None or figure.noise is None:
        return ""
    return f" ±{100 * figure.noise:.0f}%"


def times_table(levels: list[LevelResult]) -> str:
    rows = [["", *(heading for _, heading in TIMES)]]
    for level in levels:
        found = level.figures
        row = [level.level.name]
        for name, _ in TIMES:
            parts = [show(found.get(f"{name}_{q}_ms"), ",.1f", 1.0) for q in ("p50", "p90", "p99")]
            row.append("-" if set(parts) == {"-"} else " / ".join(parts))
        rows.append(row)
    return grid(rows)


def tokens_lines(levels: list[LevelResult]) -> list[str]:
    sources = {one.tokens_from for level in levels for one in level.rounds if one.timeline}
    said = {
        "usage": "Tokens are the server's own count (usage).",
        "chunks": "Tokens are chunks of text: the server reports no usage, or none that can be true.",
        "both": "Tokens are the server's count (usage) where given, else chunks of text.",
    }
    if not sources:
        return []
    lines = [said[sources.pop() if len(sources) == 1 else "both"]]
    for level in levels:
        if level.verdict == FALLS_BEHIND:
            lines.append(
                f"{level.level.name}: the server falls behind. Its queue grew all through the round, "
                "so these times depend on how long the test ran."
            )
        elif level.verdict == TOO_SHORT:
            lines.append(
                f"{level.level.name}: too short to tell whether the server keeps up, as a request takes "
                "more than half the time of sending. Send more --requests, or for more --seconds."
            )
    return lines


def error_lines(levels: list[LevelResult]) -> list[str]:
    lines = []
    for level in levels:
        for kind, number in sorted(level.errors.items(), key=lambda item: -item[1]):
            example = next(
                (r.error_examples[kind] for r in level.rounds if r.error_examples.get(kind)), ""
            )
            lines.append(f"  {level.level.name}: {number} x {kind}" + (example and f" ({example})"))
        told = level.value("retry_after_mean_s")
        if told is not None:
            lines.append(f"  {level.level.name}: Retry-After was {told:.1f} s on average")
    return ["\nErrors, all rounds", *lines] if lines else []


@dataclass
class LiveLine:
    """One line that is written over on a terminal; in a file, one line for each round."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    name: str = ""
    total: int | None = None  # None: as many as fit
    started: float = 0.0

    def begin(self, name: str, total: int | None) -> None:
        self.name, self.total, self.started = name, total, time.perf_counter()

    def show(self, progress: Progress) -> None:
        if not self.out.isatty():
            return
        seconds = max(time.perf_counter() - self.started, 1e-3)
        failed = f", {progress.failed} failed" if progress.failed else ""
        of = "" if self.total is None else f"/{self.total}"
        text = (
            f"{self.name}: {progress.finished}{of} requests{failed}, "
            f"{progress.tokens / seconds:,.0f} tok/s, {seconds:.0f} s"
        )
        self.write(f"\r\x1b[K{text[:110]}")

    def end(self, text: str) -> None:
        start = "\r\x1b[K" if self.out.isatty() else ""
        self.write(f"{start}{self.name}: {text}\n")

    def write(self, text: str) -> None:
        with suppress(OSError):  # a full disk: the run is worth more than this line
            self.out.write(text)
            self.out.flush()
