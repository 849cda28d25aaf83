"""The GPU's part of building an engine: kernels, memory, graphs.

Memory is measured, not guessed. With weights in place, a forward pass at the full token budget is
really run on a tiny KV cache; its peak is what activations cost. What --gpu-memory-utilization leaves
after that, the weights and everything other processes hold becomes KV cache.
"""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from engine.api.config import ConfigError, EngineConfig
from engine.api.messages import Phase
from engine.api.sampling import SamplingParams
from engine.attention.base import allocate_kv_cache
from engine.attention.paged import PagedAttention
from engine.memory import GIB, GpuMemory
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.ops import jit
from engine.ops.kernel_list import kernel_specs
from engine.plan import RowInit, StepPlan
from engine.resolve import Resolved, decide_num_blocks
from engine.runner.device_inputs import DeviceInputs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.graphs import DecodeGraphs
from engine.runner.request_table import RequestTable
from engine.runner.runner import ModelRunner, distinct

logger = logging.getLogger(__name__)

Progress = Callable[[Phase, float, str], None]

GRAPH_RESERVE_BYTES = GIB // 2  # graphs are captured after the cache is sized


def compile_kernels(model: ModelConfig, resolved: Resolved, progress: Progress) -> None:
    """Have all kernels of this model in the cache, compiling what is missing."""
    config = jit.KernelConfig(
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        block_size=resolved.block_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
    )
    started = time.monotonic()
    built = jit.prebuild(
        kernel_specs(config),
        progress=lambda done, total, what: progress(
            Phase.LOADING, done / max(1, total), f"compiling kernels: {what}"
        ),
    )
    fresh = sum(not one.cached for one in built)
    logger.info(
        "kernels: %d sources, %d compiled, in %.1f s", len(built), fresh, time.monotonic() - started
    )


def build_gpu_runner(
    config: EngineConfig,
    model_config: ModelConfig,
    model: Model,
    resolved: Resolved,
    free_before: int,
    progress: Progress,
) -> tuple[ModelRunner, GpuMemory]:
    """Runner with KV cache and graphs. `free_before`: free bytes before weights were loaded."""
    device = resolved.device
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    progress(Phase.SIZING, 0.0, "measuring a step at the full token budget")
    activations = measure_activations(model_config, model, resolved)
    memory = GpuMemory(total, total - free_before, weights, activations)
    allowed = int(total * config.gpu_memory_utilization)
    for_cache = allowed - memory.others - weights - activations
    if not config.enforce_eager:
        for_cache -= GRAPH_RESERVE_BYTES
    if for_cache <= 0:
        raise ConfigError(
            f"no memory is left for the KV cache: --gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} of {total / GIB:.1f} GiB allows "
            f"{allowed / GIB:.1f}, but others hold {memory.others / GIB:.1f}, weights "
            f"{weights / GIB:.1f} and a full step {activations / GIB:.1f}; raise it, lower "
            "--max-num-batched-tokens, or free the GPU",
            exit_code=75,
        )
    decide_num_blocks(resolved, config, model_config, gpu_bytes=for_cache)
    memory.kv_cache = resolved.num_blocks * resolved.block_bytes
    memory.reserve = total - allowed

    runner = make_runner(model_config, model, resolved, resolved.num_blocks)
    warm_up(runner, resolved)
    if not config.enforce_eager:
        before = torch.cuda.mem_get_info(device)[0]
        assert isinstance(runner.attention, PagedAttention)
        graphs = DecodeGraphs(model, runner.attention, runner.table, resolved.max_num_seqs, device)
        graphs.capture(lambda fraction, what: progress(Phase.CAPTURING, fraction, what))
        runner.graphs = graphs
        memory.graphs = before - torch.cuda.mem_get_info(device)[0]
    return runner, memory


