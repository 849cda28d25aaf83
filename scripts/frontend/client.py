"""The client: many streams over raw sockets in one process, as little work an event as will do.

    python -m scripts.frontend.client < job.json > result.json

An event is found by its key in the bytes that a read returns; no JSON, no HTTP library. Its text tells
how old it is (word_clock.py), its words how many tokens it carries.

With many streams it looks for events every half millisecond, which counts as their age. Were it woken by
each, the server's write would wake it, on the server's time: what loopback costs and a network does not.
"""

import json
import select
import socket
import sys
import time
from array import array

import msgspec

from scripts.frontend.word_clock import WordClock

KEY = b'"content":"'
END_OF_EVENT = b"\n\n"
DONE = b"data: [DONE]"
END_OF_BODY = b"0\r\n\r\n"
READ_SIZE = 1 << 16
SILENCE_S = 30.0  # then the server is given up
MANY_STREAMS = 16
PAUSE_S = 0.0005


class Job(msgspec.Struct):
    """One level of load: `streams` requests at once, `rounds` times, over the same connections."""

    host: str
    port: int
    tokenizer_dir: str
    streams: int
    tokens: int  # of each
    step_us: int
    prompt: str
    rounds: int = 1
    pause_s: float = 0.0  # between rounds


class Stream:
    """One connection. Times are `time.monotonic_ns()`."""

    def __init__(self, host: str, port: int) -> None:
        self.socket = socket.create_connection((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent_ns = 0
        self.first_ns = 0  # the first token came
        self.last_ns = 0
        self.rest = b""  # of an event that is not complete
        self.is_ending = False  # only the end of the body is missing
        self.is_done = False


class Result(msgspec.Struct):
    """Columns over the events with text, then over the streams, then of the whole."""

    times_ns: list[int] = []
    words: list[int] = []
    ages_ns: list[int] = []  # of the event's first token, from the engine's send to the read
    first_ns: list[int] = []
    last_ns: list[int] = []
    ttft_ns: list[int] = []  # request sent to first token read
    first_ages_ns: list[int] = []  # of the first token
    cpu_s: float = 0.0
    wall_s: float = 0.0
    problem: str = ""


class Load:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.clock = WordClock(job.tokenizer_dir)
        self.streams = [Stream(job.host, job.port) for _ in range(job.streams)]
        self.times = array("q")
        self.words = array("q")
        self.ages = array("q")
        self.result = Result()

    def run(self) -> Result:
        cpu, began = time.process_time(), time.monotonic()
        for number in range(self.job.rounds):
            if number:
                time.sleep(self.job.pause_s)
            self.round()
        result = self.result
        result.cpu_s, result.wall_s = time.process_time() - cpu, time.monotonic() - began
        result.times_ns, result.words = self.times.tolist(), self.words.tolist()
        result.ages_ns = self.ages.tolist()
        return result

    def round(self) -> None:
        request = request_bytes(self.job)
        poller = select.epoll()
        by_fd = {stream.socket.fileno(): stream for stream in self.streams}
        for fd, stream in by_fd.items():
            stream.is_done = stream.is_ending = False
            stream.first_ns, stream.rest = 0, b""
            stream.sent_ns = time.monotonic_ns()
            stream.socket.sendall(request)
            poller.register(fd, select.EPOLLIN)
        num_open = len(by_fd)
        while num_open:
            if len(by_fd) > MANY_STREAMS:
                time.sleep(PAUSE_S)
            readable = poller.poll(SILENCE_S, len(by_fd))
            if not readable:
                raise TimeoutError(f"nothing came for {SILENCE_S:.0f} s")
            for fd, _ in readable:
                stream = by_fd[fd]
                self.read(stream)
                if stream.is_done:
                    poller.unregister(fd)
                    num_open -= 1
        for stream in self.streams:
            self.result.first_ns.append(stream.first_ns)
            self.result.last_ns.append(stream.last_ns)
            self.result.ttft_ns.append(stream.first_ns - stream.sent_ns)

    def read(self, stream: Stream) -> None:
        data = stream.socket.recv(READ_SIZE)
        if not data:
            raise ConnectionError("the server closed a connection")
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(data.decode(errors="replace"))
        now = time.monotonic_ns()
        if stream.rest:
            data = stream.rest + data
        start = data.find(KEY)
        while start >= 0:
            start += len(KEY)
            end = data.find(END_OF_EVENT, start)
            if end < 0:
                break
            text = data[start : data.index(b'"', start)]
            if text:
                self.note(stream, text, now)
            start = data.find(KEY, end)
        stream.rest = b"" if data.endswith(b"\n") else data[data.rfind(END_OF_EVENT) + 2 :]
        if DONE in data:
            stream.is_ending = True
        stream.is_done = stream.is_ending and data.endswith(END_OF_BODY)

    def note(self, stream: Stream, text: bytes, now: int) -> None:
        words = text.split(b" ")  # the first is empty, as words begin with a space
        age = self.clock.age_ns(words[1], now)
        self.times.append(now)
        self.words.append(len(words) - 1)
        self.ages.append(age)
        stream.last_ns = now
        if not stream.first_ns:
            stream.first_ns = now
            self.result.first_ages_ns.append(age)


def request_bytes(job: Job) -> bytes:
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": job.prompt}],
            "max_tokens": job.tokens,
            "seed": job.step_us,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {job.host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    try:
        result = Load(job).run()
    except (OSError, KeyError, ValueError) as error:
        result = Result(problem=f"{type(error).__name__}: {error}")
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
