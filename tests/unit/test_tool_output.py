"""Tools whose output cannot be written: that is no check that failed, and no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.operate.output import CANNOT_WRITE, NOBODY_READS

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SAY = (
    "import sys\nfrom scripts.operate.findings import Finding, Findings\n"
    "from scripts.operate.output import telling\n"
    "def main():\n    for i in range(9):\n        Findings().add(Finding('fail', 'a', 'b', 'c → d'))\n"
    "    return 1\n"
    "sys.exit(telling(main))"
)


def ended(command: list[str], redirection: str, **env: str) -> tuple[int, str, str]:
    """Exit code and both outputs, as a shell starts it."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        cwd=SCRIPTS.parent,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_full_disk_is_one_line() -> None:
    code, _, told = ended([sys.executable, "-c", SAY], "> /dev/full")
    assert code == CANNOT_WRITE
    assert told == "error: standard output cannot be written: No space left on device\n"
    assert ended([sys.executable, "-c", SAY], "> /dev/full 2>&1")[0] == CANNOT_WRITE


@pytest.mark.parametrize("what", ["doctor.py", "doctor.py --json", "findings"])
def test_a_pipe_that_nobody_reads_is_left_in_silence(what: str) -> None:
    script, *flags = what.split()
    command = ["-c", SAY] if script == "findings" else [str(SCRIPTS / script), *flags]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=SCRIPTS.parent,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (NOBODY_READS, "")


def test_without_an_output_the_exit_code_tells() -> None:
    assert ended([sys.executable, "-c", SAY], ">&-") == (1, "", "")


def test_signs_that_an_encoding_lacks_are_no_failure() -> None:
    code, told, errors = ended([sys.executable, "-c", SAY], "", PYTHONIOENCODING="ascii")
    assert (code, errors) == (1, "")
    assert "\\u2192 d" in told
