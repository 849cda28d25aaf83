"""The private directory of one server: its sockets and its children's settings."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "sluice-"
LOCK = "lock"  # held as long as the server lives
MAX_PARENT_BYTES = 75  # a socket's address may have 107, file name included
MIN_AGE_S = 60.0  # younger directories may belong to a server that is about to take its lock


@contextmanager
def private_run_dir() -> Iterator[str]:
    """A directory of mode 0700, removed at the end; also removes those of servers killed earlier."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
        parent = "/tmp"
    remove_abandoned(Path(parent))
    path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    try:
        with open(Path(path) / LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove our own run directories whose lock nobody holds: a SIGKILL leaves them behind."""
    for lock_file in parent.glob(f"{PREFIX}*/{LOCK}"):
        try:
            if lock_file.stat().st_uid != os.getuid():
                continue
            if time.time() - lock_file.stat().st_mtime < MIN_AGE_S:
                continue
            with lock_file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock_file.parent, ignore_errors=True)
        except OSError:
            continue  # in use, or gone already
