#!/usr/bin/env python3
"""Answer a file of requests without a server: python scripts/batch.py --help.

The parts are in scripts/operate/.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.operate.batch_signals import ADVICE, INTERRUPTED, Interrupt
from server.command import run_command

DESCRIPTION = """Answer a file of requests, JSON lines as OpenAI's batches have them, with an engine in
this process:

  batch.py -i requests.jsonl -o answers.jsonl [DIR] [flags of serve.py]

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Answers are the server's, appended to the output as they end, not in the order of the input. Run the same
command again after an interruption: what is answered is not asked again."""
EPILOG = """DIR, --model, --max-num-seqs, --chat-template and all other flags of serve.py mean what they do
there; those of HTTP have no effect, but for --max-body-size, which no line
may exceed. A request may name the model as --served-model-name does."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batch.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "-i",
        "--input",
        type=Path,
        required=True,
        metavar="FILE",
        help="requests, JSON lines; a pipe will do",
    )
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="answers, appended")
    add(
        "--retry-failed",
        action="store_true",
        help="ask again what the output has an error for, and drop that error",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all answered; 1 some with an error; 2 wrong arguments; 130 after Ctrl-C, SIGTERM."""
    args, rest = build_parser().parse_known_args(argv)
    interrupt = Interrupt()
    with interrupt.handled():
        try:
            return guarded(args, rest, interrupt)
        except KeyboardInterrupt:
            print(ADVICE, file=sys.stderr)
            return INTERRUPTED


def guarded(args: argparse.Namespace, rest: list[str], interrupt: Interrupt) -> int:
    """`run`, with an error as a line and an exit code."""
    from engine.api.config import ConfigError

    try:
        return run(args, rest, interrupt)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ConfigError) else 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace, flags: list[str], interrupt: Interrupt) -> int:
    from scripts.operate.batch_file import check_output, open_output, summary
    from scripts.operate.batch_input import open_input
    from server.cli import parse
    from server.model_check import check_model
    from server.settings_check import check_settings

    server, engine = parse(flags)
    check_settings(server, engine)
    check_output(args.output)  # before a pipe is read to its end
    check_model(engine)
    with (
        open_input(args.input, server.max_body_size) as wanted,
        open_output(args.output, args.retry_failed) as output,
    ):
        left = [line for line in wanted.lines if line.custom_id not in output.answered]
        if left:
            from scripts.operate.batch_run import answer  # imports torch

            logging.basicConfig(level=engine.log_level.upper(), format="%(levelname)s %(message)s")
            answer(server, engine, wanted, left, output, interrupt)
        text, has_failed = summary(output, [line.custom_id for line in wanted.lines])
        print(text)
        return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(run_command("batch.py", main))
