"""The files of a batch, JSON lines in the format of OpenAI's batches.

    input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    output  {"id": ..., "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}
            {"id": ..., "custom_id": "b", "response": null, "error": {"code", "message"}}

Each output line is appended by one write, so whatever ends the program leaves whole lines and at most one
cut one, which the next run removes. What is answered there is not asked again.
"""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

TAIL_BYTES = 1 << 16  # read at a time to find the last line


@dataclass(frozen=True)
class Line:
    """A line of the input that is still to be answered."""

    number: int  # from 1
    custom_id: str
    offset: int  # in the file, in bytes


@dataclass
class Input:
    """Which lines there are; their bodies are read when their turn comes, as they may be gigabytes."""

    path: Path
    lines: list[Line] = field(default_factory=list)

    @classmethod
    def scan(cls, path: Path) -> "Input":
        """Raises ValueError naming the first line that cannot be told from others, OSError."""
        found, seen = cls(path), dict[str, int]()
        with path.open("rb") as file:
            offset = 0
            for number, text in enumerate(file, 1):
                if text.strip():
                    custom_id = custom_id_of(text, number)
                    if custom_id in seen:
                        raise ValueError(
                            f"line {number}: custom_id {custom_id!r} is that of line {seen[custom_id]}, "
                            "too; give each line its own"
                        )
                    seen[custom_id] = number
                    found.lines.append(Line(number, custom_id, offset))
                offset += len(text)
        return found

    def read(self, lines: list[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
        with self.path.open("rb") as file:
            for line in lines:
                file.seek(line.offset)
                yield line, orjson.loads(file.readline())


def custom_id_of(text: bytes, number: int) -> str:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(
            f'line {number} has no custom_id; each line is {{"custom_id": "...", "method": "POST", '
            '"url": "/v1/chat/completions", "body": {...}}'
        )
    return custom_id


class Output:
    """The answers, appended. Use `open_output`."""

    def __init__(self, descriptor: int, answered: dict[str, bool]) -> None:
        self.descriptor = descriptor
        self.answered = answered  # custom_id -> with status 200

    def answer(self, custom_id: str, status: int, body: dict[str, Any], request_id: str) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._append(custom_id, response, None, status == 200)

    def error(self, custom_id: str, code: str, message: str) -> None:
        """For a line that is no request at all."""
        self._append(custom_id, None, {"code": code, "message": message}, False)

    def _append(self, custom_id: str, response: Any, error: Any, is_good: bool) -> None:
        line = orjson.dumps(
            {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": custom_id,
                "response": response,
                "error": error,
            }
        )
        rest = memoryview(line + b"\n")
        while rest:  # a file takes all at once, unless the disk is full
            rest = rest[os.write(self.descriptor, rest) :]
        self.answered[custom_id] = is_good


@contextmanager
def open_output(path: Path, retry_failed: bool = False) -> Iterator[Output]:
    """Repair and read what an earlier run left, and append to it.

    `retry_failed` drops the lines that are no answers, so that they are asked again. Raises ValueError with
    advice if another run writes to the file, or if it holds something else; OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{path}: another run writes to it; wait for its end, or name another file"
            ) from None
        repair(descriptor, path)
        answered = read_answers(path)
        if retry_failed and not all(answered.values()):
            keep_good(descriptor, path)
            answered = {custom_id: True for custom_id, is_good in answered.items() if is_good}
        yield Output(descriptor, answered)
    finally:
        os.close(descriptor)


def repair(descriptor: int, path: Path) -> None:
    """Cut off a last line that was not written to its end."""
    size = end = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    kept = 0
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            kept = start + newline + 1
            break
        end = start
    tail = os.pread(descriptor, size - kept, kept)
    if is_answer(tail):  # whole, but for the end of the line
        os.write(descriptor, b"\n")
    elif kept == 0 and not tail.startswith(b"{"):
        raise ValueError(f"{path}: is no output of a batch; name another file")
    else:
        os.ftruncate(descriptor, kept)


def is_answer(text: bytes) -> bool:
    try:
        value = orjson.loads(text)
    except ValueError:
        return False
    is_line = isinstance(value, dict) and isinstance(value.get("custom_id"), str)
    return is_line and "response" in value  # an input has none


def read_answers(path: Path) -> dict[str, bool]:
    """custom_id -> whether it has an answer with status 200. Raises ValueError naming the line."""
    answered = {}
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not is_answer(text):
                raise ValueError(f"{path}, line {number}: is no line of a batch's output")
            answered[orjson.loads(text)["custom_id"]] = is_good(text)
    return answered


def is_good(text: bytes) -> bool:
    response = orjson.loads(text).get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


def keep_good(descriptor: int, path: Path) -> None:
    """Rewrite the file without failures. A crash in the middle leaves a copy beside it."""
    kept = b"".join(text for text in path.read_bytes().splitlines(True) if is_good(text))
    copy = path.with_name(path.name + ".all")
    copy.write_bytes(path.read_bytes())
    os.ftruncate(descriptor, 0)
    os.write(descriptor, kept)
    copy.unlink()


def summary(output: Output, lines: list[Line]) -> tuple[str, bool]:
    """A sentence, and whether a line has an error for an answer."""
    states = [output.answered.get(line.custom_id) for line in lines]
    good, failed = states.count(True), states.count(False)
    text = f"{len(lines)} requests: {good} answered, {failed} with an error"
    left = states.count(None)
    return text + (f", {left} left" if left else ""), failed > 0
