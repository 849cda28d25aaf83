"""Decide every `auto` and check every setting against the model and the machine.

Each decision is one small rule; the reason of each is printed at start, so that nobody has to guess
what a flag did.
"""

import math
import os
from dataclasses import dataclass, field

import torch

from engine.api.config import (
    MOST_BLOCKS,
    MOST_GIB,
    MOST_SEQS,
    MOST_THREADS,
    MOST_TOKENS,
    ConfigError,
    EngineConfig,
    parse_length,
)
from engine.memory import GIB, available_memory_bytes, kv_block_bytes, kv_memory_bytes
from engine.models.config import ModelConfig

TORCH_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
KV_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BLOCK_SIZES = (8, 16, 32, 64, 128)
LEAST_MODEL_LEN = 2  # a token of prompt, a token of completion
LEAST_BLOCKS = 2  # fewer are taken only for requests that are asked to be as short
LARGE_GPU_BYTES = 64 * GIB


@dataclass
class Resolved:
    """What the engine really does. `reasons` explains the values that the user did not set."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gpu_bytes: int = 0  # of its memory in all
    dtype: torch.dtype = torch.float32
    threads: int = 1
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 16
    num_blocks: int = 0  # the reserved block 0 included
    block_bytes: int = 0
    overlap: bool = False
    reasons: dict[str, str] = field(default_factory=dict)
    kv_dtype: torch.dtype = torch.float32
    num_host_blocks: int = 0  # engine/swap_space.py decides

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def set(self, name: str, value: object, reason: str) -> None:
        setattr(self, name, value)
        self.reasons[name] = reason


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    elsewhere: torch.device | None = None,
    elsewhere_bytes: int = 0,
) -> Resolved:
    """Everything but the number of KV blocks, which depends on memory left after loading.

    `elsewhere` decides for a device that need not be here, with `elsewhere_bytes` of memory in all if it
    is a GPU; --block-size must be given then. Raises ConfigError naming the flag, the value and what
    would work.
    """
    r = Resolved()
    if elsewhere is None:
        decide_device(r, config)
    else:
        r.set("device", elsewhere, "asked for")
        r.gpu_bytes = elsewhere_bytes
    decide_dtype(r, config, model)
    decide_kv_dtype(r, config)
    decide_threads(r, config)
    decide_max_model_len(r, config, model)
    decide_batch_limits(r, config)
    decide_block_size(r, config)
    decide_overlap(r, config)
    return r


def decide_device(r: Resolved, config: EngineConfig) -> None:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "--device cuda: torch sees no CUDA device; use --device cpu, or install a driver and a "
            "CUDA build of torch",
            exit_code=75,
        )
    if config.device == "cpu" or not has_gpu:
        reason = "flag" if config.device == "cpu" else "auto: torch sees no GPU"
        r.set("device", torch.device("cpu"), reason)
        return
    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; the "
            "kernels need 8.0 (Ampere) or newer; use --device cpu",
            exit_code=75,
        )
    r.set("device", device, "flag" if config.device == "cuda" else "auto: torch sees a GPU")
    r.gpu_bytes = torch.cuda.get_device_properties(device).total_memory


def decide_dtype(r: Resolved, config: EngineConfig, model: ModelConfig) -> None:
    if config.dtype != "auto":
        r.set("dtype", TORCH_DTYPES[config.dtype], "flag")
    elif r.is_gpu:
        stored = TORCH_DTYPES.get(model.dtype or "", torch.float32)
        r.set(
            "dtype",
            torch.bfloat16 if stored is torch.float32 else stored,
            f"auto: the checkpoint is {model.dtype or 'of unknown dtype'}",
        )
    elif has_fast_bfloat16():
        r.set("dtype", torch.bfloat16, "auto: this CPU multiplies bfloat16 natively")
    else:
        r.set("dtype", torch.float32, "auto: bfloat16 is slow on this CPU")
    if r.dtype is torch.float16 and not r.is_gpu:
        raise ConfigError("--dtype float16 is for GPUs; on a CPU use bfloat16 or float32")


def decide_kv_dtype(r: Resolved, config: EngineConfig) -> None:
    if config.kv_cache_dtype == "auto":
        r.set("kv_dtype", r.dtype, "auto: the model's")
        return
    if r.is_gpu and r.dtype is torch.float32:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: with --dtype float32 a GPU's KV cache is float32, "
            "as that is for checking numbers; use bfloat16 or float16, or leave the flag out"
        )
    r.set("kv_dtype", KV_DTYPES[config.kv_cache_dtype], "flag")


def has_fast_bfloat16() -> bool:
    """AVX512-BF16 or AMX: without them a bfloat16 product costs 2.5 to 5 times a float32 one."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def decide_threads(r: Resolved, config: EngineConfig) -> None:
    cores = len(os.sched_getaffinity(0))
    check_range("--cpu-threads", config.cpu_threads, MOST_THREADS)
    if config.cpu_threads:
        r.set("threads", config.cpu_threads, "flag")
    else:
        r.set("threads", max(1, cores - 1), f"auto: {cores} cores, one left for the server")


