"""Log-probabilities at the sampled tokens: value, rank, and the k best."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.ops.sample_cpu import best_tokens
from engine.plan import RowLogprobs


@dataclass(slots=True)
class LogprobTensors:
    """Device tensors of n rows, until the host asks for them."""

    sampled: Tensor  # float32 [n]
    rank: Tensor  # int64 [n]
    top_ids: Tensor  # int64 [n, k], best first
    top_logprobs: Tensor  # float32 [n, k]

    def apply(self, function: Callable[[Tensor], Tensor]) -> "LogprobTensors":
        """The same with `function` applied to each tensor."""
        return LogprobTensors(
            function(self.sampled),
            function(self.rank),
            function(self.top_ids),
            function(self.top_logprobs),
        )

    def select(self, index: Tensor) -> "LogprobTensors":
        """The rows `index` (int64, on the same device)."""
        return self.apply(lambda tensor: tensor[index])

    def rows(self, num_top: list[int]) -> list[RowLogprobs]:
        """Entries for the host, row i with its num_top[i] best tokens."""
        sampled, rank = self.sampled.tolist(), self.rank.tolist()
        top_ids = self.top_ids.cpu().numpy().astype(np.int32)
        top_logprobs = self.top_logprobs.cpu().numpy()
        return [
            RowLogprobs(sampled[i], rank[i], top_ids[i, :k].copy(), top_logprobs[i, :k].copy())
            for i, k in enumerate(num_top)
        ]


def gather_logprobs(logprobs: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    """Look up `token_ids` [n] in `logprobs` (float32 [n, V]) and find the k best of each row.

    The rank of a token is 1 + the number of tokens with a strictly larger log-probability. Among
    equals in the k best, the lowest id comes first.
    """
    sampled = logprobs.gather(1, token_ids.unsqueeze(1))
    rank = torch.count_nonzero(logprobs > sampled, dim=1) + 1
    top_ids = top_k_lowest_id(logprobs, k)
    return LogprobTensors(sampled.squeeze(1), rank, top_ids, logprobs.gather(1, top_ids))


def top_k_lowest_id(values: Tensor, k: int) -> Tensor:
    """int64 [n, min(k, V)]: ids of the k largest of `values` [n, V], ordered by (value desc, id asc).

    `values` are on the CPU and must not hold NaN.
    """
    k = min(k, values.shape[1])
    if k == 0:
        return reference_top_k(values, k)
    return torch.from_numpy(np.stack([best_tokens(row, k) for row in values.numpy()]))


def reference_top_k(values: Tensor, k: int) -> Tensor:
    """The definition of `top_k_lowest_id`, on any device.

    torch.topk picks arbitrarily among equals, so it gets keys without equals: the float's bits made
    monotone as an integer, then the id counted from the end.
    """
    vocab_size = values.shape[1]
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    from_end = torch.arange(vocab_size - 1, -1, -1, device=values.device)
    keys = ((ordered << 32) | from_end).topk(k, dim=1).values
    return vocab_size - 1 - (keys & 0xFFFFFFFF)
