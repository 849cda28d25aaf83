"""The start-up bar on a terminal, and log lines that come in between."""

import asyncio
import io
import logging
import sys

import pytest

from engine.api.messages import EngineState, Phase
from server.health import EngineStatus
from server.metrics import Metrics
from server.progress import LogHandler, ProgressReport
from tests.server.conftest import eventually


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a terminal shows: a carriage return goes back, ESC [K erases to the end."""
        shown = []
        for line in self.getvalue().split("\n"):
            text, column = "", 0
            for part in line.replace("\x1b[K", "\0").replace("\r", "\r\1").split("\r"):
                for char in part:
                    if char == "\1":
                        column = 0
                    elif char == "\0":
                        text = text[:column]
                    else:
                        text = text[:column] + char + text[column + 1 :]
                        column += 1
            shown.append(text)
        return shown


async def test_log_line_begins_below_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = logging.Logger("test")
    logger.addHandler(LogHandler(terminal))
    status = EngineStatus(stall_timeout_s=1.0)
    task = asyncio.create_task(ProgressReport(status, Metrics()).run())
    status.on_state(
        EngineState(
            epoch=0,
            phase=Phase.LOADING,
            progress=0.5,
            detail="layer 7",
            loop_count=0,
            step_in_flight_ms=0.0,
            rss_bytes=0,
        )
    )
    await eventually(lambda: "layer 7" in terminal.getvalue())
    assert terminal.lines()[-1].startswith("loading weights [####")
    logger.info("SIGINT: stopping")
    *_, bar, line, last = terminal.lines()
    assert bar.endswith("50% layer 7")
    assert (line, last) == ("SIGINT: stopping", "")
    logger.info("one more")
    assert terminal.lines()[-2:] == ["one more", ""], "one new line for one bar"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert terminal.lines()[-1] == "", "no bar is left behind"
