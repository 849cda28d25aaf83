#!/usr/bin/env python3
"""Find the server's settings for a load: python scripts/tune.py --help.

The parts are in scripts/operate/.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.loadtest import options
from scripts.operate.output import say, telling
from server.command import run_command

DESCRIPTION = """Find settings of serve.py that are better for your load than those it takes by itself:

  tune.py --concurrency 8 --input-len 256 --output-len 64 --ignore-eos -- DIR --max-model-len 4096
  tune.py --rate 2 --slo ttft:500,itl:60 -- --config server.yaml
  serve.py --config tuned/config.yaml

Before `--` stand options of bench_serve.py (load, requests, --slo), after it flags of serve.py that every
trial gets. Settings are tried one at a time: all for a short while, the better half for longer, and so on,
then those that helped together. Each trial starts a server, which ends with it. What is tried: token
budget, sequences, block size, prefix cache, overlap, threads, admission, and on CPUs the dtype, which
changes numbers slightly. Flags that you give are left as they are."""
EPILOG = """Written to --out: config.yaml, report.txt with the reasons, trials.json with all figures.
Exit code: 0; 1 if nothing could be measured; 2 for a wrong command; 130 after Ctrl-C. Run the same
command again to go on where it was."""
FIGURES = {  # name -> is less better?
    "output_tps": False,
    "request_rps": False,
    "goodput_rps": False,
    "slo_met_percent": False,
    "ttft_p50_ms": True,
    "ttft_p99_ms": True,
    "itl_p50_ms": True,
    "itl_p99_ms": True,
    "e2e_p50_ms": True,
}
WRITTEN = (
    "config.yaml", "report.txt", "trials.json", "trials.new", "server.log", "load.log", "load.json",
)  # fmt: skip
OURS = ("url", "json", "plots", "rounds", "seconds", "api_key", "self_test", "requests")
DEFAULT_CONCURRENCY = ["--concurrency", "8"]
DEFAULT_WARMUP = ["--warmup", "2"]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tune.py",
        usage="tune.py [options] [options of bench_serve.py] [-- flags of serve.py]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--budget-minutes",
        type=options.positive,
        default=10.0,
        metavar="M",
        help="no trial starts that would end later; more time gives less noise (default: 10)",
    )
    add(
        "--figure",
        choices=FIGURES,
        help="what to improve (default: goodput_rps with --slo, else output_tps)",
    )
    add(
        "--try",
        dest="tries",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help="try these values instead of the tool's own, may repeat; as in block-size=8,32",
    )
    add(
        "--out",
        type=Path,
        default=Path("tuned"),
        metavar="FOLDER",
        help="where results go, and where the same command goes on from (default: %(default)s)",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    before, serve_flags = argv, []
    if "--" in argv:
        place = argv.index("--")
        before, serve_flags = argv[:place], argv[place + 1 :]
    parser = build_parser()
    args, load_flags = parser.parse_known_args(before)
    if not any(flag.startswith(("--concurrency", "--rate")) for flag in load_flags):
        load_flags += DEFAULT_CONCURRENCY
    if not any(flag.startswith("--warmup") for flag in load_flags):
        load_flags += DEFAULT_WARMUP
    load = options.build_parser().parse_args(load_flags)
    defaults = options.build_parser().parse_args([])
    for name in OURS:
        if getattr(load, name) != getattr(defaults, name):
            parser.error(
                f"--{name.replace('_', '-')} is set for each trial by this tool; leave it out"
            )

    from engine.api.config import ConfigError
    from scripts.operate.server_process import ServerFailed, interrupt_on_sigterm
    from scripts.operate.trial import LoadFailed

    interrupt_on_sigterm()
    try:
        return run(args, load, load_flags, serve_flags)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (ServerFailed, LoadFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        is_usage = getattr(error, "is_usage", False) or getattr(error, "exit_code", 1) == 2
        return 2 if is_usage else 1
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, load: Any, load_flags: list[str], serve_flags: list[str]) -> int:
    from scripts.operate.candidates import Load, own_candidates, parse_try
    from scripts.operate.search import Search, State, key_of
    from scripts.operate.trial import Bench
    from scripts.operate.verdict import decide, report, write_config
    from scripts.writable import probe

    figure = args.figure or ("goodput_rps" if load.slo else "output_tps")
    if figure in ("goodput_rps", "slo_met_percent") and not load.slo:
        raise ValueError(f"--figure {figure} needs an objective: give --slo, as in --slo ttft:500")
    given = flags_given(serve_flags)
    tries = [candidate for text in args.tries for candidate in parse_try(text)]
    for candidate in tries:
        flags_given(
            [*serve_flags, *candidate.tokens]
        )  # refuse what no server takes, before anything runs
    fixed = {name.replace("_", "-") for name in given}
    shape = Load(None if load.rate else max(load.concurrency))
    for name in WRITTEN:
        probe(args.out / name, f"--out {args.out}", "a folder that you may write to")
    state = State.load(
        args.out / "trials.json", key_of(load_flags, serve_flags, args.tries, figure)
    )
    num_levels = len(load.rate or load.concurrency)
    bench = Bench(load_flags, serve_flags, num_levels, figure, args.out)
    search = Search(
        bench,
        state,
        lambda info: tries or own_candidates(info, shape, fixed),
        60 * args.budget_minutes,
        FIGURES[figure],
        say,
    )
    search.run()
    verdict = decide(search)
    text = report(search, verdict)
    (args.out / "report.txt").write_text(text + "\n", encoding="utf-8")
    write_config(args.out / "config.yaml", search, verdict, given, load_flags)
    say(f"\n{text}\n\nStart it so: python scripts/serve.py --config {args.out / 'config.yaml'}")
    return 0


def flags_given(serve_flags: list[str]) -> dict[str, Any]:
    """Settings by name, as serve.py reads them, its --config included. Raises ConfigError."""
    from server.cli import build_parser as serve_parser
    from server.cli import normalize, parse, parse_config_file, parse_tokens

    server, engine = parse(serve_flags)
    parser = serve_parser()
    tokens = normalize(serve_flags, parser)
    config = parser.parse_known_args(tokens)[0].config
    given = parse_config_file(config, parser) if config else {}
    given.update(parse_tokens(parser, tokens))
    given.pop("directory", None)
    if engine.model:
        given["model"] = engine.model
    from server.settings_check import check_settings

    check_settings(server, engine)
    return given


if __name__ == "__main__":
    sys.exit(run_command("tune.py", lambda: telling(main)))
