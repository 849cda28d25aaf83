"""Log-probabilities of prompt tokens, from the hidden states of a step.

Logits of all positions at once would need [prompt, vocabulary] floats, gigabytes for a long prompt.
They are made for a few rows at a time, and what is kept of a row are its token's log-probability and
rank and the best few.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.models.base import Model
from engine.ops.logprobs import LogprobTensors
from engine.plan import PromptSpan, SpanLogprobs
from engine.runner.device_sampler import DeviceSampler, staged
from engine.runner.sampler import Sampler


@dataclass(slots=True)
class PromptOutput:
    """Device results for all prompt tokens that a step reports, one span after the other."""

    spans: list[PromptSpan]
    logprobs: LogprobTensors
    is_bad: Tensor  # bool [n]

    def result(self) -> list[SpanLogprobs]:
        """By span, as the host wants them. Waits for the device."""
        logprobs, is_bad = self.logprobs.sampled.cpu().numpy(), self.is_bad.cpu().numpy()
        ranks = self.logprobs.rank.cpu().numpy().astype(np.int32)
        top_ids = self.logprobs.top_ids.cpu().numpy().astype(np.int32)
        top_logprobs = self.logprobs.top_logprobs.cpu().numpy()
        results = []
        first = 0
        for span in self.spans:
            rows, k = slice(first, first + len(span.token_ids)), span.num_top
            first = rows.stop
            results.append(
                SpanLogprobs(
                    logprobs=logprobs[rows],
                    ranks=ranks[rows],
                    top_ids=top_ids[rows, :k],
                    top_logprobs=top_logprobs[rows, :k],
                    is_bad=bool(is_bad[rows].any()),
                )
            )
        return results


def score_prompts(
    hidden: Tensor, spans: list[PromptSpan], model: Model, sampler: Sampler | DeviceSampler
) -> PromptOutput:
    """Log-probabilities of the tokens of `spans`, from a step's hidden states [T, hidden_size]."""
    firsts = [np.arange(s.first_token, s.first_token + len(s.token_ids)) for s in spans]
    host = np.stack([np.concatenate(firsts), np.concatenate([s.token_ids for s in spans])])
    index, token_ids = staged(host, hidden.device).to(hidden.device, non_blocking=True)
    num_top = max(span.num_top for span in spans)
    parts = []
    for start in range(0, len(index), sampler.score_rows):
        rows = slice(start, start + sampler.score_rows)
        logits = model.logits(hidden.index_select(0, index[rows]))
        parts.append(sampler.score(logits, token_ids[rows], num_top))
        del logits  # not to be kept until the next ones are there
    entries, bad = zip(*parts, strict=True)
    logprobs = LogprobTensors(
        sampled=torch.cat([e.sampled for e in entries]),
        rank=torch.cat([e.rank for e in entries]),
        top_ids=torch.cat([e.top_ids for e in entries]),
        top_logprobs=torch.cat([e.top_logprobs for e in entries]),
    )
    return PromptOutput(spans, logprobs, torch.cat(bad))
