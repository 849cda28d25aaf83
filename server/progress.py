"""Start-up progress for people: a bar on a terminal, log lines elsewhere."""

import asyncio
import logging
import shutil
import sys
import time
from typing import TextIO

from server.health import EngineStatus
from server.metrics import Metrics

logger = logging.getLogger(__name__)

POLL_S = 0.2
BAR_WIDTH = 30
LOG_STEP = 0.25  # a log line at each quarter of a phase


class BarLine:
    """The terminal's last line while it shows a bar, which is drawn over and over."""

    def __init__(self) -> None:
        self._is_shown = False

    def draw(self, text: str) -> None:
        # The cursor goes back to the start, where other processes' log lines then begin.
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{text}\r", end="", file=sys.stderr, flush=True)
        self._is_shown = True

    def leave(self) -> None:
        """Let the bar stand and go to a new line."""
        self._end_with("\n")

    def clear(self) -> None:
        self._end_with("\r\x1b[K")

    def _end_with(self, text: str) -> None:
        if self._is_shown:
            self._is_shown = False
            print(text, end="", file=sys.stderr, flush=True)


bar_line = BarLine()  # one, as there is one terminal


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes log lines to stderr, below a bar that may be shown there."""

    def emit(self, record: logging.LogRecord) -> None:
        bar_line.leave()
        super().emit(record)


class ProgressReport:
    """Watches the status until the server can serve, and notes how long each phase took."""

    def __init__(self, status: EngineStatus, metrics: Metrics) -> None:
        self._status = status
        self._seconds = metrics.startup_seconds
        self._is_terminal = sys.stderr.isatty()
        self._phase = ""
        self._phase_began = time.monotonic()
        self._logged = 0.0

    async def run(self) -> None:
        """Returns once requests can be served."""
        try:
            while not self._status.is_loaded:
                self._show()
                await asyncio.sleep(POLL_S)
        finally:
            self._end_phase()

    def _show(self) -> None:
        status = self._status
        if status.phase != self._phase:
            self._end_phase()
            self._phase, self._phase_began = status.phase, time.monotonic()
            self._logged = status.progress
            if not self._is_terminal:
                logger.info("%s", status.describe_phase())
        if self._is_terminal:
            done = round(BAR_WIDTH * status.progress)
            bar = "#" * done + "." * (BAR_WIDTH - done)
            line = f"{status.phase} [{bar}] {status.progress:4.0%} {status.detail}"
            bar_line.draw(line[:100])
        elif status.progress >= self._logged + LOG_STEP:
            self._logged = status.progress
            logger.info("%s", status.describe_phase())

    def _end_phase(self) -> None:
        if self._phase:
            seconds = time.monotonic() - self._phase_began
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds
            bar_line.clear()
        self._phase = ""
