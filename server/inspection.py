"""What the engine says of itself, for `/debug/...`: asked for only when somebody asks the server.

The engine answers between two steps, so a question costs every request of the batch a little. Hence one
question at a time, and those who ask the same at nearly the same time share an answer.
"""

import asyncio
import time
from collections import deque

from engine.api.inspection import AnyReport
from engine.api.messages import Subject
from server.client import EngineClient
from server.errors import ApiError

LIMIT_S = 5.0
FRESH_S = 0.25  # how old an answer may be that is given again
MAX_KEPT = 8  # answers
NUM_RECENT = 2048  # HTTP requests whose ids are remembered

Question = tuple[Subject, int, tuple[int, ...]]


class EngineReports:
    """Reports of the engine, and which of its requests belong to which HTTP request."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._kept: dict[Question, tuple[float, AnyReport]] = {}
        self._recent: deque[tuple[str, range]] = deque(maxlen=NUM_RECENT)

    async def ask(
        self, subject: Subject, last: int = 0, req_ids: list[int] | None = None
    ) -> AnyReport:
        """Raises ApiError 504 if the engine does not answer in time."""
        question = (subject, last, tuple(req_ids or ()))
        try:
            async with asyncio.timeout(LIMIT_S), self._lock:
                made, report = self._kept.get(question, (0.0, None))
                if report is None or time.monotonic() - made > FRESH_S:
                    report = await self._client.inspect(subject, last, req_ids or [])
                    if len(self._kept) >= MAX_KEPT:
                        self._kept.clear()
                    self._kept[question] = (time.monotonic(), report)
                return report
        except TimeoutError:
            raise ApiError(
                504,
                "engine_busy",
                f"The engine did not answer within {LIMIT_S:g} s, as it does so only between two steps. "
                "Ask again; if that does not help, /health says whether it hangs.",
                retry_after=1,
            ) from None

    def remember(self, request_id: str, req_ids: range) -> None:
        """An HTTP request has been sent to the engine as `req_ids`."""
        self._recent.append((request_id, req_ids))

    def ids_of(self, name: str) -> list[int]:
        """The engine's ids for an X-Request-Id (all that had it), or for one of its own."""
        found = [i for request_id, req_ids in self._recent if request_id == name for i in req_ids]
        if not found and name.isascii() and name.isdigit() and len(name) < 19:
            found = [int(name)]
        return found

    def name_of(self, req_id: int) -> str | None:
        """The X-Request-Id of one of the engine's requests, if it is not too long ago."""
        for request_id, req_ids in reversed(self._recent):
            if req_id in req_ids:
                return request_id
        return None
