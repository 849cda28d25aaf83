"""What the scheduler has to tell, gathered until the step loop sends it."""

from collections.abc import Iterable

from engine.api.messages import FinishReason, PromptLogprobs, StepOutput, TokenLogprobs
from engine.plan import RowLogprobs, SpanLogprobs


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
        self.prompt_logprobs: list[PromptLogprobs] = []

    def add_tokens(self, req_ids: list[int], token_ids: list[int]) -> int:
        """One token for each of these requests; returns the entry of the first."""
        entry = len(self.req_ids)
        self.req_ids += req_ids
        self.counts += [1] * len(req_ids)
        self.token_ids += token_ids
        return entry

    def add_logprobs(self, entries: Iterable[tuple[int, RowLogprobs]]) -> None:
        """Log-probabilities at tokens about to be added, each with the token's place among them."""
        first = len(self.token_ids)
        self.logprobs += [
            TokenLogprobs(
                index=first + place,
                sampled=entry.sampled,
                rank=entry.rank,
                top_ids=entry.top_ids.tobytes(),
                top_logprobs=entry.top_logprobs.tobytes(),
            )
            for place, entry in entries
        ]

    def add_prompt_logprobs(self, req_id: int, first: int, span: SpanLogprobs) -> None:
        """Log-probabilities of the prompt's tokens from place `first` on."""
        self.prompt_logprobs.append(
            PromptLogprobs(
                req_id=req_id,
                first=first,
                logprobs=span.logprobs.tobytes(),
                ranks=span.ranks.tobytes(),
                top_ids=span.top_ids.tobytes(),
                top_logprobs=span.top_logprobs.tobytes(),
            )
        )

    def finish(
        self,
        req_id: int,
        reason: FinishReason,
        stop_token: int | None,
        entry: int | None = None,
        why: str = "",
    ) -> None:
        """End a request. `entry`: that of the token it ends with; None if no token ends it.

        `why`: in what the form that its text should have is at fault, for the client.
        """
        if why:
            self.rejected.append((req_id, "invalid_schema", why))
            return
        if entry is None:
            entry = len(self.req_ids)
            self.req_ids.append(req_id)
            self.counts.append(0)
        self.finished.append((entry, reason, stop_token))

    def take(self, epoch: int, step_id: int) -> StepOutput | None:
        """Everything since the last call, or None."""
        if not (self.req_ids or self.started or self.rejected or self.prompt_logprobs):
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
            prompt_logprobs=self.prompt_logprobs,
        )
        self._clear()
        return output
