"""The private directory of one server: sockets, its children's settings, a converted model.

A server holds a lock in its directory as long as it lives, and the system gives the lock back however it
ends. So every start removes what killed servers have left. Several may start at once:

    server that starts     make directory ── open lock ── take it ── is it still at its path? ── use it
    another's clean-up              └ empty: remove  └ free: take it, remove all
                                      it starts over     it waits, finds nothing, and starts over
"""

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from engine.api.config import ConfigError
from server.settings_check import CANNOT_WORK

PREFIX = "sluice-"
NAME = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}")  # as mkdtemp makes them
LOCK = "lock"
MAX_PARENT_BYTES = 75  # a socket's address may have 107, file name included


@contextmanager
def private_run_dir() -> Iterator[str]:
    """A directory of mode 0700, removed at the end; also removes those of servers killed earlier.

    Raises ConfigError if there is no place for one.
    """
    try:
        parent = tempfile.gettempdir()
        if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
            parent = "/tmp"
        remove_abandoned(Path(parent))
        path, lock = make_locked(parent)
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.filename else error.strerror or error
        raise ConfigError(
            f"a folder for sockets cannot be made ({why}); set TMPDIR to one that can be written to, of "
            f"{MAX_PARENT_BYTES} bytes at most",
            CANNOT_WORK,
        ) from None
    with lock:
        try:
            yield str(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def make_locked(parent: str) -> tuple[Path, IO[bytes]]:
    """A new directory, and the lock in it, which is held until it is closed."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with suppress(FileNotFoundError):  # removed, as nobody had locked it yet: make another
            lock = (path / LOCK).open("wb")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if is_at(lock, path / LOCK):
                return path, lock
            lock.close()


def remove_abandoned(parent: Path) -> None:
    """Remove our own run directories whose lock nobody holds: a SIGKILL leaves them behind."""
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, or gone already
            if NAME.fullmatch(path.name) and is_private(path):
                remove_unlocked(path)


def remove_unlocked(path: Path) -> None:
    """Raises OSError if a server lives in it. Without a lock only an empty one is a run directory."""
    try:
        lock = (path / LOCK).open("r+b")  # for writing, as NFS asks of exclusive locks
    except FileNotFoundError:
        path.rmdir()
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_at(lock, path / LOCK):
            shutil.rmtree(path, ignore_errors=True)


def is_private(path: Path) -> bool:
    """A directory of our own, no link, that nobody else may look into."""
    found = path.lstat()
    is_ours = found.st_uid == os.getuid()
    # a directory made in one with the setgid bit has that bit, too
    return stat.S_ISDIR(found.st_mode) and is_ours and found.st_mode & 0o777 == 0o700


def is_at(file: IO[bytes], path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
