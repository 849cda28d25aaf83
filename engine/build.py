"""Build an engine in a visible order: model description, decisions, weights, KV cache, loop.

Both faces use it: the engine process (engine/main.py) and offline use (engine/offline.py).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engine.api.config import EngineConfig
from engine.api.messages import EngineLimits, Phase, StepOutput
from engine.api.sampling import SamplingParams
from engine.attention.base import allocate_kv_cache
from engine.attention.reference import ReferenceAttention
from engine.kv.manager import KVCacheManager
from engine.loop import StepLoop
from engine.memory import GIB, GpuMemory, memory_for
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.plan import RowInit, StepPlan
from engine.resolve import Resolved, cache_rows, decide_num_blocks, resolve
from engine.runner.request_table import RequestTable
from engine.runner.runner import ModelRunner
from engine.runner.sampler import Sampler
from engine.scheduler.config import SchedulerConfig
from engine.scheduler.scheduler import Scheduler
from engine.swap_space import (
    add_host_blocks,
    check_swap_space,
    decide_host_blocks,
    make_host_tier,
    swap_space_line,
)
from engine.weights.loader import cpu_weight_bytes, load_model

logger = logging.getLogger(__name__)

Progress = Callable[[Phase, float, str], None]


@dataclass
class Engine:
    """The parts that live as long as the engine, and the account of how they were made."""

    config: EngineConfig
    model_config: ModelConfig
    resolved: Resolved
    loop: StepLoop
    limits: EngineLimits
    seconds: dict[str, float]  # by phase
    weights_bytes: int
    gpu_memory: GpuMemory | None


def no_progress(phase: Phase, fraction: float, detail: str) -> None:
    pass


def build_engine(
    config: EngineConfig,
    send: Callable[[StepOutput], None],
    epoch: int = 0,
    progress: Progress = no_progress,
) -> Engine:
    """Load, size and warm up. Raises ConfigError where settings, files or memory do not suffice."""
    seconds: dict[str, float] = {}
    started = time.monotonic()
    model_config = ModelConfig.from_directory(config.model)
    resolved = resolve(config, model_config)
    check_swap_space(config)
    gpu_free = 0
    if resolved.is_gpu:
        from engine.build_gpu import build_gpu_runner, compile_kernels  # needs CUDA libraries

        gpu_free = torch.cuda.mem_get_info(resolved.device)[0]
        compile_kernels(config, model_config, resolved, progress)
        seconds["kernels"] = time.monotonic() - started
        started = time.monotonic()
    else:
        torch.set_num_threads(resolved.threads)
    with memory_for("loading weights", "free some, or serve a smaller model", resolved.device):
        model = load_model(
            config.model,
            # dynamic rope depends on the length
            replace(model_config, max_model_len=resolved.max_model_len),
            resolved.dtype,
            resolved.device,
            dummy=config.load_format == "dummy",
            seed=config.seed,
            progress=lambda fraction, detail: progress(Phase.LOADING, fraction, detail),
        )
    seconds["load"] = time.monotonic() - started

    started = time.monotonic()
    gpu_memory: GpuMemory | None = None
    if resolved.is_gpu:
        runner, gpu_memory = build_gpu_runner(
            config, model_config, model, resolved, gpu_free, progress
        )
        weights_bytes = gpu_memory.weights
    else:
        weights_bytes = cpu_weight_bytes(model_config, resolved.dtype)
        progress(Phase.SIZING, 0.0, "sizing the KV cache")
        decide_num_blocks(resolved, config, model_config)
        runner = build_cpu_runner(model_config, model, resolved)
        progress(Phase.SIZING, 0.5, "warming up")
        warm_up(runner, resolved)
    decide_host_blocks(resolved, config)
    if resolved.num_host_blocks:
        progress(Phase.SIZING, 0.9, f"taking {config.swap_space:g} GiB of host memory")
        add_host_blocks(runner, resolved, config)
    seconds["warm-up"] = time.monotonic() - started
    kv = KVCacheManager(
        resolved.num_blocks,
        resolved.block_size,
        config.enable_prefix_caching,
        make_host_tier(resolved, config),
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=resolved.max_num_seqs,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            enable_chunked_prefill=config.enable_chunked_prefill,
            admission=config.admission,
            eos_token_ids=tuple(model_config.eos_token_ids),
            check_invariants=config.check_invariants,
            num_rows=resolved.max_num_seqs + 1,
        ),
        kv,
    )

    limits = EngineLimits(
        block_size=resolved.block_size,
        num_blocks=resolved.num_blocks - 1,
        max_model_len=resolved.max_model_len,
        max_num_seqs=resolved.max_num_seqs,
        vocab_size=model_config.vocab_size,
        enable_prefix_caching=config.enable_prefix_caching,
        eos_token_ids=list(model_config.eos_token_ids),
        dtype=str(resolved.dtype).removeprefix("torch."),
        device=str(resolved.device),
        max_num_batched_tokens=resolved.max_num_batched_tokens,
    )
    loop = StepLoop(scheduler, runner, send, resolved.overlap, epoch)
    engine = Engine(
        config, model_config, resolved, loop, limits, seconds, weights_bytes, gpu_memory
    )
    for line in account(engine):
        logger.info(line)
    return engine


def build_cpu_runner(model_config: ModelConfig, model: Model, resolved: Resolved) -> ModelRunner:
    kv_cache = allocate_kv_cache(
        model_config.num_layers,
        resolved.num_blocks,
        model_config.num_kv_heads,
        resolved.block_size,
        model_config.head_dim,
        resolved.kv_dtype,
        resolved.device,
        model.kv_scales,
    )
    max_blocks = -(-resolved.max_model_len // resolved.block_size) + 1
    num_rows = resolved.max_num_seqs + 1
    return ModelRunner(
        model,
        ReferenceAttention(kv_cache, resolved.dtype),
        Sampler(num_rows, model_config.vocab_size, model_config.eos_token_ids, resolved.device),
        RequestTable(num_rows, max_blocks, resolved.device),
    )


def warm_up(runner: ModelRunner, resolved: Resolved) -> None:
    """Run one prefill and one decode on row 1 and block 1, so that no request pays for first use.

    Nothing stays behind: the row is freed, and the blocks belong to nobody yet.
    """
    length = min(16, resolved.block_size, resolved.max_model_len - 1)  # and one for the decode
    tokens = np.zeros(length, np.int32)
    row = np.array([1], np.int32)
    init = RowInit(
        row=1,
        params=SamplingParams(temperature=1.0, seed=0),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_computed=0,
        block_ids=[1, 2] if resolved.num_blocks > 2 else [1, 1],
    )
    prefill = StepPlan(
        step_id=-2,
        num_decodes=0,
        rows=row,
        num_tokens=np.array([len(tokens)], np.int32),
        num_computed=np.array([0], np.int32),
        samples=np.array([True]),
        prompt_tokens=tokens,
        new_rows=[init],
        req_ids=[-1],
    )
    runner.launch(prefill).wait()
    decode = StepPlan(
        step_id=-1,
        num_decodes=1,
        rows=row,
        num_tokens=np.array([1], np.int32),
        num_computed=np.array([len(tokens)], np.int32),
        samples=np.array([True]),
        prompt_tokens=np.zeros(0, np.int32),
        req_ids=[-1],
    )
    runner.launch(decode).wait()
    runner.sampler.free(1)


def account(engine: Engine) -> list[str]:
    """The start-up table: what was decided and why, and what the memory buys."""
    r = engine.resolved
    rows = [
        ("model", f"{engine.model_config.architecture}, {engine.model_config.num_layers} layers"),
        ("device", device_line(r)),
        ("dtype", f"{engine.limits.dtype} ({r.reasons['dtype']})"),
        ("weights", f"{engine.weights_bytes / GIB:.2f} GiB in {engine.seconds['load']:.1f} s"),
        *cache_rows(r),
        ("swap space", swap_space_line(r)),
        ("attention", engine.loop.runner.attention.kernels),
        ("prefix caching", "on" if engine.config.enable_prefix_caching else "off"),
        ("overlap", f"{'on' if r.overlap else 'off'} ({r.reasons['overlap']})"),
    ]
    if engine.gpu_memory is not None:
        rows += [("gpu memory", line) for line in engine.gpu_memory.lines()]
    return [f"{name:>15}  {value}" for name, value in rows]


def device_line(r: Resolved) -> str:
    if r.is_gpu:
        properties = torch.cuda.get_device_properties(r.device)
        return f"{properties.name}, {r.device}, uuid {properties.uuid} ({r.reasons['device']})"
    return f"{r.device}, {r.threads} threads ({r.reasons['threads']})"
