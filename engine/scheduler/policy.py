"""Who runs next, and who gives way."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from engine.request import Request, RequestStatus

QueueKey = tuple[int, bool, int, int]


def queue_key(request: Request) -> QueueKey:
    """Waiting order: priority first (lower is earlier), then preempted ones, then arrival."""
    return (
        request.priority,
        request.status is not RequestStatus.PREEMPTED,
        request.arrival_ns,
        request.sequence,
    )


def choose_victim(running: Iterable[Request]) -> Request:
    """The request to preempt: of the worst priority, the one that arrived last.

    The earliest request of the best priority is therefore preempted only if it is alone, so it always
    makes progress and everyone becomes the earliest in time.
    """
    return max(running, key=lambda r: (r.priority, r.arrival_ns, r.sequence))


class WaitingQueue:
    """Requests that wait, in order. Insertion and removal move pointers only: microseconds at 10,000."""

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def first(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        key = queue_key(request)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._requests.insert(index, request)

    def remove(self, request: Request) -> None:
        """Raises KeyError if the request does not wait here (with the status it has now)."""
        index = bisect_left(self._keys, queue_key(request))
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(request.req_id)
        del self._keys[index], self._requests[index]
