"""One trial of a tuning: start a server with the candidate's flags, put the load on it, end it."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.loadtest.watch import ServerInfo
from scripts.operate.candidates import Candidate
from scripts.operate.server_process import ServerFailed, ServerProcess
from server.config import REPOSITORY

ROUNDS = 3
START_TIMEOUT_S = 300.0
PLAIN_HTTP = ["--ssl-certfile=", "--ssl-keyfile=", "--ssl-ca-certs=", "--ssl-cert-reqs=0"]
GRACE_S = 60.0  # beyond twice the time that a load test was expected to take
SHOWN = ("output_tps", "goodput_rps", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")


class LoadFailed(Exception):
    """The load test had no result, or not one request succeeded."""

    def __init__(self, message: str, is_usage: bool = False) -> None:
        super().__init__(message)
        self.is_usage = is_usage  # wrong options: no other trial would do better


@dataclass
class Trial:
    """A candidate's result in one rung. `scores`: the figure in each round; empty if it failed."""

    name: str
    rung: int
    seconds: float  # of load that were asked for
    wall_s: float = 0.0  # all of it, start and end of the server included
    start_s: float = 0.0
    scores: list[float] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)  # medians of SHOWN, mean over levels
    error: str = ""

    @property
    def score(self) -> float:
        return statistics.median(self.scores)

    @property
    def noise(self) -> float:
        """Half the range of the rounds, relative to their median."""
        half = (max(self.scores) - min(self.scores)) / 2
        return half / abs(self.score) if self.score else 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Bench:
    """How a trial is run: the load, the flags that all servers get, where logs go."""

    load_flags: list[str]  # of bench_serve.py
    serve_flags: list[str]
    num_levels: int
    figure: str
    folder: Path
    ends_at: float = math.inf  # `time.monotonic()`: what still runs then is ended, and fails

    def run(self, candidate: Candidate, rung: int, seconds: float) -> tuple[Trial, dict[str, Any]]:
        """The trial, and /server_info. A failure is part of the trial, but for wrong options.

        So is the end of the budget. Raises LoadFailed or ServerFailed if the command is at fault,
        KeyboardInterrupt; nothing is left running.
        """
        trial = Trial(candidate.name, rung, seconds)
        info: dict[str, Any] = {}
        began = time.monotonic()
        # the load test would not trust the certificate, which costs all candidates the same
        flags = [*self.serve_flags, *candidate.tokens, *PLAIN_HTTP]
        try:
            with ServerProcess(flags, self.folder / "server.log") as server:
                server.wait_ready(self.time_for(START_TIMEOUT_S))
                trial.start_s = server.ready_s
                headers = {"Authorization": f"Bearer {server.key}"}
                info = ServerInfo(server.url, headers).get_json("/server_info")
                self.measure(trial, server)
        except (ServerFailed, LoadFailed) as error:
            is_usage = isinstance(error, LoadFailed) and error.is_usage
            if is_usage or (not candidate.flags and rung == 0 and not self.is_cut(error)):
                raise
            trial.error = str(error).strip()
        trial.wall_s = time.monotonic() - began
        return trial, info

    def measure(self, trial: Trial, server: ServerProcess) -> None:
        """Raises LoadFailed."""
        result = self.folder / "load.json"
        result.unlink(missing_ok=True)
        share = trial.seconds / (ROUNDS * self.num_levels)
        command = [
            *(sys.executable, str(REPOSITORY / "scripts" / "bench_serve.py"), *self.load_flags),
            *("--url", server.url, "--api-key", server.key, "--json", str(result)),
            *("--rounds", str(ROUNDS), "--seconds", f"{share:.3f}"),
        ]
        log = self.folder / "load.log"
        code = run_group(command, log, self.time_for(2 * trial.seconds + GRACE_S))
        if code not in (0, 1) or not result.exists():
            tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise LoadFailed(
                f"the load test ended with exit code {code}: {' '.join(tail)}", code == 2
            )
        levels = json.loads(result.read_text(encoding="utf-8"))["levels"]
        trial.scores = scores_of(levels, self.figure)
        trial.figures = {
            name: statistics.fmean(level["figures"][name]["median"] for level in levels)
            for name in {*SHOWN, self.figure}
            if levels and all(name in level["figures"] for level in levels)
        }
        if not trial.scores:
            raise LoadFailed(f"no round gave {self.figure}: see {log}")

    def is_cut(self, error: ServerFailed | LoadFailed) -> bool:
        """Has the end of the budget ended the trial, rather than the server itself?"""
        return getattr(error, "exit_code", None) is None and time.monotonic() >= self.ends_at

    def time_for(self, wanted_s: float) -> float:
        return max(0.0, min(wanted_s, self.ends_at - time.monotonic()))


def scores_of(levels: list[dict[str, Any]], figure: str) -> list[float]:
    """The figure in each round, its mean over the levels; rounds in which a level lacks it are left out."""
    rounds = zip(*(level["rounds"] for level in levels), strict=False)
    return [
        statistics.fmean(level["values"][figure] for level in one)
        for one in rounds
        if all(figure in level["values"] for level in one)
    ]


def run_group(command: list[str], log: Path, timeout_s: float) -> int:
    """Exit code of a command that ends with all it started, whatever ends us; -9 if it took too long."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own group, which it leads
            process.wait()
