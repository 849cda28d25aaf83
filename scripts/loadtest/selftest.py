"""What the client itself can take: a stub sends chunks as fast as possible, the client times them.

The stub writes one event to each connection in turn, as a server does after a step: the worst case for
a client, which is woken for every chunk. Its process and the client's need a core each.
"""

import asyncio
import multiprocessing
import socket
from multiprocessing.connection import Connection

from scripts.loadtest.client import Target
from scripts.loadtest.figures import summarize
from scripts.loadtest.fleet import Fleet
from scripts.loadtest.records import Level
from scripts.loadtest.workload import Lengths, Workload

WANTED_CHUNKS_PER_S = 20_000
CLIENTS = 64
CHUNKS = 2_000  # of one request
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


def stub_main(pipe: Connection) -> None:
    """Serve on a free port, told through the pipe, until it closes."""
    try:
        asyncio.run(serve_stub(pipe))
    except KeyboardInterrupt:
        return


async def serve_stub(pipe: Connection) -> None:
    streams: set[StubConnection] = set()
    event, end = frame(EVENT), frame(LAST) + frame(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: StubConnection(streams), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    ended = asyncio.Event()
    loop.add_reader(pipe.fileno(), ended.set)
    while not ended.is_set():
        for stream in tuple(streams):
            stream.step(event, end)
        await asyncio.sleep(0 if streams else 0.001)


def self_test() -> tuple[str, bool]:
    """What to print, and whether one core takes WANTED_CHUNKS_PER_S chunks a second."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    stub = context.Process(target=stub_main, args=(theirs,), daemon=True)
    stub.start()
    theirs.close()
    try:
        target = Target(f"http://127.0.0.1:{ours.recv()}/v1/completions", timeout_s=120.0)
        one = Lengths("fixed", 1)
        workload = Workload("stub", chat=False, text=False, input_len=one, output_len=one)
        with Fleet(target, workload, processes=1) as fleet:
            level = Level("closed", CLIENTS)
            fleet.run(level, 0, 0, CLIENTS)
            round_result = fleet.run(level, 0, 1, 2 * CLIENTS)
    finally:
        ours.close()
        stub.join(2)
        stub.kill()
    found = summarize(round_result.records)
    duration = found.values.get("duration_s", float("nan"))
    chunks = sum(len(record.pieces) for record in round_result.records)
    if found.errors or chunks != 2 * CLIENTS * CHUNKS:
        return f"the stub's answers were not read in full: {chunks} chunks, {found.errors}", False
    capacity = round_result.chunks_per_cpu_s
    enough = capacity >= WANTED_CHUNKS_PER_S
    return (
        f"{chunks:,} chunks of {CLIENTS} streams in {duration:.2f} s: {chunks / duration:,.0f} a "
        f"second, with {round_result.cpu_percent:.0f}% of a core on {socket.gethostname()}.\n"
        f"One client process can take {capacity:,.0f} chunks a second of CPU time; wanted are "
        f"{WANTED_CHUNKS_PER_S:,}: {'enough' if enough else 'too few'}."
    ), enough
