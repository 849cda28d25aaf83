"""Sends one request and records what came back, whatever it is."""

import asyncio
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from scripts.loadtest.foreign import decode, printable
from scripts.loadtest.records import Record
from scripts.loadtest.scan import BadStream, StreamScan
from scripts.loadtest.workload import Request

CONNECT_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 4.0  # below the shortest of common servers, which close idle connections after 5
MOST_RETRY_WAIT_S = 60.0
END_PATIENCE_S = 0.1  # from [DONE] to the end of the body
LONGEST_REFUSAL = 1 << 16  # bytes that are read of it
MOST_TOKENS = 10**9  # of one request: a server that counts more is wrong


@dataclass(frozen=True)
class Target:
    """Where requests go, and how patiently."""

    url: str  # of the endpoint, in full
    headers: dict[str, str] = field(default_factory=dict, repr=False)  # they may hold a key
    timeout_s: float = 600.0  # for a whole request
    retries: int = 0  # after 429 and 503, waiting as Retry-After says


def open_session(target: Target) -> aiohttp.ClientSession:
    """One connection for each request that is under way; none is queued in the client."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, keepalive_timeout=KEEP_ALIVE_S),
        headers={
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",  # what is read is not unpacked
            **target.headers,
        },
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        auto_decompress=False,
    )


async def send(session: aiohttp.ClientSession, target: Target, request: Request) -> Record:
    """Never raises for anything a server does: the record names it."""
    record = Record(start=time.perf_counter(), asked_tokens=request.max_tokens)
    try:
        async with asyncio.timeout(target.timeout_s):
            while not await attempt(session, target, request, record):
                record.retries += 1
                await asyncio.sleep(min(record.retry_after or 1.0, MOST_RETRY_WAIT_S))
    except TimeoutError:
        if record.end and record.error is None:
            return record  # only the body's end was still waited for
        when = "mid-stream" if record.pieces else "before the first text"
        fail(record, f"timeout {when}", f"no end after {target.timeout_s:g} s")
    record.end = record.end or time.perf_counter()
    return record


def fail(record: Record, kind: str, detail: object) -> None:
    record.error = kind
    record.detail = printable(str(detail)[:300])
    record.end = time.perf_counter()


async def attempt(
    session: aiohttp.ClientSession, target: Target, request: Request, record: Record
) -> bool:
    """One try; False if it should be tried again."""
    scan = StreamScan(record.pieces)
    record.error, record.end = None, 0.0
    try:
        async with session.post(target.url, data=request.body) as response:
            record.status = response.status
            if response.status != 200:
                await take_refusal(response, record)
                return not (response.status in (429, 503) and record.retries < target.retries)
            if response.content_type != "text/event-stream":
                fail(record, "not a stream", f"the answer is {response.content_type}")
                return True
            await read_stream(response, scan, record)
    except aiohttp.ConnectionTimeoutError as error:
        fail(record, "connect timeout", error)
    except aiohttp.ClientConnectorError as error:
        refused = isinstance(error.os_error, ConnectionRefusedError)
        fail(record, "connection refused" if refused else "cannot connect", error.os_error)
    except (aiohttp.ClientError, OSError) as error:
        # TimeoutError is an OSError, too, but asyncio.timeout raises it further out
        started = record.status == 200
        fail(record, "closed mid-stream" if started else "closed before an answer", error)
    except BadStream as error:
        fail(record, "bad stream", error)
    return True


async def take_refusal(response: aiohttp.ClientResponse, record: Record) -> None:
    record.retry_after = seconds_of(response.headers.get("Retry-After", ""))
    body = b""
    while len(body) < LONGEST_REFUSAL and (data := await response.content.readany()):
        body += data
    text = body.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(decode(text)["error"]["message"])
    fail(record, f"HTTP {response.status}", text)


def seconds_of(header: str) -> float | None:
    """What Retry-After says in digits; None for a date, or for what is no number."""
    if not (header.isascii() and header.replace(".", "", 1).isdigit()):
        return None
    seconds = float(header)
    return seconds if math.isfinite(seconds) else None


async def read_stream(response: aiohttp.ClientResponse, scan: StreamScan, record: Record) -> None:
    """The request's end is [DONE], or the body's if none comes."""
    read, feed, clock = response.content.readany, scan.feed, time.perf_counter
    while scan.done is None and (data := await read()):
        feed(data, clock())
    now = clock()
    if scan.done is None:
        scan.close(now)
    take_result(scan, record, now)
    await await_end(response)


def take_result(scan: StreamScan, record: Record, now: float) -> None:
    if scan.usage is not None:
        record.prompt_tokens = count_of(scan.usage, "prompt_tokens")
        record.completion_tokens = count_of(scan.usage, "completion_tokens")
    if scan.error is not None:
        fail(record, "error in the stream", scan.error)
    elif scan.done is None and not scan.finished:
        fail(record, "closed mid-stream", "the stream ended without finish_reason or [DONE]")
    else:
        record.end = scan.done or now


async def await_end(response: aiohttp.ClientResponse) -> None:
    """A body that ends soon leaves its connection for the next request; another is closed on release."""
    with suppress(TimeoutError, aiohttp.ClientError, OSError):  # the answer is complete
        async with asyncio.timeout(END_PATIENCE_S):
            while await response.content.readany():
                pass


def count_of(usage: dict[str, object], name: str) -> int | None:
    """None, as if it had not been counted, for what can be no number of tokens."""
    value = usage.get(name)
    # type(): True is an int, too
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else None
