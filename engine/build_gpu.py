"""The GPU's part of building an engine: kernels, memory, graphs.

Memory is measured, not guessed. With weights in place, a forward pass at the full token budget is
really run on a tiny KV cache; its peak is what activations cost. What --gpu-memory-utilization leaves
after that, the weights and everything other processes hold becomes KV cache.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from engine.api.config import ConfigError, EngineConfig
from engine.api.messages import Phase
from engine.api.sampling import SamplingParams
from engine.attention.base import allocate_kv_cache
from engine.attention.paged import PagedAttention
from engine.attention.paged_f32 import PagedAttentionF32
from engine.memory import GIB, GpuMemory, estimate_graphs, memory_for
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.decoder import build_model
from engine.models.small_steps import SmallSteps
from engine.ops import jit
from engine.ops.kernel_list import kernel_specs
from engine.ops.nvrtc import KernelBuildError
from engine.ops.plan_decode import MAX_BATCH
from engine.ops.sample_cuda import MAX_VOCAB
from engine.plan import PromptSpan, RowInit, StepPlan
from engine.resolve import Resolved, decide_num_blocks
from engine.runner.chunk_graphs import ChunkGraphs, most_graph_tokens, token_sizes
from engine.runner.decode_graphs import DecodeGraphs, graph_sizes
from engine.runner.device_inputs import DeviceInputs
from engine.runner.device_sampler import DeviceSampler
from engine.runner.request_table import RequestTable
from engine.runner.runner import ModelRunner, distinct

logger = logging.getLogger(__name__)

Progress = Callable[[Phase, float, str], None]


def kernel_config(
    model: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    arch: str | None = None,
) -> jit.KernelConfig:
    """What selects the kernels of a model, for the current device or for any of `arch`."""
    layers = build_model(replace(model, max_model_len=1), dtype, torch.device("cpu"))  # no weights
    return jit.KernelConfig(
        dtype=dtype,
        kv_dtype=kv_dtype,
        head_dim=model.head_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        block_size=block_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        softcaps=tuple(sorted({spec.softcap > 0 for spec in layers.attention_specs})),
        arch=arch,
    )


def check_kernels_fit(model: ModelConfig, resolved: Resolved) -> None:
    """Raises ConfigError for shapes that no kernel takes, before anything is loaded."""
    head_dim, rows = model.head_dim, resolved.max_num_seqs
    if resolved.dtype is not torch.float32:
        if head_dim % 16 or head_dim > 256:
            raise ConfigError(
                f"{model.path}: head_dim is {head_dim}; a GPU's attention kernels take multiples of 16 "
                "up to 256. Use --device cpu, or --dtype float32, which is slow but takes any"
            )
        if rows > MAX_BATCH:
            raise ConfigError(
                f"--max-num-seqs {rows}: a decode step on a GPU takes up to {MAX_BATCH} requests"
            )
    if model.vocab_size > MAX_VOCAB:
        raise ConfigError(
            f"{model.path}: vocab_size is {model.vocab_size}; a GPU's sampling kernels take up to "
            f"{MAX_VOCAB}. Use --device cpu"
        )


def compile_kernels(
    config: EngineConfig, model: ModelConfig, resolved: Resolved, progress: Progress
) -> None:
    """Have all kernels of this model in the cache, compiling what is missing.

    Raises ConfigError if a kernel does not take this model's shape (2), and (75) if one does not
    compile, or must not be compiled and is not there.
    """
    check_kernels_fit(model, resolved)
    if resolved.dtype is torch.float32:
        torch.set_float32_matmul_precision("highest")  # TF32 has 10 bits
        logger.warning(
            "--dtype float32 on a GPU is for comparing numbers: attention and matrix products run "
            "without tensor cores, many times slower. Use bfloat16 to serve"
        )
    needed = kernel_specs(
        kernel_config(model, resolved.dtype, resolved.kv_dtype, resolved.block_size)
    )
    started = time.monotonic()
    jit.settings.require_cached = config.require_cached
    try:
        built = jit.prebuild(
            needed,
            progress=lambda done, total, what: progress(
                Phase.LOADING, done / max(1, total), f"compiling kernels: {what}"
            ),
        )
    except KernelBuildError as error:
        raise ConfigError(str(error), exit_code=75) from error
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
    smaller = "lower --max-num-batched-tokens or --max-num-seqs, or free the GPU"
    with memory_for("measuring a full step", smaller, device):
        activations, tables = measure_activations(model_config, model, resolved)
    memory = GpuMemory(
        total,
        total - free_before,
        weights,
        activations,
        graphs=graph_reserve(config, model_config, resolved, weights),
        sampling_tables=tables,
    )
    decide_num_blocks(resolved, config, model_config, gpu_bytes=memory.for_cache(config))
    memory.kv_cache = resolved.num_blocks * resolved.block_bytes

    less_cache = "lower --gpu-memory-utilization or --num-blocks, or free the GPU"
    with memory_for("setting up the KV cache", less_cache, device):
        runner = make_runner(model_config, model, resolved, resolved.num_blocks)
        runner.token_sizes = chunk_sizes(resolved, weights)  # without graphs, too: the same numbers
        warm_up(runner, resolved)
    if not config.enforce_eager:
        no_graphs = (
            "lower --gpu-memory-utilization, --max-num-seqs or --max-num-batched-tokens, or pass "
            "--enforce-eager"
        )
        with memory_for("capturing CUDA graphs", no_graphs, device):
            taken = capture_graphs(runner, resolved, progress)
        logger.info(
            "CUDA graphs of decode steps of up to %d requests, and of steps with prompts of up to %d "
            "tokens, took %.2f GiB of the %.2f kept for them",
            *(resolved.max_num_seqs, runner.token_sizes[-1], taken / GIB, memory.graphs / GIB),
        )
        memory.graphs = taken
    return runner, memory


def chunk_sizes(resolved: Resolved, weights: int) -> list[int]:
    """Numbers of tokens that steps with prompt chunks are padded to. `weights`: their bytes."""
    num_weights = weights // resolved.dtype.itemsize
    return token_sizes(most_graph_tokens(resolved.max_num_batched_tokens, num_weights))


def graph_reserve(
    config: EngineConfig, model_config: ModelConfig, resolved: Resolved, weights: int
) -> int:
    """Bytes to keep for CUDA graphs when the KV cache is sized. `weights`: their bytes."""
    if config.enforce_eager:
        return 0
    rows, sizes = resolved.max_num_seqs, chunk_sizes(resolved, weights)
    return estimate_graphs(
        model_config,
        resolved.dtype,
        max_seqs=rows,
        graph_tokens=sizes[-1],
        num_graphs=len(graph_sizes(rows)) + len(sizes),
    )


def capture_graphs(runner: ModelRunner, resolved: Resolved, progress: Progress) -> int:
    """Give the runner its graphs; returns the bytes that they took."""
    torch.cuda.empty_cache()  # capturing does, and what it gives back is not the graphs'
    before = torch.cuda.mem_get_info(resolved.device)[0]
    attention = runner.attention
    sampler = runner.sampler
    assert isinstance(attention, PagedAttention | PagedAttentionF32)
    assert isinstance(sampler, DeviceSampler)
    assert runner.device_inputs is not None
    graphs = DecodeGraphs(
        runner.model,
        attention,
        sampler,
        runner.table,
        resolved.max_num_seqs,
        resolved.device,
        runner.small_steps,
    )
    graphs.capture(lambda fraction, what: progress(Phase.CAPTURING, fraction / 2, what))
    runner.decode_graphs = graphs
    chunk_graphs = ChunkGraphs(
        runner.model,
        attention,
        runner.device_inputs,
        runner.table,
        runner.token_sizes,
        resolved.dtype,
    )
    chunk_graphs.capture(lambda fraction, what: progress(Phase.CAPTURING, (1 + fraction) / 2, what))
    runner.chunk_graphs = chunk_graphs
    return before - torch.cuda.mem_get_info(resolved.device)[0]


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
    attention: PagedAttention | PagedAttentionF32
    if resolved.dtype is torch.float32:
        attention = PagedAttentionF32(kv, model.attention_specs[0].num_heads, device)
    else:
        attention = PagedAttention(
            kv, distinct(model.attention_specs), max_rows, resolved.max_model_len, device
        )
    runner = ModelRunner(
        model,
        attention,
        DeviceSampler(max_rows + 1, model_config.vocab_size, model_config.eos_token_ids, device),
        RequestTable(max_rows + 1, max_blocks, device),
        DeviceInputs(resolved.max_num_batched_tokens, max_rows, device),
    )
    runner.small_steps = SmallSteps.make(model, kv, device, graph_sizes(max_rows))
    return runner


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


def measure_activations(
    model_config: ModelConfig, model: Model, resolved: Resolved
) -> tuple[int, int]:
    """Peak bytes beyond the weights of a step with the full token budget, and what the sampler's tables
    may take besides. All rows sample, and a prompt is scored, which takes all tokens through the last layer."""
    torch.cuda.reset_peak_memory_stats(resolved.device)
    before = torch.cuda.memory_allocated(resolved.device)
    runner = make_runner(model_config, model, resolved, num_blocks=2)
    budget, rows = resolved.max_num_batched_tokens, resolved.max_num_seqs
    share = min(resolved.max_model_len - 1, max(1, budget // rows))
    lengths = [share] * min(rows, budget // share)
    plan = prompt_plan(lengths)
    scored = plan.prompt_tokens[: runner.sampler.score_rows]
    plan.prompt_spans = [PromptSpan(first_token=0, token_ids=scored, num_top=0)]
    runner.launch(plan).wait()
    runner.launch(decode_plan(len(lengths), share)).wait()
    torch.cuda.synchronize(resolved.device)
    peak = torch.cuda.max_memory_allocated(resolved.device)
    assert isinstance(runner.sampler, DeviceSampler)
    tables = runner.sampler.most_table_bytes
    del runner
    torch.cuda.empty_cache()
    return peak - before, tables


def warm_up(runner: ModelRunner, resolved: Resolved) -> None:
    """Load every kernel and library handle before graphs are captured and requests arrive."""
    assert isinstance(runner.sampler, DeviceSampler)
    runner.sampler.warm_up()
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
