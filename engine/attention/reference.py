"""Paged attention in plain torch: the CPU backend, and the oracle for GPU kernels.

Decode rows are grouped by the number of blocks they span, rounded up to a quantum, and each group is
two batched matrix products and a softmax:

    rows' blocks ──index_select──► K, V [Hkv, g, L, D]     L = quantum * k, the rest masked
    q [Hkv, g, G, D]  (the G query heads of a KV head are its query positions: no K/V expansion)

A row's result does not depend on its neighbours, bit for bit: it is computed over the same L, with the
same mask, whether its group has one row or sixty-four. (torch's fused attention lacks this property
when it runs on several threads, and is no faster here.) A row whose blocks are consecutive needs no copy: the
cache is head-major on a CPU, so its keys are a view.

Prefill chunks are cut into tiles of queries, each seeing only the keys up to its last query, which
halves the work of a whole prompt. A cache of 8-bit floats is read through copies in the arithmetic's dtype:
slower, but half the memory or less. In float32 a tile is one fused call, its G heads per KV head a batch
over K and V of stride 0; in bfloat16 plain batched products are up to twice as fast.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionSpec, KVCache, StepInputs

GROUP_QUANTUM_TOKENS = 64  # small enough to waste little, large enough for few groups
QUERY_TILE = 64  # scores of a tile stay in the cache of a core


@dataclass(slots=True)
class Span:
    """Rows attended in one call: which tokens ask, and which keys they see."""

    tokens: slice | Tensor  # of the T tokens; a slice when they are consecutive
    num_rows: int
    blocks: slice | Tensor  # of the cache; a slice when they are consecutive (one row only)
    num_keys: int  # keys per row, padding included
    mask: Tensor  # additive, [rows, 1, keys] for decode, [tokens, keys] for prefill
    is_prefill: bool


class ReferenceAttention(AttentionBackend):
    """AttentionBackend in torch operations. Not for use by two steps at once (it owns scratch)."""

    def __init__(self, kv: KVCache, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of queries and arithmetic, if it is not the cache's."""
        self.kv = kv
        self.kernels = "torch"
        if kv.k[0].dtype.itemsize == 1:
            self.kernels += ", through copies of the 8-bit cache in the model's dtype"
        self.spans: dict[int | None, list[Span]] = {}  # by sliding window
        self.dtype = dtype or kv.k[0].dtype
        # head-major views [Hkv, num_blocks, block_size, D]
        self.keys = [k.transpose(0, 1) for k in kv.k]
        self.values = [v.transpose(0, 1) for v in kv.v]
        self.key_scratch = torch.empty(0, dtype=self.dtype)
        self.value_scratch = torch.empty(0, dtype=self.dtype)
        self.out = torch.empty(0, dtype=self.dtype)
        self.mask_windows: dict[int, np.ndarray] = {}  # by number of keys; views of small arrays

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        """Group the rows of this step, once for all layers with the same window."""
        self.spans = {}
        for spec in specs:
            if spec.sliding_window not in self.spans:
                self.spans[spec.sliding_window] = self.make_spans(inputs, spec.sliding_window)
        width = specs[0].num_heads * specs[0].head_dim
        self.out = torch.zeros(len(inputs.positions), width, dtype=self.dtype)
        most = max(
            (s.num_rows * s.num_keys for spans in self.spans.values() for s in spans), default=0
        )
        size = most * specs[0].num_kv_heads * specs[0].head_dim
        if self.key_scratch.numel() < size:
            self.key_scratch = torch.empty(size, dtype=self.dtype)
            self.value_scratch = torch.empty(size, dtype=self.dtype)

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """See AttentionBackend.attend. The result is valid until the next call."""
        group = spec.num_heads // spec.num_kv_heads
        k_scale, v_scale = self.kv.scales_of(layer)
        for span in self.spans[spec.sliding_window]:
            k = self.gather(
                self.keys[layer], span, self.key_scratch, k_scale
            )  # [Hkv, rows, keys, D]
            v = self.gather(self.values[layer], span, self.value_scratch, v_scale)
            rows = (
                q[span.tokens] if isinstance(span.tokens, slice) else q.index_select(0, span.tokens)
            )
            query = rows.view(-1, spec.num_kv_heads, group, spec.head_dim)
            attend = prefill_tile if span.is_prefill else decode_group
            result = attend(query, k, v, span.mask, spec)
            if isinstance(span.tokens, slice):
                self.out[span.tokens] = result.reshape(-1, self.out.shape[1])
            else:
                self.out.index_copy_(0, span.tokens, result.reshape(-1, self.out.shape[1]))
        return self.out

    def gather(self, cache: Tensor, span: Span, scratch: Tensor, scale: float) -> Tensor:
        """Keys or values of a span, [Hkv, rows, keys, D]: a view where possible."""
        heads, _, block_size, head_dim = cache.shape
        if cache.dtype.itemsize == 1:
            blocks = cache.view(torch.uint8)  # torch does not index 8-bit floats
            if isinstance(span.blocks, slice):
                blocks = blocks[:, span.blocks]
            else:
                blocks = blocks.index_select(1, span.blocks)
            numbers = blocks.view(cache.dtype).to(self.dtype)
            if scale != 1:
                numbers.mul_(scale)
            return numbers.reshape(heads, span.num_rows, span.num_keys, head_dim)
        if isinstance(span.blocks, slice):
            return cache[:, span.blocks].reshape(heads, 1, span.num_keys, head_dim)
        num_blocks = len(span.blocks)
        target = scratch[: heads * num_blocks * block_size * head_dim]
        target = target.view(heads, num_blocks, block_size, head_dim)
        torch.index_select(cache, 1, span.blocks, out=target)
        return target.view(heads, span.num_rows, span.num_keys, head_dim)

    # --- planning ----------------------------------------------------------------------------

    def make_spans(self, inputs: StepInputs, window: int | None) -> list[Span]:
        spans = self.decode_spans(inputs, window) if inputs.num_decodes else []
        for row in range(inputs.num_decodes, len(inputs.seq_lens)):
            spans += self.prefill_spans(inputs, row, window)
        return spans

    def decode_spans(self, inputs: StepInputs, window: int | None) -> list[Span]:
        """Decode rows by the number of blocks they see, rounded up to the quantum."""
        block_size = self.kv.block_size
        lens = np.array(inputs.seq_lens[: inputs.num_decodes], np.int64)
        num_blocks = (lens + block_size - 1) // block_size
        if window is not None:
            first = np.maximum(lens - window, 0)
            first_block = first // block_size
            num_blocks -= first_block
        quantum = max(1, GROUP_QUANTUM_TOKENS // block_size)
        padded = (num_blocks + quantum - 1) // quantum * quantum
        last_column = inputs.block_ids.shape[1] - 1
        spans = []
        sizes = sorted(set(padded.tolist()))
        for size in sizes:
            alone = len(sizes) == 1
            members = np.arange(len(lens)) if alone else np.flatnonzero(padded == size)
            # columns past a row's end hold whatever they held before: those keys are masked
            columns = np.arange(size)[None, :]
            if window is not None:
                columns = columns + first_block[members, None]
            columns = np.minimum(columns, last_column)
            blocks = inputs.block_ids[members[:, None], columns].astype(np.int64)
            num_keys = size * block_size
            if window is None:
                mask = self.tail_mask(lens[members], num_keys)
            else:
                offset = first_block[members] * block_size
                position = np.arange(num_keys)[None, :] + offset[:, None]
                hidden = (position >= lens[members, None]) | (position < first[members, None])
                mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
            spans.append(
                Span(
                    tokens=slice(0, len(members)) if alone else torch.from_numpy(members),
                    num_rows=len(members),
                    blocks=self.as_slice(blocks, int(num_blocks[members[0]])),
                    num_keys=num_keys,
                    mask=torch.from_numpy(mask).to(self.dtype)[:, None, :],
                    is_prefill=False,
                )
            )
        return spans

    def tail_mask(self, lens: np.ndarray, num_keys: int) -> np.ndarray:
        """float32 [rows, num_keys]: 0 for the first lens[i] keys, -inf behind. All are windows of one
        array, which costs less than comparing positions with lengths in every step."""
        windows = self.mask_windows.get(num_keys)
        if windows is None:
            zeros = np.zeros(num_keys, np.float32)
            edge = np.concatenate([zeros, np.full_like(zeros, -np.inf)])
            windows = self.mask_windows[num_keys] = sliding_window_view(edge, num_keys)
        return windows[num_keys - lens]

    def as_slice(self, blocks: np.ndarray, num_real: int) -> slice | Tensor:
        """One row of consecutive blocks as a slice. What pads it may be any blocks: it is masked."""
        num_rows, size = blocks.shape
        first = int(blocks[0, 0])
        is_run = num_rows == 1 and bool((np.diff(blocks[0, :num_real]) == 1).all())
        if is_run and first + size <= self.kv.num_blocks:
            return slice(first, first + size)
        return torch.from_numpy(blocks.reshape(-1))

    def prefill_spans(self, inputs: StepInputs, row: int, window: int | None) -> list[Span]:
        """Tiles of one prefill chunk."""
        start, end = inputs.query_start[row], inputs.query_start[row + 1]
        before = inputs.seq_lens[row] - end  # add to a token's index to get its position
        return [
            self.prefill_tile_span(
                inputs.block_ids[row], first, min(first + QUERY_TILE, end), before, window
            )
            for first in range(start, end, QUERY_TILE)
        ]

    def prefill_tile_span(
        self, row_blocks: np.ndarray, start: int, end: int, before: int, window: int | None
    ) -> Span:
        """Queries of the tokens start .. end - 1 over the keys that any of them sees."""
        block_size = self.kv.block_size
        first_query, num_keys = start + before, end + before
        first = 0 if window is None else max(0, first_query - window + 1)
        first_block = first // block_size
        num_blocks = -(-num_keys // block_size) - first_block
        blocks = row_blocks[first_block : first_block + num_blocks].astype(np.int64)
        key_position = np.arange(num_blocks * block_size)[None, :] + first_block * block_size
        query_position = np.arange(first_query, num_keys)[:, None]
        hidden = key_position > query_position
        if window is not None:
            hidden |= key_position <= query_position - window
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return Span(
            tokens=slice(start, end),
            num_rows=1,
            blocks=self.as_slice(blocks[None, :], num_blocks),
            num_keys=num_blocks * block_size,
            mask=torch.from_numpy(mask).to(self.dtype),
            is_prefill=True,
        )


def decode_group(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """One query per row: q [rows, Hkv, G, D], k and v [Hkv, rows, keys, D], mask [rows, 1, keys].
    Returns [rows, Hkv, G, D]."""
    rows, kv_heads, group, head_dim = q.shape
    queries = (q * spec.scale).transpose(0, 1).reshape(kv_heads * rows, group, head_dim)
    scores = torch.bmm(queries, k.flatten(0, 1).transpose(1, 2))
    scores = add_mask(scores.view(kv_heads, rows, group, -1), mask, spec)
    weights = torch.softmax(scores, -1).view(kv_heads * rows, group, -1)
    return torch.bmm(weights, v.flatten(0, 1)).view(kv_heads, rows, group, head_dim).transpose(0, 1)


def prefill_tile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Queries of one row: q [tokens, Hkv, G, D], k and v [Hkv, 1, keys, D], mask [tokens, keys].
    Returns [tokens, Hkv, G, D]."""
    tokens, kv_heads, group, head_dim = q.shape
    k, v = k[:, 0], v[:, 0]
    if q.dtype is torch.float32 and not spec.softcap:
        heads_first = F.scaled_dot_product_attention(
            q.permute(2, 1, 0, 3),
            k.expand(group, -1, -1, -1),
            v.expand(group, -1, -1, -1),
            attn_mask=mask,
            scale=spec.scale,
        )
        return heads_first.permute(2, 1, 0, 3)
    packed = (q * spec.scale).permute(1, 2, 0, 3).reshape(kv_heads, group * tokens, head_dim)
    scores = torch.bmm(packed, k.transpose(1, 2)).view(kv_heads, group, tokens, -1)
    weights = torch.softmax(add_mask(scores, mask, spec), -1)
    result = torch.bmm(weights.view(kv_heads, group * tokens, -1), v)
    return result.view(kv_heads, group, tokens, head_dim).permute(2, 0, 1, 3)


def add_mask(scores: Tensor, mask: Tensor, spec: AttentionSpec) -> Tensor:
    """Soft-cap and mask scaled scores; in place."""
    if spec.softcap:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return scores.add_(mask)
