"""The output of a batch, JSON lines in the format of OpenAI's batches as its input is.

    input   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    output  {"id": ..., "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}
            {"id": ..., "custom_id": "b", "response": null, "error": {"code", "message"}}

Each output line is appended by one write, so whatever ends the program leaves whole lines and at most one
cut one, which the next run removes. What is answered there is not asked again.
"""

import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

BEGINNING = b'{"id":"batch_req_'  # of each line that `Output` writes


class Output:
    """The answers, appended. Use `open_output`."""

    def __init__(self, path: Path, descriptor: int, answered: dict[str, bool]) -> None:
        self.path = path
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
        try:
            write_all(self.descriptor, line + b"\n")
        except OSError as error:
            advice = (
                f"{error.strerror}; what is answered is kept: run the same command again to go on"
            )
            raise OSError(error.errno, advice, str(self.path)) from None
        self.answered[custom_id] = is_good


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a file takes all at once, unless the disk is full
        rest = rest[os.write(descriptor, rest) :]


def check_output(path: Path) -> None:
    """Raises ValueError if answers cannot be kept and read again there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(
            f"{path}: is no regular file; name one, as the next run reads what is answered"
        )
    for stream in (1, 2):
        with suppress(OSError):  # closed
            if os.path.samestat(os.fstat(stream), found):
                raise ValueError(f"{path}: is where this program prints to, too; name another file")


@contextmanager
def open_output(path: Path, retry_failed: bool = False) -> Iterator[Output]:
    """Repair and read what an earlier run left, and append to it.

    `retry_failed` drops the lines that are no answers, so that they are asked again. Raises ValueError with
    advice if another run writes to the file, or if it holds something else; OSError.
    """
    check_output(path)
    descriptor = open_locked(path)
    try:
        answered, end = read_answers(descriptor, path)
        repair(descriptor, end)
        if retry_failed and not all(answered.values()):
            descriptor = keep_good(descriptor, path)
            answered = {custom_id: True for custom_id, is_good in answered.items() if is_good}
        yield Output(path, descriptor, answered)
    finally:
        os.close(descriptor)


def open_locked(path: Path) -> int:
    """A descriptor of the file, which is ours until it is closed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"{path}: another run writes to it; wait for its end, or name another file"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # another run put a copy in its place between the two calls


def is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def read_answers(descriptor: int, path: Path) -> tuple[dict[str, bool], int]:
    """custom_id -> whether it has an answer with status 200; where the whole lines end.

    Raises ValueError naming the line that a batch cannot have written: nothing of the file is touched then.
    """
    answered: dict[str, bool] = {}
    end = 0
    with open(descriptor, "rb", closefd=False) as file:
        if file.peek(1)[:1] not in (b"", b"{"):  # its first line may be longer than memory
            raise no_output(path, 1)
        for number, text in enumerate(file, 1):
            found = read_answer(text)
            if found is None:
                if is_cut(text):
                    break
                raise no_output(path, number)
            custom_id, is_good = found
            answered[custom_id] = is_good or answered.get(custom_id, False)
            end += len(text)
    return answered, end


def no_output(path: Path, number: int) -> ValueError:
    return ValueError(
        f"{path}, line {number}: is no line of a batch's output; name another file, or remove the line"
    )


def read_answer(text: bytes) -> tuple[str, bool] | None:
    """custom_id, and whether it is an answer with status 200; None if a batch cannot have written it."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or "response" not in value:  # an input has none
        return None
    custom_id, response = value.get("custom_id"), value["response"]
    if not isinstance(custom_id, str):
        return None
    return custom_id, isinstance(response, dict) and response.get("status_code") == 200


def is_cut(text: bytes) -> bool:
    """Is it a line of ours that was not written to its end?"""
    has_end = text.endswith(b"\n")
    return not has_end and (text.startswith(BEGINNING) or BEGINNING.startswith(text))


def repair(descriptor: int, end: int) -> None:
    """Cut off a last line that was not written to its end, or end it if only that is missing."""
    if os.fstat(descriptor).st_size > end:
        os.ftruncate(descriptor, end)
    elif end > 0 and os.pread(descriptor, 1, end - 1) != b"\n":
        write_all(descriptor, b"\n")


def keep_good(descriptor: int, path: Path) -> int:
    """Put a copy without failures in the file's place: the descriptor of the copy, which is locked, too.

    The file is whole until the copy, whole by then, takes its name: whatever fails, no answer is lost.
    """
    target = path.resolve()  # a link stays one
    copy = target.with_name(f".{target.name}.good")  # written to by none but who has the lock
    try:
        copy.unlink(missing_ok=True)  # of a run that was killed
        good = os.open(copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        try:
            fcntl.flock(good, fcntl.LOCK_EX | fcntl.LOCK_NB)
            copy_good(descriptor, good)
            copy_owner(descriptor, good)
            os.fsync(good)
            os.rename(copy, target)
        except BaseException:
            copy.unlink(missing_ok=True)
            os.close(good)
            raise
    except OSError as error:
        remedy = "make room there, or leave the flag out"
        if error.errno == errno.EBUSY:
            remedy = "it is mounted by itself: mount its folder instead, or leave the flag out"
        raise ValueError(
            f"{path}: --retry-failed cannot put a copy in its place ({error.strerror}); the file is as it "
            f"was: {remedy}"
        ) from None
    os.close(descriptor)
    return good


def copy_good(source: int, target: int) -> None:
    os.lseek(source, 0, os.SEEK_SET)
    with (
        open(source, "rb", closefd=False) as lines,
        open(target, "wb", closefd=False) as good,
    ):
        for text in lines:
            found = read_answer(text)
            if found is not None and found[1]:
                good.write(text)


def copy_owner(source: int, target: int) -> None:
    """Who may read and write it stays as it was, as far as that is ours to give."""
    found = os.fstat(source)
    for uid, gid in ((-1, found.st_gid), (found.st_uid, -1)):  # the group alone may be allowed
        with suppress(OSError):
            os.fchown(target, uid, gid)
    os.fchmod(target, stat.S_IMODE(found.st_mode))


def summary(output: Output, custom_ids: list[str]) -> tuple[str, bool]:
    """A sentence, and whether a line has an error for an answer."""
    states = [output.answered.get(custom_id) for custom_id in custom_ids]
    good, failed = states.count(True), states.count(False)
    text = f"{len(custom_ids)} requests: {good} answered, {failed} with an error"
    left = states.count(None)
    return text + (f", {left} left" if left else ""), failed > 0