def decide_max_model_len(r: Resolved, config: EngineConfig, model: ModelConfig) -> None:
    asked = parse_length(config.max_model_len)
    if model.max_model_len < LEAST_MODEL_LEN:
        raise ConfigError(
            f"{model.path}: the model was made for {model.max_model_len} token "
            f"(max_position_embeddings in config.json); generating needs {LEAST_MODEL_LEN}"
        )
    if asked is None:
        r.set("max_model_len", model.max_model_len, "auto: the model's own length")
    elif asked > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model was made for at most "
            f"{model.max_model_len} tokens (config.json); use that, or give config.json a "
            "rope scaling that allows more"
        )
    elif asked < LEAST_MODEL_LEN:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: expected {LEAST_MODEL_LEN} or more, for a token "
            "of prompt and one of completion"
        )
    else:
        r.set("max_model_len", asked, "flag")


def decide_batch_limits(r: Resolved, config: EngineConfig) -> None:
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    check_range("--max-num-seqs", seqs, MOST_SEQS)
    check_range("--max-num-batched-tokens", budget, MOST_TOKENS)
    if seqs:
        r.set("max_num_seqs", seqs, "flag")
    else:
        seqs, reason = enough_seqs(r)
        if 0 < budget < seqs:
            seqs, reason = budget, "auto: each needs a token of --max-num-batched-tokens"
        r.set("max_num_seqs", seqs, reason)
    if budget:
        r.set("max_num_batched_tokens", budget, "flag")
    elif not config.enable_chunked_prefill:
        r.set("max_num_batched_tokens", max(r.max_model_len, seqs), "auto: whole prompts must fit")
    elif seqs > (8192 if r.is_gpu else 512):
        r.set("max_num_batched_tokens", seqs, "auto: a token for each of --max-num-seqs")
    elif r.is_gpu:
        r.set("max_num_batched_tokens", 8192, "auto: large steps prefill fastest")
    else:
        r.set("max_num_batched_tokens", 512, "auto: keeps steps short on a CPU")
    if r.max_num_batched_tokens < r.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {r.max_num_batched_tokens} is below --max-num-seqs "
            f"{r.max_num_seqs}: each running sequence needs a token a step; raise the first to "
            f"{r.max_num_seqs} or lower the second"
        )
    if not config.enable_chunked_prefill and r.max_num_batched_tokens < r.max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens of at least "
            f"--max-model-len ({r.max_model_len}), got {r.max_num_batched_tokens}"
        )


def enough_seqs(r: Resolved) -> tuple[int, str]:
    """How many requests share a step by default, and why. More than the KV cache holds do no harm."""
    if not r.is_gpu:
        return 64, "auto: more does not pay on a CPU"
    if r.gpu_bytes >= LARGE_GPU_BYTES:
        return 1024, f"auto: fills a GPU of {LARGE_GPU_BYTES // GIB} GiB or more"
    return 256, f"auto: fills a GPU of less than {LARGE_GPU_BYTES // GIB} GiB"


def check_range(flag: str, value: float, most: int) -> None:
    """0 means auto. Refuses NaN as well."""
    if not 0 <= value <= most:
        raise ConfigError(f"{flag} {value}: expected 0 (auto) to {most}")


def decide_block_size(r: Resolved, config: EngineConfig) -> None:
    if config.block_size == 0:
        is_hopper = r.is_gpu and torch.cuda.get_device_capability(r.device)[0] == 9
        reason = "auto: Hopper's copy engine prefers it" if is_hopper else "auto"
        r.set("block_size", 64 if is_hopper else 16, reason)
    elif r.is_gpu and config.block_size == 8:
        raise ConfigError(
            "--block-size 8: a GPU's kernels take 16, 32, 64 or 128; leave the flag out for the best"
        )
    elif config.block_size in BLOCK_SIZES:
        r.set("block_size", config.block_size, "flag")
    else:
        raise ConfigError(
            f"--block-size {config.block_size}: choose one of {BLOCK_SIZES}, or 0 (auto)"
        )


def decide_overlap(r: Resolved, config: EngineConfig) -> None:
    if config.overlap != "auto":
        r.set("overlap", config.overlap == "on", "flag")
    elif r.is_gpu:
        r.set("overlap", True, "auto: the next step is planned while the GPU computes")
    else:
        r.set("overlap", False, "auto: a CPU computes inside the step, nothing to overlap")


