"""The two kinds of load, in one process.

Closed loop: a fixed number of clients, each sending its next request when the last one has ended. It
finds what a server can do, and never overloads it: a slow server is asked less.
Open loop: requests come when they come, as users do. It finds how long users wait; if the server is too
slow, the queue grows for as long as the test runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from scripts.loadtest.records import Record
from scripts.loadtest.workload import Request

Send = Callable[[Request], Awaitable[Record]]
Done = Callable[[Record], None]


@dataclass(frozen=True)
class Job:
    """One process's part of one round of one level."""

    round_number: int
    level: int  # number of the level, for seeds
    indices: range  # of requests, in order
    clients: int = 0  # closed loop, if above 0
    arrivals: list[float] | None = None  # open loop: seconds after the start, one for each index
    seconds: float = float("inf")  # no request starts later than this
    endless: bool = False  # closed loop: `seconds` is the end, not `indices`


async def run_closed(
    job: Job, requests: Iterable[Request], start_at: float, send: Send, done: Done
) -> None:
    """`start_at`: as given by perf_counter; `done` is called with each record."""
    waiting = iter(requests)
    deadline = start_at + job.seconds

    async def client() -> None:
        for request in waiting:
            done(await send(request))
            if time.perf_counter() >= deadline:
                return

    await sleep_until(start_at)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(job.clients, len(job.indices))):
            group.create_task(client())


async def run_open(
    job: Job, requests: Iterable[Request], start_at: float, send: Send, done: Done
) -> None:
    """As `run_closed`."""

    async def one(request: Request, planned: float) -> None:
        record = await send(request)
        record.late = record.start - planned
        done(record)

    assert job.arrivals is not None, "an open loop needs arrival times"
    async with asyncio.TaskGroup() as group:
        for request, arrival in zip(requests, job.arrivals, strict=True):
            if arrival > job.seconds:
                break
            planned = start_at + arrival
            await sleep_until(planned)
            group.create_task(one(request, planned))


async def sleep_until(moment: float) -> None:
    wait = moment - time.perf_counter()
    if wait > 0:
        await asyncio.sleep(wait)
