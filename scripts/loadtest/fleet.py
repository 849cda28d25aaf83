"""The client processes as one: deals a round's requests to them and gathers their records."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, cast

from scripts.loadtest.client import Target
from scripts.loadtest.load import Job
from scripts.loadtest.records import Level, Record
from scripts.loadtest.worker import STOP, Outcome, Progress, worker_main
from scripts.loadtest.workload import Workload, poisson_arrivals

TICK_S = 0.25
STOP_PATIENCE_S = 10.0
ENDLESS = 10**9  # requests
EXIT_PATIENCE_S = 5.0
START_DELAY_S = 0.05  # from telling all processes to the common start


class ClientFailed(Exception):
    """A client process ended by itself."""


@dataclass
class Stop:
    """Set by Ctrl-C: give up what is under way and report."""

    requested: bool = False


@dataclass
class RoundResult:
    records: list[Record] = field(default_factory=list)
    cpu_percent: float = 0.0  # of one core, of the busiest client process
    chunks_per_cpu_s: float = 0.0
    abandoned: int = 0


@dataclass
class Fleet:
    """Use as a context manager. Processes are started once and take one job after the other."""

    target: Target
    workload: Workload
    processes: int
    stop: Stop = field(default_factory=Stop)
    pipes: list[Connection] = field(default_factory=list)
    members: list[SpawnProcess] = field(default_factory=list)

    def __enter__(self) -> "Fleet":
        context = multiprocessing.get_context("spawn")
        for _ in range(self.processes):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker_main, args=(theirs, self.target, self.workload), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.members.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.members:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def run(
        self,
        level: Level,
        number: int,
        round_number: int,
        count: int | None,
        seconds: float = float("inf"),
        tell: Callable[[Progress], None] = lambda progress: None,
    ) -> RoundResult:
        """One round of `count` requests, or of as many as fit into `seconds` (closed loop only).

        `tell` is called a few times a second. Raises ClientFailed if a process dies.
        """
        jobs = self.deal(level, number, round_number, count, seconds)
        active = {pipe: Progress() for pipe in self.pipes[: len(jobs)]}
        for pipe, job in zip(active, jobs, strict=True):
            deliver(pipe, job)
        for pipe in active:
            self.receive(pipe)  # READY
        start = time.perf_counter() + START_DELAY_S
        for pipe in active:
            deliver(pipe, start)
        return self._gather(active, tell)

    def deal(
        self, level: Level, number: int, round_number: int, count: int | None, seconds: float
    ) -> list[Job]:
        """The processes' parts: as many clients each, or every so-manieth arrival."""
        endless = count is None
        count = ENDLESS if count is None else count
        if level.mode == "closed":
            clients = int(level.value)
            parts = min(self.processes, clients, count)
            return [
                Job(
                    round_number,
                    number,
                    range(part, count, parts),
                    clients=clients // parts + (part < clients % parts),
                    seconds=seconds,
                    endless=endless,
                )
                for part in range(parts)
            ]
        arrivals = poisson_arrivals(level.value, count, self.workload.seed, round_number, number)
        parts = min(self.processes, count)
        return [
            Job(
                round_number,
                number,
                range(part, count, parts),
                arrivals=arrivals[part::parts],
                seconds=seconds,
            )
            for part in range(parts)
        ]

    def _gather(
        self, active: dict[Connection, Progress], tell: Callable[[Progress], None]
    ) -> RoundResult:
        outcomes: list[Outcome] = []
        open_pipes = set(active)
        give_up_at: float | None = None
        while open_pipes:
            if self.stop.requested and give_up_at is None:
                give_up_at = time.perf_counter() + STOP_PATIENCE_S
                for pipe in open_pipes:
                    deliver(pipe, STOP)
            if give_up_at is not None and time.perf_counter() > give_up_at:
                break
            for ready in wait(list(open_pipes), TICK_S):
                pipe = cast(Connection, ready)
                message = self.receive(pipe)
                if isinstance(message, Outcome):
                    outcomes.append(message)
                    open_pipes.discard(pipe)
                else:
                    active[pipe] = message
            shown = active.values()
            tell(
                Progress(
                    sum(p.finished for p in shown),
                    sum(p.failed for p in shown),
                    sum(p.tokens for p in shown),
                )
            )
        return combine(outcomes)

    def receive(self, pipe: Connection) -> Any:
        """The next message. Raises ClientFailed if the process at the other end is gone."""
        try:
            return pipe.recv()
        except (EOFError, OSError):
            process = self.members[self.pipes.index(pipe)]
            process.join(EXIT_PATIENCE_S)  # its end of the pipe is closed shortly before
            raise ClientFailed(ending(process.exitcode)) from None


def deliver(pipe: Connection, message: Any) -> None:
    """To a client process; if it is gone, the next `Fleet.receive` says so."""
    with suppress(OSError):
        pipe.send(message)


def ending(exit_code: int | None) -> str:
    """How a client process ended by itself, and what helps."""
    if exit_code == -signal.SIGKILL:
        return (
            "a client process ended: something killed it (SIGKILL), for want of memory as a rule: use "
            "shorter rounds or fewer --processes"
        )
    if exit_code is not None and exit_code < 0:
        return f"a client process ended by itself, by signal {-exit_code}"
    return f"a client process ended by itself, with exit code {exit_code}: its error is above"


def combine(outcomes: list[Outcome]) -> RoundResult:
    result = RoundResult()
    for outcome in outcomes:
        result.records += outcome.records
        result.abandoned += outcome.abandoned
        result.cpu_percent = max(result.cpu_percent, 100 * outcome.cpu_s / outcome.wall_s)
    cpu = sum(outcome.cpu_s for outcome in outcomes)
    chunks = sum(len(record.pieces) for record in result.records)
    result.chunks_per_cpu_s = chunks / cpu if cpu > 0 else 0.0
    return result
