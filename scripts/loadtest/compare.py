"""Two results beside each other: which settings differ, and which figures by more than noise."""

import math
from typing import Any

from scripts.loadtest.foreign import printable
from scripts.loadtest.records import Level
from scripts.loadtest.report import grid

# Figure, heading, is more better
FIGURES = (
    ("output_tps", "output tok/s", True),
    ("request_rps", "requests/s", True),
    ("goodput_rps", "good requests/s", True),
    ("ttft_p50_ms", "TTFT p50", False),
    ("ttft_p99_ms", "TTFT p99", False),
    ("itl_p50_ms", "ITL p50", False),
    ("itl_p99_ms", "ITL p99", False),
    ("tpot_p50_ms", "TPOT p50", False),
    ("e2e_p50_ms", "e2e p50", False),
    ("e2e_p99_ms", "e2e p99", False),
    ("server_memory_bytes_peak", "server memory", False),
    ("server_gpu_memory_bytes_peak", "GPU memory", False),
)
EXPECTED_TO_DIFFER = {"json", "plots"}
RULE = (
    "Noise of a figure: half the range of its rounds over their median; of a ratio: the root of the sum "
    "of both squares. A difference within it is called none. What changed on the machine between the "
    "runs is not in it: when in doubt, repeat A."
)


def compare(a: dict[str, Any], b: dict[str, Any], names: tuple[str, str] = ("A", "B")) -> str:
    """Text for a person. `a`, `b`: as `result.read` returns them."""
    parts = [f"A: {names[0]} ({brief(a['when'])})", f"B: {names[1]} ({brief(b['when'])})"]
    rows = differing("client", a["settings"], b["settings"])
    rows += differing("server", a["server"], b["server"])
    if rows:
        parts += ["\nSettings that differ", grid([["", "A", "B"], *rows])]
    else:
        parts.append("\nAll settings are the same.")
    found_b = {(level["mode"], level["value"]): level for level in b["levels"]}
    common = 0
    for level in a["levels"]:
        other = found_b.pop((level["mode"], level["value"]), None)
        name = Level(level["mode"], level["value"]).name
        if other is None:
            parts.append(f"\n{name}: only in A")
            continue
        common += 1
        parts += [f"\n{name}", level_table(level, other)]
    parts += [f"\n{Level(mode, value).name}: only in B" for mode, value in found_b]
    parts.append(
        f"\n{RULE}" if common else "\nNo level is in both: run the same levels to compare."
    )
    return "\n".join(parts)


def differing(part: str, a: dict[str, Any], b: dict[str, Any]) -> list[list[str]]:
    rows = []
    for key in sorted(a.keys() | b.keys()):
        left, right = a.get(key), b.get(key)
        if left != right and key not in EXPECTED_TO_DIFFER:
            rows.append([f"{part} {printable(key)}", brief(left), brief(right)])
    return rows


def brief(value: Any) -> str:
    text = "(not there)" if value is None else printable(str(value))
    return text if len(text) <= 60 else text[:57] + "..."


def level_table(a: dict[str, Any], b: dict[str, Any]) -> str:
    rows = [["", "A", "B", "B / A", "noise", ""]]
    for name, heading, more_is_better in FIGURES:
        left, right = figure_of(a, name), figure_of(b, name)
        if left is None or right is None:
            continue
        ratio = right["median"] / left["median"] if left["median"] else math.nan
        noise = ratio_noise(left, right)
        rows.append(
            [
                heading,
                amount(left["median"]),
                amount(right["median"]),
                f"{ratio:.3f}",
                "?" if noise is None else f"±{noise:.3f}",
                verdict(ratio, noise, more_is_better),
            ]
        )
    failed = [sum(level["errors"].values()) for level in (a, b)]
    if any(failed):
        rows.append(["failed requests", *map(str, failed), "", "", ""])
    return grid(rows)


def figure_of(level: dict[str, Any], name: str) -> dict[str, Any] | None:
    """None if it was not measured, or was not finite."""
    figure: dict[str, Any] | None = level["figures"].get(name)
    return None if figure is None or None in figure.values() else figure


def amount(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:,.2f}"


def ratio_noise(a: dict[str, Any], b: dict[str, Any]) -> float | None:
    """Noise of the ratio of medians, absolute; None if either has one round only."""
    if min(a["rounds"], b["rounds"]) < 2 or not a["median"] or not b["median"]:
        return None
    relative = [(f["high"] - f["low"]) / 2 / abs(f["median"]) for f in (a, b)]
    ratio: float = b["median"] / a["median"]
    return math.hypot(*relative) * ratio


def verdict(ratio: float, noise: float | None, more_is_better: bool) -> str:
    if noise is None:
        return "noise unknown: one round"
    if math.isnan(ratio) or abs(ratio - 1) <= noise:
        return "no difference"
    return "B better" if (ratio > 1) == more_is_better else "B worse"
