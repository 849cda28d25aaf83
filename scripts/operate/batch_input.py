"""The requests of a batch, one a line (batch_file.py has the format).

a file   is read twice: once to see which lines there are, then each line when its turn comes
a pipe   is read once, into a temporary file that takes its place
"""

import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from scripts.operate.batch_file import write_all


@dataclass(frozen=True)
class Line:
    """A line of the input that is still to be answered."""

    number: int  # from 1
    custom_id: str
    offset: int  # in the file, in bytes


class Input:
    """Which lines there are; their bodies are read when their turn comes, as they may be gigabytes."""

    def __init__(self, path: Path, file: BinaryIO, lines: list[Line]) -> None:
        self.path = path
        self.file = file
        self.lines = lines

    def read(self, lines: list[Line]) -> Iterator[tuple[Line, dict[str, Any]]]:
        """Raises ValueError if the file is no longer what it was."""
        for line in lines:
            self.file.seek(line.offset)
            where = f"{self.path}, line {line.number}"
            try:
                request = orjson.loads(self.file.readline())
            except ValueError:
                request = None
            if not isinstance(request, dict) or request.get("custom_id") != line.custom_id:
                raise ValueError(
                    f"{where}: the file was changed meanwhile; run the same command again to go on"
                )
            yield line, request


@contextmanager
def open_input(path: Path, most_bytes: int) -> Iterator[Input]:
    """Raises ValueError naming the first line that is too long or cannot be told from others, OSError."""
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        with path.open("rb") as file:
            yield Input(path, file, scan(texts_of(file, most_bytes), path, most_bytes))
    elif stat.S_ISFIFO(mode):
        with tempfile.TemporaryFile() as file:
            with path.open("rb") as pipe:
                lines = scan(copied(texts_of(pipe, most_bytes), file), path, most_bytes)
            yield Input(path, file, lines)
    else:
        raise ValueError(f"{path}: is neither a file nor a pipe; name one that holds the requests")


def texts_of(file: BinaryIO, most_bytes: int) -> Iterator[bytes]:
    """Lines; of one that is longer than allowed, the beginning."""
    return iter(lambda: file.readline(most_bytes + 1), b"")


def copied(texts: Iterator[bytes], file: BinaryIO) -> Iterator[bytes]:
    """The same, and written to a file. Raises OSError naming its folder, as it has no name."""
    for text in texts:
        try:
            write_all(file.fileno(), text)  # a full disk is told here, not in closing
        except OSError as error:
            raise OSError(error.errno, error.strerror, tempfile.gettempdir()) from None
        yield text


def scan(texts: Iterator[bytes], path: Path, most_bytes: int) -> list[Line]:
    found: list[Line] = []
    seen: dict[str, int] = {}
    offset = 0
    for number, text in enumerate(texts, 1):
        where = f"{path}, line {number}"
        if len(text) > most_bytes:  # memory for 100 MB of prompt may end the process, not the line
            raise ValueError(
                f"{where} is longer than {most_bytes} bytes; shorten it, or raise --max-body-size"
            )
        if text.strip():
            custom_id = custom_id_of(text, where)
            if custom_id in seen:
                raise ValueError(
                    f"{where}: custom_id {custom_id!r:.80} is that of line {seen[custom_id]}, too; "
                    "give each line its own"
                )
            seen[custom_id] = number
            found.append(Line(number, custom_id, offset))
        offset += len(text)
    return found


def custom_id_of(text: bytes, where: str) -> str:
    try:
        value = orjson.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    custom_id = value.get("custom_id") if isinstance(value, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError(
            f'{where} has no custom_id; each line is {{"custom_id": "...", "method": "POST", '
            '"url": "/v1/chat/completions", "body": {...}}'
        )
    return custom_id
