"""Run a program of ours so that a missing package is told in one line: mostly it is the wrong Python.

Imports nothing but the standard library, as any package may be the missing one.
"""

import sys
from collections.abc import Callable

OURS = ("server", "engine", "tokenizer_proc", "scripts")
CANNOT_WORK = 75  # exit code
INTERRUPTED = 130


def run_command(program: str, main: Callable[[], int]) -> int:
    """Exit code of `main`, which imports packages inside: that can fail and be interrupted as well."""
    try:
        return main()
    except KeyboardInterrupt:  # before `main` was ready for it
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        print(
            f"{program}: {sys.executable} has no package {package}: use the Python that has them, "
            "e.g. .venv/bin/python, or install them with -m pip install -r requirements.txt",
            file=sys.stderr,
        )
        return CANNOT_WORK
