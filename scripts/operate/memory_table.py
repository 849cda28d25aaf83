"""What a start would do with the memory, predicted without loading anything.

The decisions and the arithmetic are the engine's own (engine/resolve.py, engine/memory.py). Two numbers that
a start on a GPU measures are computed here: weights, exact but for the allocator's rounding, and the
activations of a full step, an estimate.
"""

import dataclasses

import torch

from engine.api.config import EngineConfig
from engine.build_gpu import check_kernels_fit, graph_reserve
from engine.memory import (
    GIB,
    GpuMemory,
    available_memory_bytes,
    estimate_activations,
)
from engine.models.config import ModelConfig
from engine.resolve import Resolved, cache_rows, decide_num_blocks, resolve
from engine.runner.device_sampler import DeviceSampler
from engine.weights.loader import cpu_weight_bytes, weight_bytes

HOPPER_BLOCK_SIZE = 64  # what auto is there; elsewhere 16, which changes the table by a block
CONTEXT_BYTES = GIB // 2  # of the driver, for the one process of an otherwise free GPU
META = torch.device("meta")
Rows = list[tuple[str, str]]


def predict_gpu(
    config: EngineConfig, model: ModelConfig, total: int, others: int = CONTEXT_BYTES
) -> Rows:
    """The table of a GPU with `total` bytes. Raises ConfigError as the start would."""
    sized = dataclasses.replace(config, block_size=config.block_size or HOPPER_BLOCK_SIZE)
    r = resolve(sized, model, elsewhere=torch.device("cuda", 0), elsewhere_bytes=total)
    check_kernels_fit(model, r)
    weights = weight_bytes(model, r.dtype)
    memory = GpuMemory(
        total,
        others,
        weights,
        estimate_activations(model, r.dtype, r.max_num_batched_tokens, r.max_num_seqs),
        sampling_tables=sampling_table_bytes(model, r),
        graphs=graph_reserve(config, model, r, weights),
        is_predicted=True,
    )
    free = total - others - weights
    decide_num_blocks(r, sized, model, gpu_bytes=memory.for_cache(sized), free=free)
    memory.kv_cache = r.num_blocks * r.block_bytes
    return [*decisions(r), *(("gpu memory", line) for line in memory.lines())]


def sampling_table_bytes(model: ModelConfig, r: Resolved) -> int:
    sampler = DeviceSampler(r.max_num_seqs + 1, model.vocab_size, model.eos_token_ids, META)
    return sampler.most_table_bytes


def predict_cpu(config: EngineConfig, model: ModelConfig) -> Rows:
    """The table of this machine's CPU. Raises ConfigError as the start would."""
    r = resolve(dataclasses.replace(config, device="cpu"), model)
    weights = cpu_weight_bytes(model, r.dtype)
    decide_num_blocks(r, config, model, to_load=weights)
    return [
        *decisions(r),
        ("weights", f"{weights / GIB:.2f} GiB of {available_memory_bytes() / GIB:.2f} free"),
    ]


def decisions(r: Resolved) -> Rows:
    dtype = str(r.dtype).removeprefix("torch.")
    return [("dtype", f"{dtype} ({r.reasons['dtype']})"), *cache_rows(r)]
