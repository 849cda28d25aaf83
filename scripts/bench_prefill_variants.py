#!/usr/bin/env python3
"""Time the candidates for Hopper's prefill kernel side by side, and check each against float32.

    python scripts/bench_prefill_variants.py [--head-dim 64|128]

One line per candidate: TFLOP/s at each shape, and the largest error of a token's result, relative to its
norm, over all shapes (bfloat16 itself: about 0.004). A candidate is checked first, in a build whose waits
trap instead of hanging the device.
"""

import argparse
import dataclasses
import sys
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from engine.ops import jit  # noqa: E402
from engine.ops import paged_prefill_sm90 as op  # noqa: E402
from engine.ops.paged_prefill import work_items  # noqa: E402
from scripts.bench_cases import measure  # noqa: E402

Tiling = op.Tiling
OLD = "paged_prefill_sm90.cu"

CANDIDATES = {
    64: {
        "as it was": Tiling(2, 128, 4, source=OLD),
        "2 groups": Tiling(2, 128, 4),
        "2 groups, 1/4 polynomial": Tiling(2, 128, 4, polynomial=4),
        "2 groups, 192 keys": Tiling(2, 192, 3),
        "3 groups": Tiling(3, 128, 4),
        "3 groups, 2 of queries": Tiling(3, 128, 4, q_stages=2),
        "3 groups, 1/8 polynomial": Tiling(3, 128, 4, polynomial=8),
        "3 groups, no turns": Tiling(3, 128, 4, turns=False),
    },
    128: {
        "as it was": Tiling(2, 128, 2, source=OLD),
        "2 groups": Tiling(2, 128, 2),
        "2 groups, 2 of queries": Tiling(2, 128, 2, q_stages=2),
        "2 groups, 1/4 polynomial": Tiling(2, 128, 2, polynomial=4),
        "2 groups, 3 stages": Tiling(2, 128, 3),
        "2 groups, no turns": Tiling(2, 128, 2, turns=False),
    },
}
HEADS = {64: (14, 2), 128: (28, 4)}  # of queries, of keys and values
SHAPES = {  # name: (sequences, q_len, kv_len)
    "16 x 512": (16, 512, 512),
    "2k": (1, 2048, 2048),
    "8k": (1, 8192, 8192),
    "16k": (1, 16384, 16384),
    "2k of 32k": (1, 2048, 32768),
}
BLOCK_SIZE = 64
CHECKED = 48  # queries of each head


class Problem:
    """A batch with scattered blocks; the rest of the cache is NaN."""

    def __init__(self, head_dim: int, sequences: int, q_len: int, kv_len: int) -> None:
        self.shape = sequences, q_len, kv_len
        num_heads, num_kv_heads = HEADS[head_dim]
        per_sequence = -(-kv_len // BLOCK_SIZE)
        num_blocks = 1 + sequences * per_sequence
        shape = (num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)
        self.keys, self.values = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        self.keys[0] = self.values[0] = float("nan")
        placement = 1 + torch.randperm(num_blocks - 1, device="cuda", dtype=torch.int32)
        self.table = placement.view(sequences, per_sequence)
        self.rows = torch.arange(sequences, device="cuda", dtype=torch.int32)
        starts = [*accumulate([0] + [q_len] * sequences)][:-1]
        self.q_start = torch.tensor(starts, device="cuda", dtype=torch.int32)
        tokens = sequences * q_len
        self.q = torch.randn(tokens, num_heads, head_dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, float("nan"))
        self.flops = 4.0 * sequences * q_len * (kv_len - q_len / 2) * num_heads * head_dim
        self.picked, self.want = self.expected()

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Some tokens, the last and those around edges among them; their results in float32."""
        sequences, q_len, kv_len = self.shape
        edges = torch.tensor([0, 1, 63, 64, 127, 128, 191, 192, q_len - 1], device="cuda")
        drawn = torch.randint(q_len, (CHECKED - len(edges),), device="cuda")
        offsets = torch.cat([edges, drawn])
        sequence = sequences - 1
        picked = sequence * q_len + offsets
        keys, values = (
            cache[self.table[sequence].long()].transpose(0, 1).flatten(1, 2).float()
            for cache in (self.keys, self.values)
        )  # [num_kv_heads, kv_len, head_dim]
        group = self.q.shape[1] // len(keys)
        query = self.q[picked].float().transpose(0, 1)  # [num_heads, CHECKED, head_dim]
        scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        last = (kv_len - q_len + offsets)[:, None]
        hidden = torch.arange(kv_len, device="cuda") > last
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return picked, (weights @ values.repeat_interleave(group, 0)).transpose(0, 1)

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def launch(self) -> None:
        op.paged_prefill_sm90(
            self.q,
            self.keys,
            self.values,
            self.table,
            self.rows,
            self.work,
            self.q_start,
            self.scale,
            self.out,
        )

    def prepare(self) -> None:
        """The work list of the current tiling."""
        sequences, q_len, kv_len = self.shape
        items = op.queries_per_item(self.q.shape[2])
        work = work_items([q_len] * sequences, [kv_len] * sequences, items)
        self.work = torch.from_numpy(work).cuda()

    def error(self) -> float:
        self.out.fill_(float("nan"))
        self.launch()
        torch.cuda.synchronize()
        difference = (self.out[self.picked].float() - self.want).norm(dim=-1)
        if self.out.isnan().any():
            return float("nan")
        return float((difference / self.want.norm(dim=-1)).max())


def use(head_dim: int, tiling: Tiling, trap: bool) -> None:
    """Let the operator's launcher take this candidate."""
    if trap:
        tiling = dataclasses.replace(tiling, trap=True)
    op.TILINGS[head_dim] = tiling
    op.load.cache_clear()


def specs(head_dim: int) -> list[jit.VariantSpec]:
    result = []
    for tiling in CANDIDATES[head_dim].values():
        for trap in (True, False):
            use(head_dim, tiling, trap)
            result.append(op.variant(head_dim, torch.bfloat16, BLOCK_SIZE, False))
    return result


def bench(head_dim: int) -> None:
    jit.prebuild(specs(head_dim))
    torch.manual_seed(0)
    problems = {name: Problem(head_dim, *shape) for name, shape in SHAPES.items()}
    print(f"\nhead size {head_dim}, {HEADS[head_dim]} heads: TFLOP/s")
    print(f"{'':26}" + "".join(f"{name:>11}" for name in SHAPES) + f"{'max error':>12}", flush=True)
    for name, tiling in CANDIDATES[head_dim].items():
        use(head_dim, tiling, trap=True)
        for problem in problems.values():
            problem.prepare()
        error = max(problem.error() for problem in problems.values())
        use(head_dim, tiling, trap=False)
        rates = []
        for problem in problems.values():
            seconds = measure.time_launches([problem.launch], 4)
            rates.append(problem.flops / seconds / 1e12)
        print(f"{name:26}" + "".join(f"{r:11.1f}" for r in rates) + f"{error:12.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, choices=sorted(CANDIDATES))
    options = parser.parse_args()
    for head_dim in [options.head_dim] if options.head_dim else sorted(CANDIDATES):
        bench(head_dim)


if __name__ == "__main__":
    main()
