"""`python -m server`, and what scripts/serve.py runs: the command line, whatever state we are in."""

import sys

from server.command import run_command


def run() -> int:
    return run_command("serve.py", serve)


def serve() -> int:
    from server.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
