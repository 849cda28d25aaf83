"""Requests whose grammar is being compiled wait here, so that the step loop never does."""

from engine.api.grammar import GrammarError
from engine.api.messages import AddRequest
from engine.runner.grammars import Grammars
from engine.scheduler.admission import Rejection

IDLE_SECONDS = 0.01


class GrammarGate:
    """In front of the scheduler. Later requests may pass; the queue is by arrival anyway."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self.held: dict[int, AddRequest] = {}

    def hold(self, request: AddRequest) -> None:
        assert request.params.structured is not None
        self.grammars.start(request.params.structured)
        self.held[request.req_id] = request

    def take_ready(self) -> list[tuple[AddRequest, Rejection | None]]:
        """Requests that may go on, each with the reason if its grammar cannot be used."""
        ready = []
        for request in list(self.held.values()):
            structured = request.params.structured
            assert structured is not None
            if self.grammars.is_ready(structured):
                del self.held[request.req_id]
                ready.append((request, rejection_for(self.grammars.error(structured))))
        return ready

    def release(self, req_ids: list[int]) -> list[AddRequest]:
        """Those of the requests that wait here, ready or not: they are about to be aborted."""
        return [self.held.pop(req_id) for req_id in req_ids if req_id in self.held]

    def wait(self) -> None:
        """A moment, when there is nothing else to do."""
        request = next(iter(self.held.values()))
        assert request.params.structured is not None
        self.grammars.wait(request.params.structured, IDLE_SECONDS)


def rejection_for(error: BaseException | None) -> Rejection | None:
    if error is None:
        return None
    if isinstance(error, GrammarError):
        return Rejection("invalid_schema", f"the grammar cannot be used: {error}", 0, 0)
    message = "The grammar could not be compiled, for an internal error; the log says more."
    return Rejection("internal_error", message, 0, 0)
