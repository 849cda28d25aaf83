"""`python -m server`, and what scripts/serve.py runs: the command line, whatever state we are in."""

import sys

OURS = ("server", "engine", "tokenizer_proc")
CANNOT_WORK = 75  # exit code
INTERRUPTED = 130


def run() -> int:
    """Exit code of the command. Imports are inside, as they can fail and be interrupted as well."""
    try:
        from server.cli import main

        return main()
    except KeyboardInterrupt:  # before the server has begun to drain on it
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or package in OURS:
            raise
        print(
            f"serve.py: {sys.executable} has no package {package}: use the Python that has them, "
            "e.g. .venv/bin/python, or install them with -m pip install -r requirements.txt",
            file=sys.stderr,
        )
        return CANNOT_WORK


if __name__ == "__main__":
    sys.exit(run())
