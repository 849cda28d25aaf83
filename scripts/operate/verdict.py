"""The end of a tuning: which settings, why, and the file for `serve.py --config`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.operate.candidates import COMBINED
from scripts.operate.search import RUNGS, Search, noise_of
from scripts.operate.trial import Trial
from server.config import SECRETS


@dataclass(frozen=True)
class Verdict:
    flags: dict[str, str]  # to add; none if the baseline is not beaten
    headline: str
    reasons: list[str]


def decide(search: Search) -> Verdict:
    """The winner is compared with the baseline of its own rung; of equals the one with fewer flags."""
    state = search.state
    by_name = {candidate.name: candidate.flags for candidate in state.candidates}
    if state.combined:
        by_name[COMBINED] = state.combined
    pairs = {name: pair for name in by_name if (pair := longest(search, name)) is not None}
    ordered = sorted(pairs, key=lambda name: search.gain(*pairs[name]), reverse=True)
    reasons = [describe(search, name, *pairs[name]) for name in ordered]
    reasons += [f"{trial.name}: failed: {trial.error}" for trial in state.trials if trial.error]
    reasons += [f"{name}: not tried, for want of time" for name in state.dropped]
    best: tuple[Trial, Trial] | None = None
    for name in [*[candidate.name for candidate in search.better_ones()][:1], COMBINED]:
        pair = pairs.get(name)
        if pair is None or not search.is_better(*pair):
            continue
        if best is None or search.is_better(pair[0], best[0]):
            best = pair
    if best is None:
        figure = search.bench.figure
        return Verdict({}, f"nothing was better in {figure} than the server as it is", reasons)
    return Verdict(by_name[best[0].name], f"{best[0].name}: {compare(search, *best)}", reasons)


def longest(search: Search, name: str) -> tuple[Trial, Trial] | None:
    """The longest trial of a candidate and the baseline's of the same rung."""
    for rung in sorted(search.state.rungs_of(name), reverse=True):
        trial, baseline = search.state.find(name, rung), search.state.baseline(rung)
        if trial is not None and baseline is not None and baseline.scores:
            return trial, baseline
    return None


def describe(search: Search, name: str, trial: Trial, baseline: Trial) -> str:
    if search.is_better(trial, baseline):
        word = "better"
    elif search.gain(trial, baseline) < -noise_of(trial, baseline):
        word = "worse"
    else:
        word = "no difference beyond noise"
    rung = "last rung" if trial.rung == RUNGS else f"rung {trial.rung}"
    return f"{name}: {word} in {rung}: {compare(search, trial, baseline)}"


def compare(search: Search, trial: Trial, baseline: Trial) -> str:
    figure = search.bench.figure
    text = f"{figure} {trial.score:.4g} instead of {baseline.score:.4g}"
    if baseline.score:
        change = trial.score / baseline.score - 1
        text += f" ({change:+.0%}, noise {noise_of(trial, baseline):.0%})"
    others = [
        f"{name} {baseline.figures[name]:.4g} → {trial.figures[name]:.4g}"
        for name in ("ttft_p50_ms", "itl_p99_ms", "output_tps")
        if name != figure and name in trial.figures and name in baseline.figures
    ]
    return text + (f"; {', '.join(others)}" if others else "")


def report(search: Search, verdict: Verdict) -> str:
    lines = [verdict.headline, "", *(f"  {reason}" for reason in verdict.reasons)]
    return "\n".join(lines)


def plain(value: str) -> str | int | bool:
    """As people write it in a YAML file."""
    if value in ("true", "false"):
        return value == "true"
    return int(value) if value.isdigit() else value


def write_config(
    path: Path, search: Search, verdict: Verdict, given: dict[str, Any], load_flags: list[str]
) -> None:
    """A file for `serve.py --config`: the flags that all trials had, and those that won. No keys."""
    import yaml  # type: ignore[import-untyped]

    secrets = [name for name in SECRETS if name in given]
    values = {name.replace("_", "-"): v for name, v in given.items() if name not in SECRETS}
    values |= {name: plain(value) for name, value in verdict.flags.items()}
    head = [
        "Written by scripts/tune.py, for `serve.py --config`.",
        f"Load: bench_serve.py {shlex.join(load_flags)}",
        *verdict.headline.splitlines(),
        *(line for reason in verdict.reasons for line in reason.splitlines()),
    ]
    if secrets:
        head.append(f"Left out, give them again: {', '.join(secrets)}")
    if not search.is_complete:
        head.append("The search was not complete: more time may find better.")
    text = "".join(f"# {line}\n" for line in head)
    if values:
        text += yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    path.write_text(text, encoding="utf-8")
