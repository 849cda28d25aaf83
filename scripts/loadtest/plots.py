"""PNG plots of a run: the throughput-latency curve, and the time to first text over a round."""

from pathlib import Path
from typing import Any

from scripts.loadtest.result import LevelResult, RunResult

NAMES = ("curve.png", "ttft.png")
ADVICE = "no plots: matplotlib is not installed (pip install matplotlib)"


def draw(result: RunResult, folder: Path) -> list[Path]:
    """Write the plots that the result has data for. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    levels = [
        level
        for level in sorted(result.measured, key=lambda item: item.level.value)
        if level.value("output_tps") is not None
    ]
    if not levels:
        return []
    written = []
    for name, plot in zip(NAMES, (draw_curve, draw_ttft), strict=True):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        plot(axes, levels, result)
        axes.grid(alpha=0.3)
        figure.savefig(folder / name, dpi=110)
        pyplot.close(figure)
        written.append(folder / name)
    return written


def draw_curve(axes: Any, levels: list[LevelResult], result: RunResult) -> None:
    """End-to-end latency against throughput; the knee is marked. Up and to the left is bad."""
    throughput = [level.figures["output_tps"] for level in levels]
    for quantile, style in (("p50", "o-"), ("p99", "s--")):
        latency = [level.figures[f"e2e_{quantile}_ms"] for level in levels]
        axes.errorbar(
            [figure.median for figure in throughput],
            [figure.median / 1e3 for figure in latency],
            xerr=bars(throughput, 1.0),
            yerr=bars(latency, 1e-3),
            fmt=style,
            capsize=3,
            label=f"end to end, {quantile}",
        )
    for level, figure in zip(levels, throughput, strict=True):
        y = level.figures["e2e_p50_ms"].median / 1e3
        axes.annotate(
            f"{level.level.value:g}",
            (figure.median, y),
            xytext=(6, -12),
            textcoords="offset points",
        )
    knee = result.knee()
    for level, figure in zip(levels, throughput, strict=True):
        if knee is not None and level.level.name == knee.name:
            y = level.figures["e2e_p50_ms"].median / 1e3
            axes.plot(
                figure.median, y, "o", ms=16, mfc="none", mec="tab:red", label=f"knee: {knee.name}"
            )
    axes.set_xlabel("output tokens per second")
    axes.set_ylabel("seconds per request")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    kind = "clients" if levels[0].level.mode == "closed" else "requests per second"
    axes.set_title(f"{result.settings.get('model', '')}: throughput and latency by {kind}")
    axes.legend()


def bars(figures: list[Any], factor: float) -> list[list[float]]:
    """Distances from the median down to the lowest and up to the highest round."""
    return [
        [(f.median - f.low) * factor for f in figures],
        [(f.high - f.median) * factor for f in figures],
    ]


def draw_ttft(axes: Any, levels: list[LevelResult], result: RunResult) -> None:
    """Each request of the last round: when it was sent, and how long its first text took.

    A level line means that the server keeps up; one that rises, that a queue grows.
    """
    for level in levels:
        points = [(at, ttft) for at, ttft, _ in level.rounds[-1].timeline if ttft is not None]
        axes.plot(
            [at for at, _ in points],
            [1e3 * ttft for _, ttft in points],
            ".",
            ms=5,
            alpha=0.7,
            label=level.level.name,
        )
    axes.set_xlabel("seconds from the round's start, when sent")
    axes.set_ylabel("ms to the first text")
    axes.set_ylim(bottom=0)
    axes.set_title(f"{result.settings.get('model', '')}: TTFT over the last round")
    axes.legend()
