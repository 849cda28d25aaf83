"""/health?deep=1: does a token come out? One greedy token, through the whole of the server."""

import asyncio
import time

from engine.api.messages import TokenPrompt
from engine.api.sampling import SamplingParams
from server.client import EngineClient, GenerateOptions
from server.errors import ApiError
from server.health import Verdict

LIMIT_S = 10.0
FIRST = -(2**31)  # priority: before everything that waits
PROMPT = bytes(4)  # token id 0, which every model has


class DeepCheck:
    """Checks that overlap share one token, so that asking costs no more than one at a time."""

    def __init__(self, client: EngineClient, limit_s: float = LIMIT_S) -> None:
        self._client = client
        self._limit_s = limit_s
        self._running: asyncio.Task[Verdict] | None = None

    async def verdict(self) -> Verdict:
        """Takes up to the limit. "ok" also while all seats are taken and their tokens flow."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._check())
        return await asyncio.shield(self._running)

    async def _check(self) -> Verdict:
        plain = self._client.status.health()
        if not plain.is_ok:
            return plain
        num_tokens = self._num_generated
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        options = GenerateOptions(params=params, priority=FIRST)
        stream = self._client.generate(
            [TokenPrompt(token_ids=PROMPT)], options, time.monotonic_ns()
        )
        try:
            async with asyncio.timeout(self._limit_s):
                await stream.wait_finished()
        except TimeoutError:
            if not stream.has_started and self._num_generated > num_tokens:
                return Verdict("ok", "no seat was free, but others' tokens flow")
            reason = f"one token was not generated within {self._limit_s:g} s"
            return Verdict("stalled", reason, time.time() - self._limit_s)
        except ApiError as error:
            return Verdict("failing", error.message, time.time())
        finally:
            self._client.abort(stream)
        return Verdict("ok")

    @property
    def _num_generated(self) -> int:
        stats = self._client.status.stats
        return stats.generation_tokens if stats else 0
