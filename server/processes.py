"""Child processes: start, describe their end, end them. Always by pid, never by name."""

import asyncio
import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.api.config import ConfigError
from server.config import child_environment

logger = logging.getLogger(__name__)

TERM_GRACE_S = 4.0  # between SIGTERM and SIGKILL

# Python files in the directory we were started from are none of ours: not imported in a child, nor in
# what it starts itself.
FIXED = {"PYTHONSAFEPATH": "1"}

# Of products on a CPU (docs/performance.md), unless the user's environment says otherwise.
DEFAULTS = {
    # Huge pages for weights, which are read end to end in every step: a tenth less time in float32.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "THP_MEM_ALLOC_ENABLE": "1",
    # A compiled product for each shape and number of rows, up to a MB, is kept by oneDNN and again by
    # the layer between it and torch, 1024 each: enough for decode steps, and less memory.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}


class Child:
    """One `python -m module` process. It inherits stderr, so its log joins ours."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    @classmethod
    async def start(cls, name: str, module: str, *args: str, pipe: bool = False) -> "Child":
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *args,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if pipe else None,
            env={**DEFAULTS, **child_environment(), **FIXED},
            # Ctrl-C in a terminal reaches a whole session; what it means is for the server to say.
            start_new_session=True,
        )
        logger.debug("started %s pid=%d", name, process.pid)
        return cls(name, process)

    @classmethod
    async def start_with_config(
        cls, name: str, module: str, config: dict[str, Any], file: Path
    ) -> "Child":
        """Write `config` as JSON to `file` and start `python -m module --config file`."""
        file.write_text(json.dumps(config), encoding="utf-8")
        return await cls.start(name, module, "--config", str(file))

    def describe_end(self) -> str:
        """How the process ended, e.g. "the engine process (pid 7) was killed by SIGKILL"."""
        code = self.process.returncode
        who = f"the {self.name} process (pid {self.process.pid})"
        if code is not None and code < 0:
            return f"{who} was killed by {signal.Signals(-code).name}"
        return f"{who} ended with exit code {code}"

    async def end(self, at_once: bool = False) -> None:
        """SIGTERM, then SIGKILL if it does not listen (`at_once`: now). Fine if it has ended."""
        if self.process.returncode is not None:
            return
        try:
            if not at_once and await self._ends_after_sigterm():
                return
            self.process.kill()
            await self.process.wait()
        except ProcessLookupError:
            pass

    async def _ends_after_sigterm(self) -> bool:
        self.process.terminate()
        try:
            async with asyncio.timeout(TERM_GRACE_S):
                await self.process.wait()
        except TimeoutError:
            logger.warning("%s did not end after SIGTERM: killing it", self.name)
            return False
        return True


async def run_with_progress(
    name: str, module: str, args: list[str], progress: Callable[[float, str], None]
) -> dict[str, Any]:
    """Run a tool that prints JSON lines {"progress", "detail"}; returns its last other line.

    Raises ConfigError with the tool's exit code; its own message went to stderr.
    """
    child = await Child.start(name, module, *args, pipe=True)
    result: dict[str, Any] = {}
    try:
        assert child.process.stdout is not None
        async for line in child.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # a library's chatter
            if not isinstance(message, dict):
                continue
            if "progress" in message:
                progress(float(message["progress"]), str(message.get("detail", "")))
            else:
                result = message
        await child.process.wait()
    finally:
        await child.end()
    code = child.process.returncode
    if code:
        raise ConfigError(f"{child.describe_end()}: see above", exit_code=code if code > 0 else 70)
    return result
