"""A benchmark as a command: arguments refused ahead, the file of its figures, ends in one line."""

import json
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TypeVar

from engine.api.config import ConfigError
from scripts.operate.process_tree import tree_cpu_seconds
from scripts.writable import probe
from server.command import INTERRUPTED

T = TypeVar("T")
POLL_S = 0.1


class CannotMeasure(Exception):
    """What was asked for has no figures. `exit_code` 2: change the command; 1: it was tried."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_benchmark(main: Callable[[], int]) -> int:
    """Exit code of `main`. What ends it early is told in one line, an interruption as well."""
    try:
        return main()
    except (CannotMeasure, ConfigError) as error:
        print(f"{program()}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return interrupted()


def program() -> str:
    return Path(sys.argv[0]).name


def interrupted() -> int:
    """Tells it; exit code."""
    after_bar = "\n" if sys.stderr.isatty() else ""
    print(f"{after_bar}{program()}: interrupted", file=sys.stderr, flush=True)
    return INTERRUPTED


def parse(parser: ArgumentParser, argv: list[str] | None = None) -> Namespace:
    """The arguments; a --json that cannot be written is refused now, before figures are lost for it."""
    options = parser.parse_args(argv)
    if options.json is not None:
        try:
            probe(
                options.json, f"--json {options.json}", "a file in a folder that you may write to"
            )
        except ValueError as error:
            parser.error(str(error))
    return options


def save(path: Path | None, figures: object) -> bool:
    """As JSON, if there is a path. False if it could not be written, which a full disk shows only now."""
    if path is None:
        return True
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"error: --json {path}: {error.strerror}", file=sys.stderr)
        return False
    return True


def with_quiet_children(work: Callable[[], T]) -> T:
    """`work()`, whose processes know nothing of Ctrl-C: a terminal sends it to all, and each would tell.

    They inherit the signal mask of the thread that starts them. This process ends at once then, as the
    thread may be in a compiler that nothing interrupts.
    """
    done: Future[T] = Future()

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            done.set_result(work())
        except BaseException as error:  # for the thread that waits
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        while not wait([done], POLL_S).done:
            pass  # while NVRTC compiles in this process, a signal does not end a longer wait
        return done.result()
    except KeyboardInterrupt:
        kill_children()
        os._exit(interrupted())


def kill_children() -> None:
    for pid in set(tree_cpu_seconds(os.getpid())) - {os.getpid()}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
