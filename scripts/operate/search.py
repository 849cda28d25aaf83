"""Successive halving (Jamieson and Talwalkar 2016): all candidates for a short time, the better half for
twice as long; then what was better than the baseline, together.

    rung 0   baseline  a  b  c  d  e  f  baseline    s seconds each
    rung 1   baseline  b  c  f  baseline            2s
    last     baseline  c  c+f  baseline             4s

A machine's speed drifts, so candidates are compared within a rung only, and with a baseline that ran before
and after them: what changed in between counts as noise.
"""

import hashlib
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.operate.candidates import AGAIN, BASELINE, COMBINED, Candidate
from scripts.operate.trial import Bench, LoadFailed, Trial

FORMAT = 1
RUNGS = 2  # before the last; more would spend the time on starts of the server
FIRST_SECONDS = 9.0  # of load in the baseline's first trial, which tells what a start costs
LEAST_SECONDS, MOST_SECONDS = 4.0, 60.0  # of load in a trial of rung 0
SHARE_PLANNED = 0.9  # of the budget; the rest is for trials that take longer
LEAST_GAIN = 0.01  # less is none, whatever the noise

MakeCandidates = Callable[[dict[str, Any]], list[Candidate]]


@dataclass
class State:
    """What is kept in trials.json, from which a search goes on."""

    path: Path
    key: str
    info: dict[str, Any] = field(default_factory=dict)  # /server_info of the baseline
    candidates: list[Candidate] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # for want of time
    seconds: float = 0.0  # of rung 0; 0: not planned yet
    trials: list[Trial] = field(default_factory=list)
    combined: dict[str, str] | None = None  # flags of the last rung's; None: not decided

    @classmethod
    def load(cls, path: Path, key: str) -> "State":
        """As it was, or a new one. Raises ValueError if the file is of another search."""
        if not path.exists():
            return cls(path, key)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT or found["key"] != key:
                raise ValueError(
                    f"{path} holds trials of another load, other flags or another version: give another "
                    "--out, or remove the file"
                )
            return cls(
                path, key, found["info"],
                [Candidate(**one) for one in found["candidates"]],
                found["dropped"], found["seconds"],
                [Trial(**one) for one in found["trials"]],
                found["combined"],
            )  # fmt: skip
        except (KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not readable ({error}): remove it") from None

    def save(self) -> None:
        """Whole or not at all."""
        text = json.dumps(
            {
                "format": FORMAT,
                "key": self.key,
                "info": self.info,
                "candidates": [{"name": c.name, "flags": c.flags} for c in self.candidates],
                "dropped": self.dropped,
                "seconds": self.seconds,
                "trials": [trial.as_json() for trial in self.trials],
                "combined": self.combined,
            },
            indent=1,
        )
        beside = self.path.with_suffix(".new")
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, self.path)

    def find(self, name: str, rung: int) -> Trial | None:
        return next((t for t in self.trials if t.name == name and t.rung == rung), None)

    def baseline(self, rung: int) -> Trial | None:
        """With the scores of its second trial, if it had one."""
        first, again = self.find(BASELINE, rung), self.find(AGAIN, rung)
        return first and replace(first, scores=first.scores + (again.scores if again else []))

    def rungs_of(self, name: str) -> list[int]:
        return [trial.rung for trial in self.trials if trial.name == name and trial.scores]


