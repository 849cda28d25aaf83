"""The sampler of a GPU: what each row asks for lives on the device, and two kernels do all stages.

The stages, their order and their results are those of engine/runner/sampler.py. The parameters of a
row are a record in device memory; its penalty counts, a table over the vocabulary, and its logit biases, a
list, are where the record points to, if it has any. Records change when requests come, never during their steps,
so a captured graph goes on serving whoever is in its rows:

    add, free       host only, but for the new row's tables
    flush           one small copy if rows have changed; before the step, outside of graphs
    sample_on_device    two kernels; may be captured, and is in decode graphs
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api.sampling import MAX_BIASES
from engine.ops.logprobs import LogprobTensors
from engine.ops.logprobs_cuda import LogprobWorkspace
from engine.ops.logprobs_cuda import launch as launch_logprobs
from engine.ops.sample_cuda import (
    BIAS_DTYPE,
    IN_PROMPT,
    MOST_COUNTED,
    ROW_DTYPE,
    STOPS,
    RowFlags,
    SamplingClass,
    Workspace,
    launch,
    padded,
)
from engine.ops.token_masks import ALL
from engine.plan import RowInit
from engine.runner.sampler import SampleOutput, indices
from engine.runner.sampling_table import Needs, SamplingTable

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

# Rows of logits at a time when prompts are scored. Each time the whole output head is read.
MOST_SCORE_ROWS = 256
LEAST_SCORE_ROWS = 16

EDITS = Needs.PENALTIES | Needs.LOGIT_BIAS | Needs.MIN_TOKENS
BEYOND_PLAIN = int(EDITS | Needs.LOGPROBS)  # an int: flags take microseconds to combine


class TablePool:
    """Tables for the rows that need one, made when first needed and used again."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.device = device
        self.of_row: dict[int, Tensor] = {}
        self.free_tables: list[Tensor] = []

    def set(self, row: int, values: npt.NDArray[np.generic]) -> int:
        """Give `row` a table that begins with these values; returns its address."""
        self.free(row)
        if self.free_tables:
            table = self.free_tables.pop()
        else:
            table = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        contents = staged(values.view(np.uint8), self.device)
        table[: len(contents)].copy_(contents, non_blocking=True)
        self.of_row[row] = table
        return table.data_ptr()

    def free(self, row: int) -> None:
        """Steps under way may still read the table: what fills it next is behind them on the stream."""
        table = self.of_row.pop(row, None)
        if table is not None:
            self.free_tables.append(table)


