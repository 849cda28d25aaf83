#!/usr/bin/env python3
"""Does a server do what it should? python scripts/selftest.py --help.

The parts are in scripts/operate/.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.loadtest.options import positive
from scripts.operate.output import say, telling
from server.command import run_command

DESCRIPTION = """Ask a server for everything that clients rely on, and compare the answers: streamed and
whole, with seeds, stop strings, log-probabilities, wrong requests, clients that go away, many at once.

  selftest.py --url http://127.0.0.1:8000      a server that runs
  selftest.py [DIR] [flags of serve.py]        starts one, and ends it afterwards"""
EPILOG = """Exit code: 0; 1 if a check fails, or the server does not start; 2 for a wrong command, or if this
cannot be written."""
START_TIMEOUT_S = 600.0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="selftest.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", help="of a running server, with or without /v1")
    add("--api-key", default="", metavar="KEY", help="of that server")
    add("--name", default="", help="the served model to ask for (default: the first)")
    add("--only", nargs="+", metavar="CHECK", help="these checks, by their names in the output")
    add("--timeout", type=positive, default=60.0, metavar="S", help="of one request (default: 60)")
    add("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args, flags = parser.parse_known_args(argv)
    if args.url is not None and flags:
        parser.error(
            f"{flags[0]}: flags of a server are for one that is started here, without --url"
        )
    from scripts.operate.checks import CHECKS
    from scripts.operate.findings import Findings
    from scripts.operate.probe_client import CheckFailed
    from scripts.operate.server_process import ServerFailed, interrupt_on_sigterm

    names = args.only or list(CHECKS)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: checks are {', '.join(map(repr, CHECKS))}")
    url, key = address(parser, args)
    found = Findings(quiet=args.json)
    interrupt_on_sigterm()
    try:
        if url:
            check(found, args, url, key, names)
        else:
            check_own(found, args, flags, names)
    except (CheckFailed, ServerFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ServerFailed) and error.exit_code == 2 else 1
    except KeyboardInterrupt:
        return 130
    if args.json:
        say(found.as_json())
    else:
        counts = [f"{found.count(level)} {level}" for level in ("pass", "fail", "skip")]
        say(f"\n{', '.join(counts)}")
    return 1 if found.has_failed else 0


def address(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[str, str]:
    """URL, without /v1, and key of a running server; both empty where one is to be started."""
    if args.url is None:
        return "", ""
    if not args.url.strip():
        parser.error(
            "--url is empty: give a server's address, or leave it out to test one started here"
        )
    from engine.api.config import ConfigError
    from scripts.loadtest.run import base_of
    from server.access import check_key

    try:
        key = check_key("--api-key", args.api_key) if args.api_key else ""
        return base_of(args.url), key
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def check(
    found: Any, args: argparse.Namespace, url: str, key: str, names: list[str], verify: bool = True
) -> None:
    from scripts.operate.selftest_run import run_checks

    asyncio.run(run_checks(found, url, key, args.name, args.timeout, names, verify))


def check_own(found: Any, args: argparse.Namespace, flags: list[str], names: list[str]) -> None:
    from scripts.operate.findings import Finding
    from scripts.operate.server_process import ServerProcess

    with (
        tempfile.TemporaryDirectory(prefix="sluice-selftest-") as folder,
        ServerProcess(flags, Path(folder) / "server.log") as server,
    ):
        server.wait_ready(START_TIMEOUT_S)
        found.add(Finding("pass", "start", f"{server.url} is ready", ms=1e3 * server.ready_s))
        check(found, args, server.url, server.key, names, verify=False)


if __name__ == "__main__":
    sys.exit(run_command("selftest.py", lambda: telling(main)))
