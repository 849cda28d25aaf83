"""Waiting for a state instead of for a time. The limits are for what hangs: they are never reached."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.01
LATE = "the condition did not come true in time"


def wait_until(
    condition: Callable[[], Any], seconds: float = 20.0, why: Callable[[], str] = lambda: LATE
) -> None:
    """Until `condition()` holds. `why`: what to say if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(POLL_S)


async def eventually(condition: Callable[[], Any], seconds: float = 20.0, why: str = LATE) -> None:
    """As `wait_until`, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, why
        await asyncio.sleep(POLL_S / 2)
