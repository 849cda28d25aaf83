"""From logits to tokens. This file fixes the order of the stages:

    log-probabilities   of the raw logits, for rows that report them
    token mask          tokens forbidden by grammars, allowed ids, bad words (constraints.py)
    logit bias          added
    min_tokens          EOS and stop token ids forbidden until enough tokens are generated
    penalties           repetition, frequency, presence       (engine/ops/penalties.py)
    temperature         logits / temperature; below 1e-5: argmax, and the rest is skipped
    min_p, top_k, top_p tokens removed                        (engine/ops/sample.py)
    draw                Gumbel-max with noise from (seed, position, token id)  (engine/ops/philox.py)

Each row is a function of its own logits, parameters, history and position: the same bits come out
alone, in any batch and in any order. Rows without a need for a stage do not enter it; if no row
needs anything, a step is one argmax.

Nothing here waits for the device but `SampleOutput.result`: penalty counts are updated on the
device from the tokens just chosen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops import token_masks
from engine.ops.logprobs import LogprobTensors, gather_logprobs
from engine.ops.penalties import apply_penalties
from engine.ops.sample import argmax, sample
from engine.plan import RowInit, StepResult
from engine.runner.penalty_counts import PenaltyCounts
from engine.runner.sampling_table import Needs, SamplingTable

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(slots=True)
class SampleOutput:
    """Device results of one step, for S rows."""

    token_ids: Tensor  # int64 [S]; 0 for bad rows
    is_bad: Tensor  # bool [S]: the row had no finite largest logit (NaN, infinity, all forbidden)
    logprobs: LogprobTensors | None = None
    logprob_rows: list[int] = field(default_factory=list)  # indices into token_ids
    num_logprobs: list[int] = field(default_factory=list)  # for each of them

    def result(self) -> StepResult:
        """The values, as the host wants them. Waits for the device."""
        result = StepResult(token_ids=self.token_ids.to(torch.int32).cpu().numpy())
        is_bad = self.is_bad.cpu().numpy()
        if is_bad.any():
            result.is_bad = is_bad
        if self.logprobs is not None:
            entries = self.logprobs.rows(self.num_logprobs)
            result.logprobs = dict(zip(self.logprob_rows, entries, strict=True))
        return result


class Sampler:
    """Persistent sampling state of up to `max_rows` rows, and the stages above."""

    def __init__(
        self, max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        """`max_rows` counts the reserved row 0: rows are 0 .. max_rows - 1."""
        self.device = device
        self.score_rows = 64  # of logits at a time when prompts are scored
        self.table = SamplingTable(max_rows, vocab_size, eos_token_ids)
        self.penalty_counts = PenaltyCounts(vocab_size, device)

    @torch.inference_mode()
    def add(self, init: RowInit) -> None:
        """A request starts or resumes on row `init.row`. Raises ValueError if it has no seed."""
        self.table.set(init)
        self.penalty_counts.free(init.row)
        if init.params.has_penalties:
            prompt, output = np.split(init.token_ids, [init.num_prompt_tokens])
            self.penalty_counts.add(init.row, prompt, output)

    def free(self, row: int) -> None:
        """The request on `row` is gone; a row that is free already stays so."""
        self.table.clear(row)
        self.penalty_counts.free(row)

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Int32Array,
        positions: Int64Array,
        masks: Tensor | None = None,
    ) -> SampleOutput:
        """Choose a token for each of S distinct rows.

        logits: float32 [S, V], overwritten. rows: [S]. positions: [S] of the new token in its
        sequence, so that positions - num_prompt_tokens tokens are generated already.
        masks: int32 [S, ceil(V / 32)], bits of allowed tokens (engine/ops/token_masks.py).
        """
        needs = self.table.needs[rows]
        logprobs = self._raw_logprobs(logits, needs)
        is_bad = ~torch.isfinite(logits.amax(-1))
        if masks is not None:
            token_masks.apply(logits, masks)
        self._add_bias(logits, rows, needs)
        self._forbid_early_stop(logits, rows, positions, needs)
        penalty_slots = self._penalize(logits, rows, needs)

        token_ids, best = argmax(logits)
        is_bad |= ~torch.isfinite(best)
        self._draw(logits, rows, positions, needs, token_ids)
        token_ids.masked_fill_(is_bad, 0)

        if penalty_slots:
            which = self._index(indices(needs, Needs.PENALTIES))
            self.penalty_counts.update(penalty_slots, token_ids[which])
        output = SampleOutput(token_ids, is_bad)
        if logprobs is not None:
            which = indices(needs, Needs.LOGPROBS)
            output.logprob_rows = which.tolist()
            output.num_logprobs = self.table.num_logprobs[rows[which]].tolist()
            index = self._index(which)
            logprobs.masked_fill_(is_bad[index].unsqueeze(1), 0.0)  # no NaN, and nobody will look
            k = max(output.num_logprobs)
            output.logprobs = gather_logprobs(logprobs, token_ids[index], k)
        return output

    def score(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[LogprobTensors, Tensor]:
        """Log-probabilities of given tokens: of token_ids (int64 [S]) in raw logits [S, V].

        Returns also bool [S]: bad rows, which hold zeros.
        """
        is_bad = ~torch.isfinite(logits.amax(-1))
        logprobs = torch.log_softmax(logits, dim=-1).masked_fill_(is_bad.unsqueeze(1), 0.0)
        return gather_logprobs(logprobs, token_ids, num_top), is_bad

    def _raw_logprobs(self, logits: Tensor, needs: npt.NDArray[np.uint8]) -> Tensor | None:
        which = indices(needs, Needs.LOGPROBS)
        if not which.size:
            return None
        selected = logits if which.size == len(logits) else logits[self._index(which)]
        return torch.log_softmax(selected, dim=-1)

    def _add_bias(self, logits: Tensor, rows: Int32Array, needs: npt.NDArray[np.uint8]) -> None:
        which = indices(needs, Needs.LOGIT_BIAS)
        if which.size:
            ids = [self.table.bias_ids[row] for row in rows[which].tolist()]
            values = [self.table.bias_values[row] for row in rows[which].tolist()]
            bias = torch.from_numpy(np.concatenate(values)).to(self.device)
            logits[self._entries(which, ids)] += bias

    def _forbid_early_stop(
        self,
        logits: Tensor,
        rows: Int32Array,
        positions: Int64Array,
        needs: npt.NDArray[np.uint8],
    ) -> None:
        which = indices(needs, Needs.MIN_TOKENS)
        which = which[positions[which] < self.table.min_length[rows[which]]]
        if which.size:
            ids = [self.table.stop_ids[row] for row in rows[which].tolist()]
            logits[self._entries(which, ids)] = -torch.inf

    def _penalize(
        self, logits: Tensor, rows: Int32Array, needs: npt.NDArray[np.uint8]
    ) -> list[int]:
        """Returns the slots of the rows with penalties, in order."""
        which = indices(needs, Needs.PENALTIES)
        if not which.size:
            return []
        counts = self.penalty_counts
        slots = counts.slots(rows[which])
        params = self.table.penalty_params(rows[which])
        apply_penalties(logits, which.tolist(), counts.seen, counts.counts, slots, params)
        return slots

    def _draw(
        self,
        logits: Tensor,
        rows: Int32Array,
        positions: Int64Array,
        needs: npt.NDArray[np.uint8],
        token_ids: Tensor,
    ) -> None:
        """Replace the best tokens by drawn ones where a row wants that."""
        which = indices(needs, Needs.DRAW)
        if not which.size:
            return
        temperature = self.table.temperature[rows]  # 1 for rows that do not draw
        if (temperature != 1).any():
            logits /= torch.from_numpy(temperature).to(self.device).unsqueeze(1)
        draw = self.table.draw_params(rows[which], positions[which])
        token_ids[self._index(which)] = sample(logits, which, draw)

    def _entries(self, which: Int64Array, ids: list[Int64Array]) -> tuple[Tensor, Tensor]:
        """Indices into logits [S, V] of token ids ids[i] in row which[i]."""
        row_index = np.repeat(which, [len(row_ids) for row_ids in ids])
        return self._index(row_index), self._index(np.concatenate(ids))

    def _index(self, index: Int64Array) -> Tensor:
        return torch.from_numpy(index).to(self.device)


def indices(needs: npt.NDArray[np.uint8], stage: Needs) -> Int64Array:
    """Which rows of the batch need `stage`."""
    return np.flatnonzero(needs & stage)
