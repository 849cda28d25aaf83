"""A tool that runs in a Python without our packages says which Python to take, in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from server.command import run_command

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ARGUMENTS = {
    "serve": [],
    "selftest": [],
    "tune": [],
    "bench_serve": [],
    "batch": ["-i", "in.jsonl", "-o", "out.jsonl"],
    "doctor": [],
}


@pytest.mark.parametrize("script", ARGUMENTS)
def test_a_bare_python_is_told_in_one_line(script: str) -> None:
    path = SCRIPTS / f"{script}.py"
    bare = [sys.executable, "-I", "-S"]  # no site-packages
    done = subprocess.run([*bare, str(path), *ARGUMENTS[script]], capture_output=True, text=True)
    assert done.returncode == (1 if script == "doctor" else 75)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert sys.executable in line
    assert ".venv/bin/python" in line


@pytest.mark.parametrize("script", ARGUMENTS)
def test_tools_can_be_run_by_their_name(script: str) -> None:
    path = SCRIPTS / f"{script}.py"
    assert path.stat().st_mode & 0o111, "the documentation writes them as commands"
    assert path.read_text().startswith("#!/usr/bin/env python3\n")


def test_a_missing_module_of_ours_is_a_bug_and_stays_one() -> None:
    def main() -> int:
        raise ModuleNotFoundError("No module named 'engine.nothing'", name="engine.nothing")

    with pytest.raises(ModuleNotFoundError, match=r"engine\.nothing"):
        run_command("tool.py", main)


def test_ctrl_c_before_the_tool_is_ready() -> None:
    def main() -> int:
        raise KeyboardInterrupt

    assert run_command("tool.py", main) == 130
