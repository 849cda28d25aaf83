"""Who runs next, and who gives way."""

from bisect import bisect_left, bisect_right
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
    """Requests that wait, in order.

    Removal costs no walk: the entry stays as an empty place, and places are swept away once they are
    as many as the requests. Aborting 10,000 is then 10,000 searches, not 10,000 moved lists.
    """

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._requests: list[Request | None] = []  # None: removed
        self._num_removed = 0
        self._first = 0  # places before it are empty

    def __len__(self) -> int:
        return len(self._keys) - self._num_removed

    def __iter__(self) -> Iterator[Request]:
        return (request for request in self._requests if request is not None)

    def first(self) -> Request:
        """Raises IndexError if none waits."""
        while (request := self._requests[self._first]) is None:
            self._first += 1
        return request

    def add(self, request: Request) -> None:
        key = queue_key(request)
        index = bisect_right(self._keys, key)
        self._keys.insert(index, key)
        self._requests.insert(index, request)
        self._first = min(self._first, index)

    def remove(self, request: Request) -> None:
        """Raises KeyError if the request does not wait here (with the status it has now)."""
        index = self._index(request)
        self._requests[index] = None
        self._num_removed += 1
        if 2 * self._num_removed >= len(self._keys):
            self._sweep()

    def _index(self, request: Request) -> int:
        key = queue_key(request)
        index = bisect_left(self._keys, key)
        while index < len(self._keys) and self._keys[index] == key:
            if self._requests[index] is request:
                return index
            index += 1  # an empty place: the request has been here before
        raise KeyError(request.req_id)

    def _sweep(self) -> None:
        kept = [i for i, request in enumerate(self._requests) if request is not None]
        self._keys = [self._keys[i] for i in kept]
        self._requests = [self._requests[i] for i in kept]
        self._num_removed = self._first = 0
