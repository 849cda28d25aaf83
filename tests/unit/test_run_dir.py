"""Run directories: those of killed servers are removed, those in use never, whoever starts meanwhile."""

import errno
import fcntl
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.api.config import ConfigError
from server import run_dir
from server.run_dir import LOCK, make_locked, private_run_dir, remove_abandoned


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run_dir, "MAX_PARENT_BYTES", 1000)
    return tmp_path


def abandon(parent: Path) -> Path:
    """A directory as a killed server leaves it: the lock is free."""
    path, lock = make_locked(str(parent))
    (path / "model").mkdir()
    (path / "engine.json").write_text("{}")
    lock.close()
    return path


def test_a_start_removes_what_was_abandoned_and_nothing_else(parent: Path) -> None:
    left, empty = abandon(parent), parent / "sluice-abcd_123"
    empty.mkdir(mode=0o700)  # killed before it had a lock
    others = [
        parent / "sluice-projects",
        parent / "sluice-test-abcdefgh",
        parent / "sluice-shared__",
    ]
    for other, mode in zip(others, (0o700, 0o700, 0o755), strict=True):
        other.mkdir(mode=mode)
        (other / "notes.txt").write_text("mine")
    (others[2] / LOCK).touch()
    target = parent / "elsewhere"
    target.mkdir(mode=0o700)
    (target / LOCK).touch()
    (parent / "sluice-link1234").symlink_to(target)
    with private_run_dir() as used:
        remove_abandoned(parent)
        assert Path(used, LOCK).exists()
        assert os.stat(used).st_mode & 0o777 == 0o700
        assert not left.exists()
        assert not empty.exists()
    assert not Path(used).exists()
    assert all((other / "notes.txt").exists() for other in others)
    assert (target / LOCK).exists()


def test_no_place_for_a_directory(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(parent / "gone"))
    with pytest.raises(ConfigError, match=r"gone/sluice-.*set TMPDIR") as caught, private_run_dir():
        pass
    assert caught.value.exit_code == 75

    def none_is_usable() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none_is_usable)
    with pytest.raises(ConfigError, match=r"found in .*; set TMPDIR"), private_run_dir():
        pass


def test_servers_that_start_at_once_leave_each_other_alone(parent: Path) -> None:
    def live(number: int) -> None:
        rng = random.Random(number)
        for _ in range(30):
            if rng.random() < 0.3:
                abandon(parent)
            with private_run_dir() as path:
                sockets = Path(path, "ingress")
                sockets.touch()
                time.sleep(rng.random() * 2e-3)
                assert sockets.exists()
                assert Path(path, LOCK).exists()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(live, range(8)))
    remove_abandoned(parent)
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch, is_locked: bool
) -> None:
    """The clean-up of another start comes between mkdtemp and the lock, or between open and the lock."""
    removed: list[Path] = []

    def between(*args: object) -> None:
        if not removed:
            removed.extend(parent.iterdir())
            remove_abandoned(parent)

    flock, mkdtemp = fcntl.flock, run_dir.tempfile.mkdtemp

    def late_flock(file: object, operation: int) -> None:
        if is_locked and operation == fcntl.LOCK_EX:
            between()
        flock(file, operation)  # type: ignore[arg-type]

    def early_mkdtemp(prefix: str, dir: str) -> str:
        path = mkdtemp(prefix=prefix, dir=dir)
        if not is_locked:
            between()
        return path

    monkeypatch.setattr(run_dir.fcntl, "flock", late_flock)
    monkeypatch.setattr(run_dir.tempfile, "mkdtemp", early_mkdtemp)
    path, lock = make_locked(str(parent))
    with lock:
        assert len(removed) == 1
        assert path not in removed
        assert list(parent.iterdir()) == [path]


def test_a_parent_with_the_setgid_bit(parent: Path) -> None:
    """Directories made in it have that bit, too."""
    parent.chmod(0o2700)
    left = abandon(parent)
    left.chmod(0o2700)  # what mkdtemp makes of it where the kernel keeps the bit
    remove_abandoned(parent)
    assert not left.exists()
