#!/usr/bin/env python3
"""Load test for any server with OpenAI's API: python scripts/bench_serve.py --help.

The parts are in scripts/loadtest/; how to read the figures is in docs/benchmarking.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.loadtest import options
from server.command import run_command


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0; 1 nothing could be measured, or written; 2 wrong arguments; 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["compare"]:
        return run_compare(argv[1:])
    args = options.build_parser().parse_args(argv)
    from scripts.loadtest.fleet import ClientFailed  # after --help, as these import aiohttp
    from scripts.loadtest.run import run
    from scripts.loadtest.selftest import run_self_test

    try:
        return run_self_test() if args.self_test else run(args)
    except ClientFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run_compare(argv: list[str]) -> int:
    from scripts.loadtest import result
    from scripts.loadtest.compare import compare
    from scripts.loadtest.outputs import say

    args = options.parse_compare(argv)
    try:
        a, b = result.read(args.a), result.read(args.b)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if say(compare(a, b, (str(args.a), str(args.b)))) else 1


if __name__ == "__main__":
    sys.exit(run_command("bench_serve.py", main))
