"""What a process is given to start with: open files, and a directory to be in."""

import logging
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from engine.api.config import ConfigError
from server.file_limit import LEAST_FILES, allowed_files, raise_file_limit
from tests.server.conftest import ROOT

Limits = dict[str, tuple[int, int]]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """In place of this process's own, which only root could raise again."""
    known: Limits = {"files": (1024, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: known["files"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: known.__setitem__("files", pair))
    return known


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 524288), (65536, 524288)),
        ((1024, 8192), (8192, 8192)),
        ((200000, 524288), (200000, 524288)),
        ((1024, resource.RLIM_INFINITY), (65536, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY,) * 2, (resource.RLIM_INFINITY,) * 2),
    ],
)
def test_the_limit_is_raised_as_far_as_allowed(
    limits: Limits,
    caplog: pytest.LogCaptureFixture,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    limits["files"] = before
    raise_file_limit()
    assert limits["files"] == after
    assert not caplog.records


def test_a_low_hard_limit_is_told(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    limits["files"] = (256, 512)
    with caplog.at_level(logging.WARNING):
        raise_file_limit()
    assert limits["files"] == (512, 512)
    assert allowed_files() == 512 < LEAST_FILES
    assert "512 open files" in caplog.text
    assert "LimitNOFILE" in caplog.text


def test_too_few_to_start(limits: Limits) -> None:
    limits["files"] = (20, 39)
    with pytest.raises(
        ConfigError, match="39 open files are allowed, and the server needs 40"
    ) as caught:
        raise_file_limit()
    assert caught.value.exit_code == 75
    limits["files"] = (20, 40)
    raise_file_limit()


def test_a_directory_that_has_been_removed(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = (
        "import os, sys; os.rmdir(os.getcwd()); "
        f"os.execv(sys.executable, [sys.executable, {str(ROOT / 'scripts/serve.py')!r}, '--port', '0'])"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=gone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("serve.py: the working directory has been removed")
    assert ended.stderr.count("\n") == 1
