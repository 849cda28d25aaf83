"""What a model knows of attention: the inputs of a step, and a backend to hand its heads to."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.ops.rope_and_cache import rope_and_cache

KVScales = tuple[float, float]  # of a layer's keys and values
SCRUBBED_BLOCKS = 128  # at a time


@dataclass(slots=True)
class StepInputs:
    """Device tensors of one forward pass over T tokens of B rows (decode rows first).

    T may exceed the plan's token count: padding tokens belong to no row, have position 0 and write
    to slot 0, in the reserved block.
    """

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T] block id * block_size + offset, where each token's KV goes
    logits_indices: Tensor  # int64 [S] tokens whose logits are wanted
    block_table: Tensor  # int32 [B, max_blocks]
    # host copies, for the CPU reference and for planning:
    rows: npt.NDArray[np.int32]  # [B] rows of the request table
    num_decodes: int  # the first num_decodes rows have one token each
    query_start: list[int]  # [B + 1] first token of each row, then the end
    seq_lens: list[int]  # [B] tokens with KV once this step has run
    block_ids: npt.NDArray[np.int32]  # [B, max_blocks] as block_table; empty on a GPU
    # for kernels. With rows_device, block_table is the whole table [num_rows, max_blocks], and row i of
    # the batch is its row rows_device[i]:
    rows_device: Tensor | None = None  # int32 [B]
    seq_lens_device: Tensor | None = None  # int32 [B], as seq_lens


@dataclass(frozen=True)
class AttentionSpec:
    """What is special about one layer's attention."""

    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a token sees itself and window - 1 tokens before it
    softcap: float = 0.0  # 0: none; else logits = softcap * tanh(logits / softcap)
    qk_norm_eps: float = 1e-6  # of the norms of q and k, in models that have them


@dataclass(slots=True)
class KVCache:
    """Paged keys and values. `k[layer]`, `v[layer]`: [num_blocks, num_kv_heads, block_size, head_dim].

    The index order is fixed, the strides are not: a GPU keeps a block contiguous, a CPU keeps a head
    contiguous over all blocks, so that consecutive blocks of one head are one plain matrix.
    """

    k: list[Tensor]
    v: list[Tensor]
    block_size: int
    # by layer, what its cached (keys, values) are to be multiplied by; empty: 1 for all. 8-bit caches only
    scales: list[KVScales] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return self.k[0].shape[0]

    def scales_of(self, layer: int) -> KVScales:
        return self.scales[layer] if self.scales else (1.0, 1.0)

    def scrub(self) -> None:
        """Replace NaN and infinity by zeros, in place and with little memory beside the cache."""
        for tensor in (*self.k, *self.v):
            if tensor.dtype.itemsize > 1:
                torch.nan_to_num_(tensor, nan=0.0, posinf=0.0, neginf=0.0)
                continue
            # torch has no such operation for 8-bit floats: the largest codes are what is not finite
            limit = torch.tensor(torch.finfo(tensor.dtype).max).to(tensor.dtype).view(torch.uint8)
            for blocks in tensor.view(torch.uint8).split(SCRUBBED_BLOCKS):
                blocks.masked_fill_((blocks & 0x7F) > int(limit), 0)


def allocate_kv_cache(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: list[KVScales] | None = None,
) -> KVCache:
    """Zeroed cache of `num_blocks` blocks, the reserved block 0 included.

    `scales` are kept for a `dtype` of 8 bits, and ignored for others, which hold numbers as they are.
    """

    def one() -> Tensor:
        if device.type == "cpu":
            # numpy's zeros are pages that the kernel hands out on first write: gigabytes in no time
            num_bytes = num_kv_heads * num_blocks * block_size * head_dim * dtype.itemsize
            flat = torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype)
            return flat.view(num_kv_heads, num_blocks, block_size, head_dim).transpose(0, 1)
        shape = (num_blocks, num_kv_heads, block_size, head_dim)
        if dtype.itemsize == 1:  # zeros of all 8-bit types are zero bytes
            return torch.zeros(shape, dtype=torch.uint8, device=device).view(dtype)
        return torch.zeros(shape, dtype=dtype, device=device)

    return KVCache(
        k=[one() for _ in range(num_layers)],
        v=[one() for _ in range(num_layers)],
        block_size=block_size,
        scales=(scales or []) if dtype.itemsize == 1 else [],
    )


@dataclass(slots=True)
class NewTokens:
    """What a step's tokens bring to a layer's attention."""

    qkv: Tensor  # [T, (num_heads + 2 * num_kv_heads) * head_dim] as projected; used up
    rotation: tuple[Tensor, Tensor]  # cos and sin of the tokens' angles
    qk_norm: Tensor | None  # [num_heads + num_kv_heads, head_dim] weights of the norms of q and k


def rotate_and_store(
    kv: KVCache, layer: int, new: NewTokens, spec: AttentionSpec, inputs: StepInputs
) -> Tensor:
    """Put the tokens' keys and values into the cache. Returns their queries, [T, num_heads, head_dim]."""
    return rope_and_cache(
        new.qkv,
        *new.rotation,
        inputs.slot_mapping,
        kv.k[layer],
        kv.v[layer],
        spec.num_heads,
        new.qk_norm,
        spec.qk_norm_eps,
        *kv.scales_of(layer),
    )


class AttentionBackend(Protocol):
    """Paged attention over a KV cache. One object serves all layers of a model."""

    kv: KVCache
    kernels: str  # what computes, and why; for people

    def plan(self, inputs: StepInputs, specs: list[AttentionSpec]) -> None:
        """Host-side preparation, once per step (`specs`: the distinct ones of the model)."""

    def attend(self, layer: int, q: Tensor, spec: AttentionSpec, inputs: StepInputs) -> Tensor:
        """Attend `q` [T, num_heads, head_dim] over the cache, in which the step's own keys and values
        are already written. Returns [T, num_heads * head_dim]; rows of padding tokens are arbitrary
        but finite."""

    def attend_new(
        self, layer: int, new: NewTokens, spec: AttentionSpec, inputs: StepInputs
    ) -> Tensor:
        """Rotate, store and attend: what a layer does with its step. Returns as `attend` does."""
        return self.attend(layer, rotate_and_store(self.kv, layer, new, spec, inputs), spec, inputs)


class GraphAttention(AttentionBackend, Protocol):
    """A backend whose steps can be captured in CUDA graphs."""

    def plan_on_device(self, seq_lens: Tensor, rows: Tensor, batch: int) -> None:
        """Plan a decode step from int32 device tensors [batch or more]: tokens and block table row of
        each row of the batch. What the tensors hold at a replay counts. Rows of padding may have any
        blocks that exist."""

    def allocate_chunks(self, max_tokens: int, dtype: torch.dtype) -> None:
        """Memory of captured steps with prompt chunks, of `max_tokens` of `dtype` at most; once, before
        the first. Until `plan_chunks` there are no rows."""

    def capture_chunks(self, num_tokens: int) -> None:
        """Until the next plan, `attend` does what a captured step of `num_tokens` tokens, padding included,
        has to do, whatever its rows and chunks will be. Its results, [num_tokens, num_heads * head_dim], are
        at the same place for all layers and all steps."""

    def plan_chunks(self, inputs: StepInputs) -> None:
        """Plan the replay of a captured step of as many tokens as `inputs` has: in place of `plan`."""