def key_of(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class OutOfTime(Exception):
    """The next trial would exceed the budget."""


class Search:
    """`run` until the budget is spent or the last rung is done; `state` then has all trials."""

    def __init__(
        self,
        bench: Bench,
        state: State,
        make_candidates: MakeCandidates,
        budget_s: float,
        is_lower_better: bool,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.bench = bench
        self.state = state
        self.make_candidates = make_candidates
        self.is_lower_better = is_lower_better
        self.tell = tell
        self.bench.ends_at = time.monotonic() + budget_s
        self.is_complete = False

    def run(self) -> None:
        try:
            self.plan()
            contenders = self.state.candidates
            for rung in range(RUNGS):
                if rung and len(contenders) <= 1:
                    break
                contenders = self.run_rung(rung, contenders)
            self.run_last()
            self.is_complete = True
        except OutOfTime:
            self.tell("the budget is spent: the best so far counts; run again to go on")

    # --- rungs ------------------------------------------------------------------------------------

    def plan(self) -> None:
        """The baseline's first trial, then how long the others may be."""
        state = self.state
        baseline = Candidate(BASELINE)
        first = state.find(BASELINE, -1)
        if first is None:
            first, state.info = self.bench.run(baseline, 0, FIRST_SECONDS)
            if first.error:  # any other reason than this one is raised
                raise LoadFailed(
                    f"the budget was spent after {first.wall_s:.0f} s, before the first trial ended, which "
                    f"is a start and {FIRST_SECONDS:.0f} s of load: give more --budget-minutes"
                )
            first.rung = -1  # of another length than those of rung 0
            self.record(first)
        if not state.seconds:
            candidates = self.make_candidates(state.info)
            left = self.bench.ends_at - time.monotonic()
            count, seconds = planned(len(candidates), self.overhead(), SHARE_PLANNED * left)
            state.candidates = candidates[:count]
            state.dropped = [candidate.name for candidate in candidates[count:]]
            state.seconds = seconds
            state.save()
        total = len(state.candidates)
        self.tell(
            f"{total} settings to try, {state.seconds:.0f} s of load for each at first"
            + (f"; no time for {', '.join(state.dropped)}" if state.dropped else "")
        )

    def run_rung(self, rung: int, contenders: list[Candidate]) -> list[Candidate]:
        """The better half."""
        baseline = self.trial(Candidate(BASELINE), rung)
        trials = [(self.trial(candidate, rung), candidate) for candidate in contenders]
        self.trial(Candidate(AGAIN), rung)
        good = [(trial, candidate) for trial, candidate in trials if trial.scores]
        good.sort(key=lambda pair: self.gain(pair[0], baseline), reverse=True)
        return [candidate for _, candidate in good[: math.ceil(len(contenders) / 2)]]

    def run_last(self) -> None:
        """The best alone, and all that were better than the baseline together."""
        state = self.state
        better = self.better_ones()
        if state.combined is None:
            state.combined = {}
            for candidate in better:  # the best first: of two values of a setting it stays
                for name, value in candidate.flags.items():
                    state.combined.setdefault(name, value)
            state.save()
        if not better:
            return
        self.trial(Candidate(BASELINE), RUNGS)
        self.trial(better[0], RUNGS)
        if len(state.combined) > 1:
            self.trial(Candidate(COMBINED, state.combined), RUNGS)
        self.trial(Candidate(AGAIN), RUNGS)

    def better_ones(self) -> list[Candidate]:
        """Better than the baseline beyond noise in the longest trial that each had; best first."""
        found = []
        for candidate in self.state.candidates:
            rungs = [rung for rung in self.state.rungs_of(candidate.name) if rung < RUNGS]
            if rungs:
                trial = self.state.find(candidate.name, max(rungs))
                baseline = self.state.baseline(max(rungs))
                assert trial is not None
                if baseline is not None and baseline.scores and self.is_better(trial, baseline):
                    found.append((max(rungs), self.gain(trial, baseline), candidate))
        found.sort(key=lambda entry: entry[:2], reverse=True)
        return [candidate for _, _, candidate in found]

    # --- trials -----------------------------------------------------------------------------------

    def trial(self, candidate: Candidate, rung: int) -> Trial:
        """From an earlier run, or now. Raises OutOfTime if it would not end in time."""
        known = self.state.find(candidate.name, rung)
        if known is not None:
            return known
        seconds = self.state.seconds * 2**rung
        if time.monotonic() + self.overhead() + seconds > self.bench.ends_at:
            raise OutOfTime
        trial, _ = self.bench.run(candidate, rung, seconds)
        self.check_time(trial)
        self.record(trial)
        return trial

    def overhead(self) -> float:
        """Seconds of a trial beside its load, by those there were."""
        good = [trial for trial in self.state.trials if trial.scores]
        return statistics.fmean(max(0.0, trial.wall_s - trial.seconds) for trial in good)

    def check_time(self, trial: Trial) -> None:
        """Raises OutOfTime for a trial that failed because the budget ended it."""
        if trial.error and time.monotonic() >= self.bench.ends_at:
            raise OutOfTime

    def record(self, trial: Trial) -> None:
        self.state.trials.append(trial)
        self.state.save()
        label = "first" if trial.rung < 0 else "last" if trial.rung == RUNGS else f"{trial.rung}"
        what = trial.error.splitlines()[0] if trial.error else f"{trial.score:.4g}"
        if trial.scores:
            what += f" ± {trial.noise:.0%} {self.bench.figure}"
        self.tell(f"  rung {label:<5} {trial.name:<34} {what}  ({trial.wall_s:.0f} s)")

    def gain(self, trial: Trial, baseline: Trial) -> float:
        """How much better, as a share: 0.1 is 10% more, or less if less is better."""
        if not baseline.scores or not baseline.score:
            return math.inf if trial.score and not self.is_lower_better else 0.0
        ratio = trial.score / baseline.score
        return 1 / ratio - 1 if self.is_lower_better and ratio else ratio - 1

    def is_better(self, trial: Trial, baseline: Trial) -> bool:
        return self.gain(trial, baseline) > max(LEAST_GAIN, noise_of(trial, baseline))


def noise_of(trial: Trial, baseline: Trial) -> float:
    """Of their ratio: the root of the summed squares of both (docs/benchmarking.md)."""
    return math.hypot(trial.noise, baseline.noise)


def planned(candidates: int, overhead_s: float, budget_s: float) -> tuple[int, float]:
    """How many candidates fit, and seconds of load for each in rung 0.

    With n candidates the rungs have n + 2, n/2 + 2 and 4 trials; rung r takes 2^r as long.
    """
    for count in range(candidates, 0, -1):
        sizes = [2 + math.ceil(count / 2**rung) for rung in range(RUNGS)] + [4]
        for_load = budget_s - overhead_s * sum(sizes)
        seconds = for_load / sum(size * 2**rung for rung, size in enumerate(sizes))
        if seconds >= LEAST_SECONDS:
            return count, min(seconds, MOST_SECONDS)
    return min(1, candidates), LEAST_SECONDS
