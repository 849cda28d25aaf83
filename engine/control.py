"""What an operator may ask of a running engine: forget the prefix cache, record a profile.

Runs in the step loop's thread, between two steps, so nothing needs a lock.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.api.messages import Control, ControlAction, ControlResult
from engine.kv.manager import KVCacheManager

logger = logging.getLogger(__name__)


class Refused(Exception):
    """Why nothing was done, and what would help."""


class ControlDesk:
    """Answers each `Control` with one `ControlResult`."""

    def __init__(
        self, kv: KVCacheManager, profile_dir: str, reply: Callable[[ControlResult], None]
    ) -> None:
        self._kv = kv
        self._profile_dir = profile_dir
        self._reply = reply
        self._profile: Any = None  # torch.profiler.profile, while one is recorded
        self._actions = {
            ControlAction.RESET_PREFIX_CACHE: self._reset_prefix_cache,
            ControlAction.START_PROFILE: self._start_profile,
            ControlAction.STOP_PROFILE: self._stop_profile,
        }

    def handle(self, control: Control) -> None:
        """Never raises: an operator's wish must not end the engine."""
        try:
            is_done, message = True, self._actions[control.action]()
        except Refused as refusal:
            is_done, message = False, str(refusal)
        except Exception as error:
            logger.exception("%s failed", control.action.name.lower())
            is_done, message = False, f"it failed: {type(error).__name__}; the log says more"
        logger.info("%s: %s", control.action.name.lower(), message)
        self._reply(ControlResult(call_id=control.call_id, is_done=is_done, message=message))

    def _reset_prefix_cache(self) -> str:
        return f"{self._kv.forget_prefixes()} blocks forgotten"

    def _start_profile(self) -> str:
        if not self._profile_dir:
            raise Refused("the server was started without --profile-dir: say where traces go")
        if self._profile is not None:
            raise Refused("a profile is being recorded: end it with /stop_profile")
        Path(self._profile_dir).mkdir(parents=True, exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile = profile
        return "recording; end it soon with /stop_profile, as every step takes memory"

    def _stop_profile(self) -> str:
        if self._profile is None:
            raise Refused("no profile is being recorded: begin one with /start_profile")
        profile, self._profile = self._profile, None
        profile.stop()
        name = f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06}.json.gz"
        profile.export_chrome_trace(str(Path(self._profile_dir) / name))
        return f"written to {name}"


def gpu_memory_bytes(device: str) -> Callable[[], int]:
    """A function that tells what torch's allocator holds. It makes no call to the device."""
    if not device.startswith("cuda"):
        return lambda: 0
    return lambda: torch.cuda.memory_reserved(device)
