"""A client process: takes jobs from a pipe, sends back progress and records.

parent ──Job──► worker        it makes the bodies, so that this does not cost measured time; if their
                              number is open, it makes them on the way
parent ◄──READY── worker
parent ──moment──► worker     when all are ready: the moment at which all begin
parent ◄──Progress── worker   a few times a second
parent ──STOP──► worker       only if interrupted: give up what is under way
parent ◄──Outcome── worker    once for each job
"""

import asyncio
import gc
import resource
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from scripts.loadtest.client import Target, open_session, send
from scripts.loadtest.load import Job, run_closed, run_open
from scripts.loadtest.records import Record
from scripts.loadtest.workload import Request, Workload

PROGRESS_S = 0.25
READY, STOP = "ready", "stop"


@dataclass
class Progress:
    finished: int = 0
    failed: int = 0
    tokens: int = 0  # of finished requests


@dataclass
class Outcome:
    """Records of one job, with the CPU time and the wall time that the process took for it."""

    records: list[Record] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    abandoned: int = 0  # requests under way when told to stop


def worker_main(pipe: Connection, target: Target, workload: Workload) -> None:
    """Serve jobs until the parent closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one file handle for each connection
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            while True:
                job = pipe.recv()
                if job == STOP:  # it came after the job's end
                    continue
                requests: Iterable[Request] = (
                    workload.request(job.round_number, job.level, index) for index in job.indices
                )
                if not job.endless:
                    requests = list(requests)
                pipe.send(READY)
                start_at = pipe.recv()
                if start_at == STOP:
                    pipe.send(Outcome())
                else:
                    pipe.send(runner.run(run_job(pipe, target, job, requests, start_at)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has ended


def loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """uvloop costs less for each chunk; without it asyncio's own loop does."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


async def run_job(
    pipe: Connection, target: Target, job: Job, requests: Iterable[Request], start_at: float
) -> Outcome:
    """Nothing is collected as garbage while the clock runs."""
    outcome, progress = Outcome(), Progress()
    under_way = 0

    def done(record: Record) -> None:
        outcome.records.append(record)
        progress.finished += 1
        progress.failed += record.error is not None
        progress.tokens += record.tokens

    async with open_session(target) as session:

        async def send_one(request: Request) -> Record:
            nonlocal under_way
            under_way += 1
            record = await send(session, target, request)
            under_way -= 1
            return record

        run = run_closed if job.clients else run_open
        load = asyncio.ensure_future(run(job, requests, start_at, send_one, done))
        attending = asyncio.ensure_future(attend(pipe, progress, load))
        gc.collect()
        gc.disable()
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            await load
        except asyncio.CancelledError:
            outcome.abandoned = under_way
        finally:
            outcome.cpu_s = time.process_time() - cpu
            outcome.wall_s = max(time.perf_counter() - max(wall, start_at), 1e-9)
            gc.enable()
            attending.cancel()
    return outcome


async def attend(pipe: Connection, progress: Progress, load: "asyncio.Future[None]") -> None:
    """Report progress; end the load when told to, or when the parent is gone.

    The pipe is asked, not watched: an event loop would make it non-blocking, which its users are not
    prepared for.
    """
    while True:
        await asyncio.sleep(PROGRESS_S)
        try:
            if pipe.poll():
                pipe.recv()  # only STOP comes while a job runs
                load.cancel()
                return
            pipe.send(progress)
        except (OSError, EOFError):
            load.cancel()
            return
