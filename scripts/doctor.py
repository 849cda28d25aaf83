#!/usr/bin/env python3
"""Is this machine fit for the start that you mean? python scripts/doctor.py --help.

The parts are in scripts/operate/.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.operate.output import say, telling

DESCRIPTION = """Look at the machine, the installation and a model, and say what would stop a start or
make it slow, with a remedy. Nothing is started or changed.

  doctor.py                              this machine, and the default model
  doctor.py DIR [flags of serve.py]      the start that `serve.py DIR ...` would be
  doctor.py DIR --gpu-memory 80          what a GPU of 80 GiB would do with the model, without one"""
EPILOG = """DIR, --config and all flags of serve.py mean what they do there.
Exit code: 0; 1 if something fails; 2 for a wrong command, or if this cannot be written."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="doctor.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gpu-memory",
        type=gib,
        metavar="GIB",
        help="predict the start-up table for a GPU with so much memory, which need not be here",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    return parser


def gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError(f"{text!r}: give GiB of memory, such as 80")
    return value


def main(argv: list[str] | None = None) -> int:
    args, flags = build_parser().parse_known_args(argv)
    try:
        from engine.api.config import ConfigError
        from scripts.operate.findings import Findings
        from server.cli import parse
    except ImportError as error:
        print(
            f"fail  packages: {error} in {sys.executable}: use the Python that has them, e.g. "
            ".venv/bin/python, or install requirements.txt with pip",
            file=sys.stderr,
        )
        return 1
    try:
        server, engine = parse(flags)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    found = Findings(quiet=args.json)
    try:
        rows = examine(found, server, engine, args.gpu_memory)
    except KeyboardInterrupt:
        return 130
    if args.json:
        say(found.as_json(memory=[list(row) for row in rows]))
    else:
        for name, value in rows:
            say(f"{name:>22}  {value}")
        say(f"\n{found.count('warn')} warnings, {found.count('fail')} failures")
    return 1 if found.has_failed else 0


def examine(
    found: Any, server: Any, engine: Any, gpu_memory: float | None
) -> list[tuple[str, str]]:
    """All checks, in order; returns the rows of the predicted start-up table."""
    from engine.api.config import ConfigError
    from scripts.operate.certificate import check_certificate
    from scripts.operate.installation import check_installation
    from scripts.operate.machine import check_machine
    from scripts.operate.model_folder import check_model_folder
    from server.settings_check import check_settings

    check_machine(found, server, engine)
    probe = check_installation(found, engine)
    try:
        check_settings(server, engine)
        found.ok("settings", "agree with each other")
    except ConfigError as error:
        found.fail("settings", str(error), "change the flag named")
    check_certificate(found, server)
    model = check_model_folder(found, server, engine)
    if model is None or not probe:
        return []
    from scripts.operate.memory_table import predict_cpu, predict_gpu

    try:
        if gpu_memory is not None:
            rows = predict_gpu(engine, model, int(gpu_memory * 2**30))
            found.ok(
                "memory plan", f"predicted for a GPU of {gpu_memory:g} GiB, nothing else on it"
            )
        elif probe["gpus"] and engine.device != "cpu":
            gpu = probe["gpus"][0]
            rows = predict_gpu(engine, model, gpu["total"], gpu["total"] - gpu["free"])
            found.ok("memory plan", f"predicted for {gpu['name']}")
        else:
            rows = predict_cpu(engine, model)
            found.ok("memory plan", "predicted for this machine's CPU")
    except ConfigError as error:
        found.fail("memory plan", str(error), "see the flags in the message")
        return []
    return rows


if __name__ == "__main__":
    sys.exit(telling(main))
