"""Whether a grammar can be compiled, found out in a process that may die of it.

Grammars come from clients. Some take a second to compile, some gigabytes, and some overflow the stack
of whoever compiles them. So a child process does it first, within limits of time and memory; when it
exceeds one, it is replaced, and the client gets an error. Only what passed reaches the engine.

    parent   vocabulary ─►          StructuredOutput ─►                 frames: 4 bytes of length,
    child               "" (ready) ─►                "" or an error ─►  then MessagePack
"""

import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from engine.api.grammar import GrammarError
from engine.api.sampling import StructuredOutput

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 2.5
START_SECONDS = 30.0
MEMORY_BYTES = 1536 * 1024 * 1024  # address space of the child
MOST_REMEMBERED = 1024
LENGTH = struct.Struct("<I")

TOO_COMPLEX = (
    f"it takes more than {SECONDS:g} seconds or {MEMORY_BYTES // 2**20} MB to compile; make it "
    f"smaller, with fewer repetitions and less nesting"
)


class CheckerVocabulary(msgspec.Struct, array_like=True):
    """The first frame."""

    pieces: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]


class GrammarChecker:
    """Owns the child, which starts with the first grammar. Safe to use from several threads."""

    def __init__(
        self, pieces: Sequence[bytes], special_ids: Sequence[int], eos_ids: Sequence[int]
    ) -> None:
        self.vocabulary = CheckerVocabulary(list(pieces), list(special_ids), list(eos_ids))
        self.lock = threading.Lock()
        self.child: subprocess.Popen[bytes] | None = None
        self.known: OrderedDict[StructuredOutput, str] = OrderedDict()  # "" or the error

    def knows(self, structured: StructuredOutput) -> bool:
        """Whether `check` has its answer ready."""
        return structured in self.known

    def check(self, structured: StructuredOutput) -> None:
        """Raises GrammarError unless the grammar compiles.

        Takes up to SECONDS for one that is not known, and such ones wait for each other.
        """
        error = self.known.get(structured)
        if error is None:
            with self.lock:
                error = self._ask(structured)
                if error != TOO_COMPLEX:  # which may be the fault of a busy machine
                    self.known[structured] = error
                while len(self.known) > MOST_REMEMBERED:
                    self.known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def close(self) -> None:
        """End the child, even in the middle of a grammar."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # what it was sent and did not read
                        pipe.close()

    def _ask(self, structured: StructuredOutput) -> str:
        if self.child is not None and self.child.poll() is not None:
            self.close()  # somebody killed it while it was idle
        if self.child is None:
            self._start()
        answer = self._exchange(structured, SECONDS)
        if answer is None:
            self.close()
            return TOO_COMPLEX
        return answer

    def _start(self) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tokenizer_proc.grammar_child", str(os.getpid())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # panics of a compiler are no news
        )
        if self._exchange(self.vocabulary, START_SECONDS) is None:
            self.close()
            raise RuntimeError("the process that checks grammars does not start")

    def _exchange(self, message: object, seconds: float) -> str | None:
        """Send a frame and receive one; None if the child died or took too long."""
        child = self.child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        deadline = time.monotonic() + seconds
        try:
            write_frame(child.stdin, message)
            head = read_in_time(child.stdout, LENGTH.size, deadline)
            body = read_in_time(child.stdout, LENGTH.unpack(head)[0], deadline)
        except (OSError, EOFError, TimeoutError):
            return None
        return msgspec.msgpack.decode(body, type=str)


def write_frame(pipe: IO[bytes], message: object) -> None:
    data = msgspec.msgpack.encode(message)
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_in_time(pipe: IO[bytes], size: int, deadline: float) -> bytes:
    """Raises TimeoutError, or EOFError at the end of the stream."""
    poller = select.poll()
    poller.register(pipe, select.POLLIN)
    data = b""
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise TimeoutError
        piece = os.read(pipe.fileno(), size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
