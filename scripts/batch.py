#!/usr/bin/env python3
"""Answer a file of requests without a server: python scripts/batch.py --help.

The parts are in scripts/operate/.
"""

import argparse
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from server.command import run_command

DESCRIPTION = """Answer a file of requests, JSON lines as OpenAI's batches have them, with an engine in
this process:

  batch.py -i requests.jsonl -o answers.jsonl [DIR] [flags of serve.py]

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Answers are the server's, appended to the output as they end, not in the order of the input. Run the same
command again after an interruption: what is answered is not asked again."""
EPILOG = """DIR, --model, --max-num-seqs, --chat-template and all other flags of serve.py mean what they do
there; those of HTTP have no effect. A request may name the model as --served-model-name does."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="batch.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-i", "--input", type=Path, required=True, metavar="FILE", help="requests, JSON lines")
    add("-o", "--output", type=Path, required=True, metavar="FILE", help="answers, appended")
    add(
        "--retry-failed",
        action="store_true",
        help="ask again what the output has an error for, and drop that error",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 all answered; 1 some with an error; 2 wrong arguments; 130 after Ctrl-C."""
    args, rest = build_parser().parse_known_args(argv)
    from engine.api.config import ConfigError

    try:
        return run(args, rest)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, ConfigError) else 2
    except OSError as error:
        print(f"error: {error.filename or args.output}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130


def run(args: argparse.Namespace, flags: list[str]) -> int:
    from scripts.operate.batch_file import Input, open_output, summary
    from server.cli import parse
    from server.model_check import check_model
    from server.settings_check import check_settings

    server, engine = parse(flags)
    check_settings(server, engine)
    check_model(engine)
    wanted = Input.scan(args.input)
    with open_output(args.output, args.retry_failed) as output:
        left = [line for line in wanted.lines if line.custom_id not in output.answered]
        if left:
            from scripts.operate.batch_run import answer  # imports torch

            logging.basicConfig(level=engine.log_level.upper(), format="%(levelname)s %(message)s")
            answer(server, engine, wanted, left, output)
        text, has_failed = summary(output, wanted.lines)
        print(text)
        return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(run_command("batch.py", main))
