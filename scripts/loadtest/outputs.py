"""Where results go: can it be written, asked before anything is sent; and writing that may fail."""

import sys
from contextlib import suppress
from pathlib import Path

from scripts.loadtest import plots, report, result
from scripts.loadtest.result import RunResult
from scripts.operate import output
from scripts.writable import probe


def check_writable(json_path: Path | None, plots_folder: Path | None) -> None:
    """Makes the folders that are missing. Raises ValueError with advice; a full disk shows at the end only."""
    if json_path is not None:
        probe(json_path, f"--json {json_path}", "a file in a folder that you may write to")
    if plots_folder is not None:
        for name in plots.NAMES:
            probe(plots_folder / name, f"--plots {plots_folder}", "a folder you may write to")


def save(json_path: Path | None, plots_folder: Path | None, found: RunResult) -> bool:
    """JSON first, then the report: it is the one that cannot be had again. False if a part was lost."""
    is_saved = json_path is None or save_json(found, json_path)
    lines = [report.render(found)]
    if json_path is not None and is_saved:
        lines.append(f"\nFigures: {json_path}")
    is_saved &= say("\n".join(lines))
    if plots_folder is not None:
        is_saved &= save_plots(found, plots_folder)
    return is_saved


def save_json(found: RunResult, path: Path) -> bool:
    try:
        result.write(found, path)
    except OSError as error:
        return lost(f"--json {path}", error)
    return True


def save_plots(found: RunResult, folder: Path) -> bool:
    try:
        drawn = plots.draw(found, folder)
    except ImportError:
        return say(f"Note: {plots.ADVICE}")
    except OSError as error:
        return lost(f"--plots {folder}", error)
    return all(say(f"Plot: {path}") for path in drawn)


def say(text: str) -> bool:
    """To standard output, at once; False if it cannot be written."""
    try:
        output.say(text)
    except output.OutputLost as error:
        return lost("standard output", error.cause)
    return True


def lost(what: str, error: OSError) -> bool:
    with suppress(OSError):  # of standard error, perhaps on the same full disk
        print(f"error: {what} could not be written: {error.strerror or error}", file=sys.stderr)
    return False
