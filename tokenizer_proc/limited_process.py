"""A process for work that its process may not survive, with limits of time and memory.

Chat templates and grammars come from clients. Some take for ever, some gigabytes, and some overflow
the stack; a thread that does such work cannot be stopped, but a process can be killed and replaced.

Standard input of the process is a socket. A message is its length as 4 bytes, little-endian, and
MessagePack:

    parent                   [seconds, question] ─►
    process   "ready" ─►                              answer ─►

The kernel ends the process a little after `seconds` by itself, should nobody be left to kill it.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0  # a busy machine may take long to start a process
GRACE_S = 1.0
READY = "ready"


class OverTime(Exception):
    """No answer in time. No TimeoutError, which a handler of SIGALRM may raise for reasons of its own."""


class LimitedProcess:
    """`python -m module`, which calls `answer_questions`: one question at a time.

    It ends when this process does, as it then reads the end of its input. A forked copy of this object
    can neither ask nor end it, and says that it has ended: two who ask would read each other's answers.
    """

    def __init__(self, module: str) -> None:
        """Starts it. Raises OverTime, EOFError or ConnectionError if it does not."""
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=theirs.fileno(),
                cwd=ROOT,
                start_new_session=True,  # Ctrl-C is not for it
            )
        deadline = time.monotonic() + START_SECONDS
        try:
            if self._receive(deadline, START_SECONDS) != READY:
                raise EOFError
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return not self._is_ours or self._process.poll() is not None

    def ask(self, question: object, seconds: float) -> Any:
        """The answer. Raises OverTime; EOFError or ConnectionError if the process has ended.

        After an error of any kind the process is of no more use: `kill` it.
        """
        assert self._is_ours, f"it belongs to process {self._owner}"
        deadline = time.monotonic() + seconds
        with over_time_at(deadline, seconds):
            self._socket.settimeout(seconds)
            send(self._socket, [seconds, question])
        return self._receive(deadline, seconds)

    def kill(self) -> None:
        """End it, even in the middle of an answer."""
        if self._is_ours:
            self._process.kill()
            self._process.wait()
        self._socket.close()

    def _receive(self, deadline: float, seconds: float) -> Any:
        with over_time_at(deadline, seconds):
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            return receive(self._socket)

    @property
    def _is_ours(self) -> bool:
        return self._owner == os.getpid()


@contextmanager
def over_time_at(deadline: float, seconds: float) -> Iterator[None]:
    """Tell the socket's timeout from one that the handler of a signal raises."""
    try:
        yield
    except TimeoutError:
        if time.monotonic() < deadline:
            raise
        raise OverTime(f"no answer in {seconds:g} s") from None


def answer_questions(answer: Callable[[Any], object], max_memory: int) -> None:
    """What the process does, with `max_memory` bytes of address space, until its parent has ended."""
    resource.setrlimit(resource.RLIMIT_AS, (max_memory, max_memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = socket.socket(fileno=0)
    try:
        send(connection, READY)
        while True:
            seconds, question = receive(connection)
            signal.setitimer(signal.ITIMER_REAL, seconds + GRACE_S)
            result = answer(question)
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(connection, result)
    except (EOFError, ConnectionError):
        return


def send(connection: socket.socket, message: object) -> None:
    data = msgspec.msgpack.encode(message)
    connection.sendall(len(data).to_bytes(4, "little") + data)


def receive(connection: socket.socket) -> Any:
    """The next message. Raises EOFError when the other side has ended."""
    size = int.from_bytes(read_exactly(connection, 4), "little")
    return msgspec.msgpack.decode(read_exactly(connection, size))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)
