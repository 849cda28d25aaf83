"""What the client itself can take: a stub server sends chunks, the client times them.

The stub writes one event to each connection in turn, as a server does after a step. First in steps, with
pauses: the worst case for a client, which is woken for nearly every chunk. Then without a pause: chunks
pile up in sockets and come many to a read. Stub and client need a core each.
"""

import asyncio
import multiprocessing
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from scripts.loadtest.client import Target
from scripts.loadtest.figures import summarize
from scripts.loadtest.fleet import ClientFailed, Fleet
from scripts.loadtest.outputs import say
from scripts.loadtest.records import Level
from scripts.loadtest.workload import Lengths, Workload

WANTED_CHUNKS_PER_S = 20_000
CLIENTS = 64
CHUNKS = 500  # of one request
STEP_S = 0.0025  # 25,600 chunks a second
EVENT = (
    b'data: {"id":"cmpl-00000000000000000000000000000000","object":"text_completion",'
    b'"created":1700000000,"model":"stub","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
)
LAST = EVENT.replace(b'"finish_reason":null', b'"finish_reason":"length"').replace(b" word", b"")
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def frame(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class StubConnection(asyncio.Protocol):
    """Answers every request with `CHUNKS` events; `step` sends the next one."""

    def __init__(self, streams: "set[StubConnection]") -> None:
        self.streams = streams
        self.left = 0
        self.paused = False
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.streams.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.endswith(b"}"):  # a whole body; the client sends nothing before our answer
            self.received = b""
            self.left = CHUNKS
            self.transport.write(HEAD)
            self.streams.add(self)

    def step(self, event: bytes, end: bytes) -> None:
        if self.paused:
            return
        self.left -= 1
        if self.left < 0:
            self.transport.write(end)
            self.streams.discard(self)
        else:
            self.transport.write(event)


def stub_main(pipe: Connection, period_s: float) -> None:
    """Serve on a free port, told through the pipe, until it closes."""
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_stub(pipe, period_s))


async def serve_stub(pipe: Connection, period_s: float) -> None:
    """A step every `period_s` seconds; 0: without a pause."""
    streams: set[StubConnection] = set()
    event, end = frame(EVENT), frame(LAST) + frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StubConnection(streams), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    ended = asyncio.Event()
    loop.add_reader(pipe.fileno(), ended.set)
    next_step = loop.time()
    while not ended.is_set():
        for stream in tuple(streams):
            stream.step(event, end)
        next_step = max(next_step + period_s, loop.time())  # steps that were missed are not made up
        await asyncio.sleep(next_step - loop.time() if streams else 0.001)


@dataclass(frozen=True)
class Measured:
    chunks_per_s: float
    cpu_percent: float  # of a core, of the client
    capacity: float  # chunks per second of the client's CPU time
    reads_per_chunk: float  # 1: woken for each


def measure(period_s: float) -> Measured:
    """Raises ClientFailed if not every chunk was seen."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stub = context.Process(target=stub_main, args=(theirs, period_s), daemon=True)
    stub.start()
    theirs.close()
    try:
        target = Target(f"http://127.0.0.1:{ours.recv()}/v1/completions", timeout_s=120.0)
        one = Lengths("fixed", 1)
        workload = Workload("stub", chat=False, text=False, input_len=one, output_len=one)
        with Fleet(target, workload, processes=1) as fleet:
            done = fleet.run(Level("closed", CLIENTS), 0, 0, 2 * CLIENTS)
    finally:
        ours.close()
        stub.join(2)
        stub.kill()
    found = summarize(done.records)
    chunks = sum(len(record.pieces) for record in done.records)
    if found.errors or chunks != 2 * CLIENTS * CHUNKS:
        raise ClientFailed(f"not all answers were read: {chunks} chunks, errors {found.errors}")
    reads = sum(len(set(record.pieces)) for record in done.records)
    return Measured(
        chunks / found.values["duration_s"],
        done.cpu_percent,
        done.chunks_per_cpu_s,
        reads / chunks,
    )


def run_self_test() -> int:
    """Exit code: 0 if one core takes WANTED_CHUNKS_PER_S when woken for every chunk, else 1."""
    told = say(f"{CLIENTS} streams of one client process, {CHUNKS:,} chunks each:")
    enough = True
    for name, period_s, wanted in (("steps", STEP_S, WANTED_CHUNKS_PER_S), ("flood", 0.0, 0)):
        m = measure(period_s)
        told &= say(
            f"{name}: {m.chunks_per_s:,.0f} chunks/s with {m.cpu_percent:.0f}% of a core, "
            f"{m.reads_per_chunk:.2f} reads a chunk; a whole core takes {m.capacity:,.0f} chunks/s"
        )
        enough &= m.capacity >= wanted
    told &= say(f"Wanted in steps: {WANTED_CHUNKS_PER_S:,}. {'Enough.' if enough else 'Too few.'}")
    return 0 if enough and told else 1
