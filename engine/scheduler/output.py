"""What the scheduler has to tell, gathered until the step loop sends it."""

from engine.api.messages import FinishReason, StepOutput, TokenLogprobs
from engine.plan import RowLogprobs


class OutputBuffer:
    """Columns of the next StepOutput.

    A request may have two entries, e.g. a token and later in the same output its abort; the order of
    entries is the order of events.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.req_ids: list[int] = []
        self.counts: list[int] = []
        self.token_ids: list[int] = []
        self.finished: list[tuple[int, FinishReason, int | None]] = []
        self.logprobs: list[TokenLogprobs] = []
        self.started: list[tuple[int, int, int]] = []
        self.rejected: list[tuple[int, str, str]] = []

    def add_token(self, req_id: int, token_id: int) -> None:
        self.req_ids.append(req_id)
        self.counts.append(1)
        self.token_ids.append(token_id)

    def add_logprobs(self, entry: RowLogprobs) -> None:
        """Log-probabilities of the token added last."""
        self.logprobs.append(
            TokenLogprobs(
                index=len(self.token_ids) - 1,
                sampled=entry.sampled,
                rank=entry.rank,
                top_ids=entry.top_ids.tobytes(),
                top_logprobs=entry.top_logprobs.tobytes(),
            )
        )

    def finish(self, req_id: int, reason: FinishReason, stop_token: int | None) -> None:
        """End a request; its entry is the last one if that is the token it ended with."""
        if not self.req_ids or self.req_ids[-1] != req_id:
            self.req_ids.append(req_id)
            self.counts.append(0)
        self.finished.append((len(self.req_ids) - 1, reason, stop_token))

    def take(self, epoch: int, step_id: int) -> StepOutput | None:
        """Everything since the last call, or None."""
        if not (self.req_ids or self.started or self.rejected):
            return None
        output = StepOutput(
            epoch=epoch,
            step_id=step_id,
            req_ids=self.req_ids,
            counts=self.counts,
            token_ids=self.token_ids,
            finished=self.finished,
            logprobs=self.logprobs,
            started=self.started,
            rejected=self.rejected,
        )
        self._clear()
        return output
