#!/usr/bin/env python3
"""Send a running server requests that it should never see, and look at how it bears them.

    python scripts/fuzz_http.py http://127.0.0.1:8000 --requests 20000

Bodies are drawn from the server's own /openapi.json, right, nearly right and with wrong bytes; half of the
connections misuse HTTP as well. Four streams run beside them, whose tokens and log-probabilities must stay
the same but for last bits. Ends with code 1 if there are findings, and 2 if there is no server; `--only N`
sends number N of a run again. Without `--seed` runs are equal.
"""

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.fuzz.run import Unusable, fuzz
from scripts.loadtest.options import at_least_one, count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url", help="the server; it needs no key")
    parser.add_argument(
        "--requests",
        type=at_least_one,
        default=20_000,
        metavar="N",
        help="how many to send (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of what is drawn: another one is another run (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=at_least_one,
        default=8,
        metavar="N",
        help="connections at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--only", type=count, metavar="N", help="send only the request of this number"
    )
    args = parser.parse_args()
    if args.only is not None and args.only >= args.requests:
        parser.error(
            f"--only {args.only}: a run of --requests {args.requests} has the numbers 0 to "
            f"{args.requests - 1}; give the --requests of the run that you mean"
        )
    try:
        report = asyncio.run(fuzz(args.url, args.requests, args.seed, args.workers, args.only))
    except Unusable as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(report.lines()))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