def decide_num_blocks(
    r: Resolved,
    config: EngineConfig,
    model: ModelConfig,
    gpu_bytes: int | None = None,
    to_load: int = 0,
    free: int | None = None,
) -> None:
    """Size the KV cache from the memory that is left once weights are loaded.

    `gpu_bytes`: what a GPU has left for it (`GpuMemory.for_cache`). `to_load`: bytes of a CPU's memory
    that weights will take, and `free`: bytes that a device which need not be here has left, for predictions.

    Shrinks max_model_len if it was `auto`. Raises ConfigError if a request of the asked length cannot fit,
    2 where flags alone say how large the cache is and 75 where the machine does; and (75) if the cache that
    was asked for exceeds the memory that is free.
    """
    r.block_bytes = kv_block_bytes(model, r.block_size, r.kv_dtype)
    check_range("--num-blocks", config.num_blocks, MOST_BLOCKS)
    check_range("--kv-cache-gib", config.kv_cache_gib, MOST_GIB)
    if config.num_blocks:
        usable, reason = config.num_blocks, "flag"
    elif gpu_bytes is not None:
        usable = max(0, gpu_bytes) // r.block_bytes - 1  # block 0 is reserved
        reason = f"auto: {gpu_bytes / 2**30:.2f} GiB within --gpu-memory-utilization"
    else:
        memory, reason = kv_memory_bytes(config.kv_cache_gib, to_load)
        usable = memory // r.block_bytes
    is_asked_for = bool(config.num_blocks or (config.kv_cache_gib and not r.is_gpu))
    if is_asked_for:
        check_cache_fits(r, config, usable, free)
    largest = usable * r.block_size
    if r.max_model_len > largest:
        if parse_length(config.max_model_len) is not None or usable < LEAST_BLOCKS:
            exit_code = 2 if is_asked_for else 75
            raise ConfigError(too_small(r, config, usable, largest), exit_code)
        r.set("max_model_len", largest, f"auto: shortened to what the KV cache holds ({reason})")
    r.set("num_blocks", usable + 1, reason)


def check_cache_fits(r: Resolved, config: EngineConfig, usable: int, free: int | None) -> None:
    """Refuse a cache that was asked for by size, but that the machine has no memory for now. `free`: None to
    find out."""
    needed = (usable + 1) * r.block_bytes  # with the reserved block 0
    if free is None:
        free = torch.cuda.mem_get_info(r.device)[0] if r.is_gpu else available_memory_bytes()
    if needed <= free:
        return
    if config.num_blocks:
        asked = f"--num-blocks {config.num_blocks}"
        most = free // r.block_bytes - 1
        remedy = f"use at most {most}" if most > 0 else "free some memory"
    else:
        asked = f"--kv-cache-gib {config.kv_cache_gib:g}"
        remedy = f"use less than {free / GIB:.2f}"
    raise ConfigError(
        f"{asked}: the KV cache would take {needed / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free "
        f"beside the weights; {remedy}, or leave the flag out",
        exit_code=75,
    )


def too_small(r: Resolved, config: EngineConfig, usable: int, largest: int) -> str:
    """What to say when one sequence does not fit: the figures, and the flag that would help."""
    blocks = -(-r.max_model_len // r.block_size)
    if config.num_blocks:
        remedy = f"--num-blocks {blocks}"
        if parse_length(config.max_model_len) is None and blocks > LEAST_BLOCKS:
            remedy += f" ({LEAST_BLOCKS} or more for shorter requests)"
    elif r.is_gpu:
        remedy = "a higher --gpu-memory-utilization"
    else:
        remedy = f"--kv-cache-gib {math.ceil(blocks * r.block_bytes / GIB * 100) / 100:.2f}"
    shorter = f"--max-model-len {largest} or " if largest else ""
    return (
        f"one sequence of {r.max_model_len} tokens needs {blocks * r.block_bytes / GIB:.3f} GiB "
        f"({blocks} blocks) of KV cache, {usable * r.block_bytes / GIB:.3f} GiB ({usable} blocks) are "
        f"available; fits with {shorter}{remedy}"
    )


def cache_rows(r: Resolved) -> list[tuple[str, str]]:
    """Of the start-up table: what was decided about lengths, batches and the KV cache."""
    usable = r.num_blocks - 1
    tokens, typical = usable * r.block_size, min(1024, r.max_model_len)
    kv_dtype = str(r.kv_dtype).removeprefix("torch.")
    return [
        (
            "kv dtype",
            f"{kv_dtype}, {r.block_bytes // r.block_size} bytes a token ({r.reasons['kv_dtype']})",
        ),
        (
            "kv cache",
            f"{usable * r.block_bytes / GIB:.2f} GiB = {usable} blocks of {r.block_size} = {tokens} "
            f"tokens ({r.reasons['num_blocks']})",
        ),
        ("max model len", f"{r.max_model_len} ({r.reasons['max_model_len']})"),
        ("max num seqs", f"{r.max_num_seqs} ({r.reasons['max_num_seqs']})"),
        (
            "token budget",
            f"{r.max_num_batched_tokens} a step ({r.reasons['max_num_batched_tokens']})",
        ),
        (
            "concurrency",
            f"{min(r.max_num_seqs, tokens // r.max_model_len)} sequences of {r.max_model_len} "
            f"tokens, {min(r.max_num_seqs, tokens // typical)} of {typical}",
        ),
    ]
