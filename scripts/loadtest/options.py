"""The command line. Nothing heavy is imported, so that --help is instant."""

import argparse
from pathlib import Path
from typing import Any

from scripts.loadtest.foreign import decode
from scripts.loadtest.slo import Slo
from scripts.loadtest.workload import Lengths

DESCRIPTION = """Load test for servers with OpenAI's API.

  bench_serve.py --concurrency 1 4 16 --input-len 512 --output-len 128 --ignore-eos
  bench_serve.py --rate 1 2 4 --slo ttft:500,itl:60 --json run.json --plots plots
  bench_serve.py compare before.json after.json     what differs, and is it more than noise?
  bench_serve.py --self-test                        what the client itself can take

How to read the figures: docs/benchmarking.md."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench_serve.py",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server(parser.add_argument_group("server"))
    add_load(parser.add_argument_group("load"))
    add_requests(parser.add_argument_group("requests"))
    add_output(parser.add_argument_group("results"))
    return parser


def add_server(group: Any) -> None:
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8000", help="with or without /v1 (default: %(default)s)")
    add(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="/v1/completions or /v1/chat/completions (default: %(default)s)",
    )
    add("--model", help="default: the first of /v1/models")
    add("--api-key", help="sent as bearer token; never written to results")
    add(
        "--header",
        action="append",
        default=[],
        type=header,
        metavar="'NAME: VALUE'",
        help="one more HTTP header, may repeat; values are never written to results",
    )
    add(
        "--timeout",
        type=positive,
        default=600.0,
        metavar="S",
        help="for one request from sending to its end (default: %(default)g)",
    )
    add(
        "--retries",
        type=count,
        default=0,
        metavar="N",
        help="after 429 or 503, waiting as Retry-After says (at most 60 s); the wait counts as "
        "latency (default: 0, such an answer is an error)",
    )


def add_load(group: Any) -> None:
    add = group.add_argument
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency",
        type=at_least_one,
        nargs="+",
        metavar="N",
        help="closed loop: N clients that never pause, one level each (default: 1 4 8 16)",
    )
    kind.add_argument(
        "--rate",
        type=positive,
        nargs="+",
        metavar="R",
        help="open loop: R requests a second, at random times (Poisson), one level each",
    )
    add(
        "--requests",
        type=at_least_one,
        metavar="N",
        help="of one round of one level (default: as many as fit into --seconds; without it, closed 4 "
        "for each client and at least 16, open 100)",
    )
    add(
        "--seconds",
        type=positive,
        default=float("inf"),
        metavar="S",
        help="no request of a round starts later than this; one begun is waited for",
    )
    add(
        "--rounds",
        type=at_least_one,
        default=3,
        metavar="N",
        help="of all levels in turn; their medians are reported (default: %(default)s)",
    )
    add(
        "--warmup",
        type=count,
        default=8,
        metavar="N",
        help="requests sent together before anything is measured (default: %(default)s)",
    )
    add(
        "--processes",
        type=at_least_one,
        default=1,
        metavar="N",
        help="client processes; more only if the end of a run says that the client was the limit",
    )


def add_requests(group: Any) -> None:
    add = group.add_argument
    shapes = "N, uniform:LOW:HIGH, normal:MEAN:DEVIATION[:MOST] or lognormal:MEDIAN:SIGMA[:MOST]"
    add(
        "--input-len",
        type=lengths,
        default="512",
        help=f"tokens of a prompt: {shapes} (default: %(default)s)",
    )
    add(
        "--output-len",
        type=lengths,
        default="128",
        help="max_tokens, in the same forms (default: %(default)s)",
    )
    add(
        "--prompts",
        choices=("ids", "text"),
        help="random token ids, exact in number, or random words, about as many "
        "(default: ids; text for chat, which has no ids)",
    )
    add(
        "--token-ids",
        type=id_range,
        default="100:10000",
        metavar="LOW:HIGH",
        help="draw ids from LOW up to HIGH - 1 (default: %(default)s)",
    )
    add(
        "--shared-prefix",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="0 to 1: this share of each prompt is the same in all, for prefix caches (default: 0)",
    )
    add(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON lines with `prompt` or `messages`, and maybe `max_tokens`, instead of random ones",
    )
    add("--temperature", type=count_float, default=0.0, help="default: 0, greedy")
    add(
        "--ignore-eos",
        action="store_true",
        help="ask for exactly --output-len tokens; not every server knows the field",
    )
    add(
        "--no-usage",
        action="store_true",
        help="do not ask for usage: for servers that refuse stream_options; chunks are counted then",
    )
    add(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="more fields of the body, as in '{\"top_p\": 0.9}'",
    )
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")


def add_output(group: Any) -> None:
    add = group.add_argument
    add(
        "--slo",
        type=slo,
        metavar="NAME:MS,...",
        help="count the requests within limits in ms: ttft, itl (99%% of a request's gaps), tpot, "
        "e2e; as in ttft:500,itl:60",
    )
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="all figures, for `compare` and for programs; overwrites an existing file",
    )
    add(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="write curve.png and ttft.png, over existing ones (matplotlib)",
    )
    add("--self-test", action="store_true", help="measure the client against a stub, and exit")


def parse_compare(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench_serve.py compare",
        description="Two results of --json beside each other: settings that differ, and ratios B / A.",
    )
    parser.add_argument("a", type=Path, help="the first result")
    parser.add_argument("b", type=Path, help="the second; a ratio above 1 means that it is larger")
    return parser.parse_args(argv)


# --- types of values -----------------------------------------------------------------------------


def advised(make: Any) -> Any:
    """A parser of values whose ValueError is shown as it is."""

    def parse(text: str) -> Any:
        try:
            return make(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


lengths = advised(Lengths.parse)
slo = advised(Slo.parse)


def number(text: str, kind: Any, lowest: float, strictly: bool = False) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not (value > lowest if strictly else value >= lowest):
        what = "a whole number" if kind is int else "a number"
        bound = "above" if strictly else "of at least"
        raise argparse.ArgumentTypeError(f"{text!r}: give {what} {bound} {lowest:g}")
    return value


def at_least_one(text: str) -> Any:
    return number(text, int, 1)


def count(text: str) -> Any:
    return number(text, int, 0)


def count_float(text: str) -> Any:
    return number(text, float, 0)


def positive(text: str) -> Any:
    return number(text, float, 0, strictly=True)


def share(text: str) -> float:
    value: float = number(text, float, 0)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share from 0 to 1")
    return value


def header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: write 'Name: value'")
    return name.strip(), value.strip()


def id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"{text!r}: write LOW:HIGH with LOW below HIGH")
    return int(low), int(high)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = decode(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("give a JSON object, with braces")
    return value