def make_runner(
    model_config: ModelConfig, model: Model, resolved: Resolved, num_blocks: int
) -> ModelRunner:
    device, max_rows = resolved.device, resolved.max_num_seqs
    max_blocks = -(-resolved.max_model_len // resolved.block_size) + 1
    kv = allocate_kv_cache(
        model_config.num_layers,
        num_blocks,
        model_config.num_kv_heads,
        resolved.block_size,
        model_config.head_dim,
        resolved.kv_dtype,
        device,
        model.kv_scales,
    )
    attention = PagedAttention(
        kv, distinct(model.attention_specs), max_rows, resolved.max_model_len, device
    )
    return ModelRunner(
        model,
        attention,
        DeviceSampler(max_rows + 1, model_config.vocab_size, model_config.eos_token_ids, device),
        RequestTable(max_rows + 1, max_blocks, device),
        DeviceInputs(resolved.max_num_batched_tokens, max_rows, max_blocks, device),
    )


def prompt_plan(lengths: list[int], first_row: int = 1) -> StepPlan:
    """Whole prompts of the given lengths on rows whose blocks are all the reserved block 0."""
    rows = np.arange(first_row, first_row + len(lengths), dtype=np.int32)
    tokens = np.zeros(sum(lengths), np.int32)
    params = SamplingParams(temperature=1.0, seed=0)
    return StepPlan(
        step_id=-1,
        num_decodes=0,
        rows=rows,
        num_tokens=np.array(lengths, np.int32),
        num_computed=np.zeros(len(lengths), np.int32),
        samples=np.ones(len(lengths), np.bool_),
        prompt_tokens=tokens,
        new_rows=[
            RowInit(int(row), params, tokens[:length], length, 0, [])
            for row, length in zip(rows, lengths, strict=True)
        ],
        req_ids=[-1] * len(lengths),
    )


def decode_plan(rows: int, position: int) -> StepPlan:
    return StepPlan(
        step_id=-1,
        num_decodes=rows,
        rows=np.arange(1, rows + 1, dtype=np.int32),
        num_tokens=np.ones(rows, np.int32),
        num_computed=np.full(rows, position, np.int32),
        samples=np.ones(rows, np.bool_),
        prompt_tokens=np.zeros(0, np.int32),
        req_ids=[-1] * rows,
    )


def measure_activations(model_config: ModelConfig, model: Model, resolved: Resolved) -> int:
    """Peak bytes beyond the weights of a step with the full token budget, all rows sampling."""
    torch.cuda.reset_peak_memory_stats(resolved.device)
    before = torch.cuda.memory_allocated(resolved.device)
    runner = make_runner(model_config, model, resolved, num_blocks=2)
    budget, rows = resolved.max_num_batched_tokens, resolved.max_num_seqs
    share = min(resolved.max_model_len - 1, max(1, budget // rows))
    lengths = [share] * min(rows, budget // share)
    runner.launch(prompt_plan(lengths)).wait()
    runner.launch(decode_plan(len(lengths), share)).wait()
    torch.cuda.synchronize(resolved.device)
    peak = torch.cuda.max_memory_allocated(resolved.device)
    del runner
    torch.cuda.empty_cache()
    return peak - before


def warm_up(runner: ModelRunner, resolved: Resolved) -> None:
    """Load every kernel and library handle before graphs are captured and requests arrive."""
    assert isinstance(runner.sampler, DeviceSampler)
    runner.sampler.warm_up(resolved.dtype)
    longest = resolved.max_model_len
    length = max(1, min(64, longest - 2, resolved.max_num_batched_tokens))
    runner.launch(prompt_plan([length])).wait()
    runner.launch(decode_plan(1, length)).wait()
    mixed = prompt_plan([length], first_row=2)
    mixed.rows = np.array([1, 2], np.int32)
    mixed.num_tokens = np.array([1, length], np.int32)
    mixed.num_computed = np.array([min(length + 1, longest - 1), 0], np.int32)
    mixed.samples = np.array([True, True])
    mixed.num_decodes = 1
    mixed.req_ids = [-1, -1]
    if resolved.max_num_seqs >= 2 and resolved.max_num_batched_tokens > length:
        runner.launch(mixed).wait()
    for row in (1, 2):
        if row <= resolved.max_num_seqs:
            runner.sampler.free(row)
    torch.cuda.synchronize(resolved.device)
