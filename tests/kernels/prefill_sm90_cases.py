"""Prompt chunks over a scattered KV cache, for the Hopper prefill kernel on a GPU and in the emulator."""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.ops.paged_prefill import work_items
from engine.ops.paged_prefill_sm90 import TILINGS, Tiling, paged_prefill_sm90


@dataclass
class Case:
    """A step's prefill rows. What no chunk may read is NaN: unused blocks, the ends of last blocks."""

    q: Tensor  # [T, num_heads, head_dim], a slice of a wider buffer
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    rows: Tensor
    work: Tensor
    q_start: Tensor
    q_lens: list[int]
    kv_lens: list[int]
    scale: float
    window: int | None
    softcap: float
    tiling: Tiling
    num_items: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.q_lens)

    def to(self, device: torch.device | str) -> "Case":
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "q"
        }
        width = self.q.stride(0)
        wide = torch.randn(self.q.shape[0], width, dtype=self.q.dtype, device=device)
        q = wide[:, : self.q.shape[1] * self.q.shape[2]].view(self.q.shape)
        q.copy_(self.q)
        return replace(self, **moved, q=q)

    def nan_output(self) -> Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)

    def run(self, out: Tensor) -> None:
        paged_prefill_sm90(
            self.q,
            self.k_cache,
            self.v_cache,
            self.block_table,
            self.rows,
            self.work,
            self.q_start,
            self.scale,
            out,
            self.window,
            self.softcap,
            tiling=self.tiling,
            num_items=self.num_items,
        )

    def counted(self, capacity: int) -> "Case":
        """The same in a list of `capacity` items: garbage behind those that count."""
        items = self.work[self.work[:, 2] > 0]
        work = torch.randint(-(1 << 31), 1 << 31, (capacity, 4), dtype=torch.int32)
        work[: len(items)] = items
        num_items = torch.tensor([len(items)], dtype=torch.int32)
        device = self.work.device
        return replace(self, work=work.to(device), num_items=num_items.to(device))

    def tiled(self, tiling: Tiling) -> "Case":
        """The same chunks, cut into other items, with as much padding."""
        padding = int((self.work[:, 2] == 0).sum())
        work = make_work(self.q_lens, self.kv_lens, tiling, padding).to(self.work.device)
        return replace(self, tiling=tiling, work=work)

    def part(self, begin: int, end: int) -> "Case":
        """Of a single chunk, queries `begin` to `end` as a chunk of its own, at their place in q."""
        (q_len,), (kv_len,) = self.q_lens, self.kv_lens
        q_lens, kv_lens = [end - begin], [kv_len - q_len + end]
        work = make_work(q_lens, kv_lens, self.tiling, 0).to(self.work.device)
        q_start = torch.full_like(self.q_start, begin)
        return replace(self, work=work, q_start=q_start, q_lens=q_lens, kv_lens=kv_lens)

    def expected(self) -> Tensor:
        """[num_tokens, num_heads, head_dim], in float32 by the definition."""
        group = self.q.shape[1] // self.k_cache.shape[1]
        out = []
        for i, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            blocks = self.block_table[int(self.rows[i])]
            keys, values = (
                cache[blocks[: -(-kv_len // cache.shape[2])].long()]
                .transpose(0, 1)
                .flatten(1, 2)[:, :kv_len]
                .float()
                .repeat_interleave(group, 0)
                for cache in (self.k_cache, self.v_cache)
            )
            start = int(self.q_start[i])
            query = self.q[start : start + q_len].float().transpose(0, 1)
            scores = query @ keys.transpose(1, 2) * self.scale
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            key = torch.arange(kv_len, device=scores.device)
            position = (kv_len - q_len + torch.arange(q_len, device=scores.device))[:, None]
            visible = key <= position
            if self.window is not None:
                visible &= key > position - self.window
            weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
            out.append((weights @ values).transpose(0, 1))
        return torch.cat(out)


def make_case(
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    chunks: list[tuple[int, int]],  # (q_len, kv_len)
    window: int | None = None,
    softcap: float = 0.0,
    padding: int = 2,  # work items and query rows beyond the real ones
    tiling: Tiling | None = None,  # None: the head size's first
) -> Case:
    """Random numbers, of the CPU's generator, and a random placement of blocks."""
    q_lens, kv_lens = [q for q, _ in chunks], [kv for _, kv in chunks]
    counts = [-(-kv // block_size) for kv in kv_lens]
    num_blocks = sum(counts) + 3
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        for _ in range(2)
    ]
    batch = len(chunks)
    # whatever lies behind a row's blocks is a valid block id, of a block that is not the row's
    block_table = torch.zeros(batch + 3, max(counts) + 2, dtype=torch.int32)
    rows = 1 + torch.randperm(batch + 2, dtype=torch.int32)[:batch]
    placement = 1 + torch.randperm(num_blocks - 1, dtype=torch.int32)
    used = 0
    for row, count, kv_len in zip(rows.tolist(), counts, kv_lens, strict=True):
        blocks = placement[used : used + count]
        used += count
        block_table[row, :count] = blocks
        for cache in caches:
            tokens = torch.full((num_kv_heads, count * block_size, head_dim), float("nan"))
            tokens[:, :kv_len] = torch.randn(num_kv_heads, kv_len, head_dim)
            cache[blocks.long()] = (
                tokens.unflatten(1, (count, block_size)).transpose(0, 1).to(dtype)
            )
    num_tokens = sum(q_lens) + padding
    wide = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    tiling = tiling or TILINGS[head_dim][0]
    return Case(
        q=wide[:, : num_heads * head_dim].view(num_tokens, num_heads, head_dim),
        k_cache=caches[0],
        v_cache=caches[1],
        block_table=block_table,
        rows=rows,
        work=make_work(q_lens, kv_lens, tiling, padding),
        q_start=torch.tensor(list(accumulate([0, *q_lens]))[:-1], dtype=torch.int32),
        q_lens=q_lens,
        kv_lens=kv_lens,
        scale=2 * head_dim**-0.5,  # peaked enough for the maximum to move
        window=window,
        softcap=softcap,
        tiling=tiling,
    )


def make_work(q_lens: list[int], kv_lens: list[int], tiling: Tiling, padding: int) -> Tensor:
    items = work_items(q_lens, kv_lens, tiling.queries)
    return torch.from_numpy(np.concatenate([items, np.zeros((padding, 4), np.int32)]))


def assert_close(got: Tensor, case: Case) -> None:
    """Each token of each head within 2% of its expected norm; padding rows untouched (they were NaN)."""
    num_heads = case.q.shape[1]
    want, real = case.expected(), got[: case.num_tokens].float()
    assert not real.isnan().any(), (
        f"NaN at (token, head, element) {real.isnan().nonzero()[:5].tolist()}"
    )
    # small results of many averaged values: against the typical norm, not a token's own
    error = (real - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(want.norm(dim=-1).mean() / 4)
    worst = int(error.argmax())
    assert error.max() < 0.02, (
        f"relative error {error.max():.3g} at token {worst // num_heads}, head {worst % num_heads}; "
        f"mean {error.mean():.3g}; chunks {list(zip(case.q_lens, case.kv_lens, strict=True))}"
    )
    assert got[case.num_tokens :].isnan().all(), "rows of no chunk were written"