class DeviceSampler:
    """Persistent sampling state of up to `max_rows` rows on a device."""

    def __init__(
        self, max_rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        """`max_rows` counts the reserved row 0. Raises ValueError if the vocabulary is too large."""
        self.device = device
        # as many as the peak of memory was measured with, and a few even for a single request
        self.score_rows = min(MOST_SCORE_ROWS, max(LEAST_SCORE_ROWS, max_rows - 1))
        self.table = SamplingTable(max_rows, vocab_size, eos_token_ids)
        self.workspace = Workspace.allocate(max_rows, vocab_size, device)
        num_logprob_rows = max(max_rows, self.score_rows)
        self.logprob_workspace = LogprobWorkspace.allocate(num_logprob_rows, vocab_size, device)
        self.tokens = TablePool(padded(vocab_size) * np.dtype(np.uint16).itemsize, device)
        self.biases = TablePool(MAX_BIASES * BIAS_DTYPE.itemsize, device)
        self.records = np.zeros(max_rows, ROW_DTYPE)
        self.records["temperature"] = 1
        self.params = torch.zeros((max_rows, ROW_DTYPE.itemsize), dtype=torch.uint8, device=device)
        self.changed = set(range(max_rows))  # rows whose record the device does not have yet
        # the record of a row that reports log-probabilities (num_logprobs is not below 0)
        self.reporting = torch.zeros((1, ROW_DTYPE.itemsize), dtype=torch.uint8, device=device)
        # where results go unless the caller says otherwise, as decode graphs do
        self.token_ids = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.is_bad = torch.zeros(max_rows, dtype=torch.bool, device=device)

    @property
    def most_table_bytes(self) -> int:
        """What the tables take once every row has had both."""
        return self.records.size * (self.tokens.num_bytes + self.biases.num_bytes)

    @torch.inference_mode()
    def add(self, init: RowInit) -> None:
        """A request starts or resumes on row `init.row`. Raises ValueError if it has no seed."""
        row, table = init.row, self.table
        table.set(init)
        self._free_tables(row)
        needs = Needs(int(table.needs[row]))
        record = self.records[row : row + 1]
        record["flags"] = self._flags(row, needs)
        record["temperature"] = table.temperature[row]
        if needs & Needs.DRAW:
            record["seed"] = table.seed[row : row + 1].view(np.uint64)
            record["top_k"] = table.top_k[row] if self._has_top_k(row) else 0
            record["top_p"] = table.top_p[row]
            with np.errstate(divide="ignore"):  # min_p = 0 is off: no logit is below -infinity
                record["log_min_p"] = np.log(table.min_p[row])
        if needs & Needs.PENALTIES:
            for name in ("repetition", "frequency", "presence"):
                record[name] = getattr(table, name)[row]
        if needs & Needs.MIN_TOKENS:
            record["min_length"] = min(int(table.min_length[row]), 2**31 - 1)
        if needs & (Needs.PENALTIES | Needs.MIN_TOKENS):
            record["tokens"] = self.tokens.set(row, self._token_table(init, needs))
        if needs & Needs.LOGIT_BIAS:
            order = np.argsort(table.bias_ids[row])
            biases = np.empty(len(order), BIAS_DTYPE)
            biases["id"] = table.bias_ids[row][order]
            biases["value"] = table.bias_values[row][order]
            record["biases"], record["num_biases"] = self.biases.set(row, biases), len(biases)
        record["num_logprobs"] = table.num_logprobs[row] if needs & Needs.LOGPROBS else -1
        self.changed.add(row)

    def free(self, row: int) -> None:
        """The request on `row` is gone; a row that is free already stays so."""
        self.table.clear(row)
        self._free_tables(row)

    def flush(self) -> None:
        """Send the records of rows added since the last flush."""
        if not self.changed:
            return
        rows = np.array(sorted(self.changed), np.int64)
        records = self.records[rows].view(np.uint8).reshape(len(rows), -1)
        index = staged(rows, self.device).to(self.device, non_blocking=True)
        values = staged(records, self.device).to(self.device, non_blocking=True)
        self.params.index_copy_(0, index, values)
        self.changed.clear()

    def warm_up(self) -> None:
        """Run every kernel once on the dummy row, so that none is loaded while serving or capturing."""
        self.flush()
        logits = torch.zeros((1, self.table.vocab_size), device=self.device)
        rows = torch.zeros(1, dtype=torch.int32, device=self.device)
        for which in SamplingClass:
            token_ids, is_bad = self.sample_on_device(logits, rows, rows, which)
        self.logprobs_on_device(logits, rows, token_ids, is_bad, num_top=1)

    def is_plain(self, rows: Int32Array) -> bool:
        """All that `rows` ask for is in SamplingClass.SIMPLE, and none reports log-probabilities."""
        needs = int(np.bitwise_or.reduce(self.table.needs[rows], initial=0))
        return needs & BEYOND_PLAIN == 0

    def sampling_class(self, rows: Int32Array, has_masks: bool = False) -> SamplingClass:
        """The smallest class that has all stages of `rows`."""
        needs = int(np.bitwise_or.reduce(self.table.needs[rows], initial=0))
        if has_masks or needs & EDITS:
            return SamplingClass.FULL
        return SamplingClass.SIMPLE if needs & Needs.DRAW else SamplingClass.GREEDY

    def sample_on_device(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        sampling_class: SamplingClass,
        masks: Tensor | None = None,
        last_token: Tensor | None = None,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Token ids (int64 [S]) and bad rows (bool [S]), for S rows; see engine/ops/sample_cuda.py.

        rows, positions: int32 [S] on the device; rows may hold the dummy row 0 any number of times.
        `out`: where the results go; without it, they stay valid until the next such call.
        Neither waits nor allocates. Records must have been flushed.
        """
        num_rows = logits.shape[0]
        token_ids, is_bad = out or (self.token_ids[:num_rows], self.is_bad[:num_rows])
        launch(
            logits,
            rows,
            positions,
            self.params,
            self.workspace,
            sampling_class,
            token_ids,
            is_bad,
            masks,
            last_token,
        )
        return token_ids, is_bad

    def logprobs_on_device(
        self, logits: Tensor, rows: Tensor, token_ids: Tensor, is_bad: Tensor, num_top: int
    ) -> LogprobTensors:
        """Log-probabilities of the raw `logits` for all S rows that report them; others hold zeros.

        num_top: columns of the result, at least what any of the rows wants. May be captured.
        """
        return launch_logprobs(
            logits, rows, self.params, token_ids, is_bad, self.logprob_workspace, num_top
        )

    def score(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[LogprobTensors, Tensor]:
        """Log-probabilities of given tokens: Sampler.score, for up to `score_rows` rows on the device."""
        is_bad = ~torch.isfinite(logits.amax(-1))
        rows = torch.zeros(len(token_ids), dtype=torch.int32, device=self.device)
        entries = launch_logprobs(
            logits, rows, self.reporting, token_ids, is_bad, self.logprob_workspace, num_top
        )
        return entries, is_bad

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        rows: Int32Array,
        positions: Int64Array,
        masks: Tensor | None = None,
        last_token: Tensor | None = None,
    ) -> SampleOutput:
        """Choose a token for each of S distinct rows: Sampler.sample, for logits on the device.

        `logits` are not changed, and may be bfloat16 or float16 too. `last_token` int64 [table rows]
        takes each row's token. `masks`: on the device (`spread_masks`).
        """
        self.flush()
        host = np.stack([rows, positions.astype(np.int32)])
        rows_device, positions_device = staged(host, self.device).to(self.device, non_blocking=True)
        num_rows = len(rows)
        out = (
            torch.empty(num_rows, dtype=torch.int64, device=self.device),
            torch.empty(num_rows, dtype=torch.bool, device=self.device),
        )
        which = self.sampling_class(rows, masks is not None)
        token_ids, is_bad = self.sample_on_device(
            logits, rows_device, positions_device, which, masks, last_token, out
        )
        output = SampleOutput(token_ids, is_bad)
        reporting = indices(self.table.needs[rows], Needs.LOGPROBS)
        if reporting.size:
            output.logprob_rows = reporting.tolist()
            output.num_logprobs = self.table.num_logprobs[rows[reporting]].tolist()
            entries = self.logprobs_on_device(
                logits, rows_device, token_ids, is_bad, max(output.num_logprobs)
            )
            index = staged(reporting, self.device).to(self.device, non_blocking=True)
            output.logprobs = entries.select(index)
        return output

    def _free_tables(self, row: int) -> None:
        self.tokens.free(row)
        self.biases.free(row)

    def _has_top_k(self, row: int) -> bool:
        return 1 <= int(self.table.top_k[row]) < self.table.vocab_size

    def _flags(self, row: int, needs: Needs) -> int:
        flags = RowFlags(int(needs & (Needs.DRAW | EDITS)))  # the same bits
        if needs & Needs.DRAW:
            has_top_p, has_min_p = self.table.top_p[row] < 1, self.table.min_p[row] > 0
            has_top_k = self._has_top_k(row)
            if has_top_k or has_top_p or has_min_p:
                flags |= RowFlags.TRUNCATE
            if has_top_p and not has_top_k and not has_min_p:
                flags |= RowFlags.MASS
        return int(flags)

    def _token_table(self, init: RowInit, needs: Needs) -> npt.NDArray[np.uint16]:
        """What the row must know of each token (engine/ops/sample_cuda.py); ids beyond V are dropped."""
        vocab_size = self.table.vocab_size
        entries = np.zeros(padded(vocab_size), np.uint16)
        if needs & Needs.PENALTIES:
            prompt, output = np.split(init.token_ids, [init.num_prompt_tokens])
            output = output[output < vocab_size]
            counts = np.bincount(output, minlength=len(entries))
            entries += np.minimum(counts, MOST_COUNTED).astype(np.uint16)
            entries[prompt[prompt < vocab_size]] |= np.uint16(IN_PROMPT)
        if needs & Needs.MIN_TOKENS:
            entries[self.table.stop_ids[init.row]] |= np.uint16(STOPS)
        return entries


def spread_masks(
    places: Int64Array, masks: Int32Array, num_rows: int, device: torch.device
) -> Tensor:
    """int32 [num_rows, W] on the device: `masks` [n, W] at `places`, which ascend, else all is allowed.

    Only the masks given are copied: of a large batch, few rows may have one, and 20 KB are a row's.
    """
    given = staged(masks, device).to(device, non_blocking=True)
    if len(places) == num_rows:
        return given
    whole = torch.full((num_rows, masks.shape[1]), ALL, dtype=torch.int32, device=device)
    index = staged(places, device).to(device, non_blocking=True)
    return whole.index_copy_(0, index, given)


def staged(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host tensor of `values` from which a copy to the device need not wait for the host.

    torch keeps pinned memory from being used again until the copies out of it are done.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor
