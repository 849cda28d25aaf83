"""Decide every `auto` and check every setting against the model and the machine.

Each decision is one small rule; the reason of each is printed at start, so that nobody has to guess
what a flag did.
"""

import os
from dataclasses import dataclass, field

import torch

from engine.api.config import ConfigError, EngineConfig, parse_length
from engine.memory import kv_block_bytes, kv_memory_bytes
from engine.models.config import ModelConfig

TORCH_DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclass
class Resolved:
    """What the engine really does. `reasons` explains the values that the user did not set."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
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

    def set(self, name: str, value: object, reason: str) -> None:
        setattr(self, name, value)
        self.reasons[name] = reason


def resolve(config: EngineConfig, model: ModelConfig) -> Resolved:
    """Everything but the number of KV blocks, which depends on memory left after loading.

    Raises ConfigError naming the flag, the value and what would work.
    """
    r = Resolved()
    decide_device(r, config)
    decide_dtype(r, config, model)
    decide_threads(r, config)
    decide_max_model_len(r, config, model)
    decide_batch_limits(r, config)
    decide_block_size(r, config)
    decide_overlap(r, config)
    return r


def decide_device(r: Resolved, config: EngineConfig) -> None:
    if config.device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch sees no CUDA device; use --device cpu, or install a driver "
                "and a CUDA build of torch",
                exit_code=75,
            )
        raise ConfigError(
            "--device cuda: this version computes on CPUs only; use --device cpu", exit_code=75
        )
    r.set("device", torch.device("cpu"), "flag" if config.device == "cpu" else "auto: CPU engine")


def decide_dtype(r: Resolved, config: EngineConfig, model: ModelConfig) -> None:
    if config.dtype != "auto":
        r.set("dtype", TORCH_DTYPES[config.dtype], "flag")
    elif has_fast_bfloat16():
        r.set("dtype", torch.bfloat16, "auto: this CPU multiplies bfloat16 natively")
    else:
        r.set("dtype", torch.float32, "auto: bfloat16 is slow on this CPU")
    if r.dtype is torch.float16:
        raise ConfigError("--dtype float16 is for GPUs; on a CPU use bfloat16 or float32")


def has_fast_bfloat16() -> bool:
    """AVX512-BF16 or AMX: without them a bfloat16 product costs 2.5 to 5 times a float32 one."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def decide_threads(r: Resolved, config: EngineConfig) -> None:
    cores = len(os.sched_getaffinity(0))
    if config.cpu_threads < 0:
        raise ConfigError(f"--cpu-threads {config.cpu_threads}: expected 0 (auto) or more")
    if config.cpu_threads:
        r.set("threads", config.cpu_threads, "flag")
    else:
        r.set("threads", max(1, cores - 1), f"auto: {cores} cores, one left for the server")


def decide_max_model_len(r: Resolved, config: EngineConfig, model: ModelConfig) -> None:
    asked = parse_length(config.max_model_len)
    if asked is None:
        r.set("max_model_len", model.max_model_len, "auto: the model's own length")
    elif asked > model.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len}: the model was made for at most "
            f"{model.max_model_len} tokens (config.json); use that, or give config.json a "
            "rope scaling that allows more"
        )
    else:
        r.set("max_model_len", asked, "flag")


def decide_batch_limits(r: Resolved, config: EngineConfig) -> None:
    seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    for flag, value in (("--max-num-seqs", seqs), ("--max-num-batched-tokens", budget)):
        if value < 0:
            raise ConfigError(f"{flag} {value}: expected 0 (auto) or more")
    if seqs:
        r.set("max_num_seqs", seqs, "flag")
    else:
        seqs = min(64, budget) if budget else 64
        r.set("max_num_seqs", seqs, "auto: more does not pay on a CPU")
    if budget:
        r.set("max_num_batched_tokens", budget, "flag")
    elif not config.enable_chunked_prefill:
        r.set("max_num_batched_tokens", r.max_model_len, "auto: whole prompts must fit")
    else:
        r.set("max_num_batched_tokens", max(512, seqs), "auto: keeps steps short on a CPU")
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


def decide_block_size(r: Resolved, config: EngineConfig) -> None:
    if config.block_size not in BLOCK_SIZES:
        raise ConfigError(f"--block-size {config.block_size}: choose one of {BLOCK_SIZES}")
    r.set("block_size", config.block_size, "flag or default")


def decide_overlap(r: Resolved, config: EngineConfig) -> None:
    if config.overlap == "auto":
        r.set("overlap", False, "auto: a CPU computes inside the step, nothing to overlap")
    else:
        r.set("overlap", config.overlap == "on", "flag")


def decide_num_blocks(r: Resolved, config: EngineConfig, model: ModelConfig) -> None:
    """Size the KV cache from the memory that is left once weights are loaded.

    Shrinks max_model_len if it was `auto`; raises ConfigError (75) if a request of the asked length
    cannot fit.
    """
    r.block_bytes = kv_block_bytes(model, r.block_size, r.dtype)
    if config.num_blocks < 0 or config.kv_cache_gib < 0:
        raise ConfigError("--num-blocks and --kv-cache-gib must not be negative")
    if config.num_blocks:
        usable, reason = config.num_blocks, "flag"
    else:
        memory, reason = kv_memory_bytes(config.kv_cache_gib)
        usable = memory // r.block_bytes
    largest = usable * r.block_size
    if r.max_model_len > largest:
        need = -(-r.max_model_len // r.block_size) * r.block_bytes / 2**30
        if parse_length(config.max_model_len) is not None or largest < 2 * r.block_size:
            raise ConfigError(
                f"one sequence of {r.max_model_len} tokens needs {need:.2f} GiB of KV cache, "
                f"{usable * r.block_bytes / 2**30:.2f} GiB ({usable} blocks) are available; fits with "
                f"--max-model-len {max(largest, r.block_size)} or --kv-cache-gib {need:.2f}",
                exit_code=75,
            )
        r.set("max_model_len", largest, f"auto: shortened to what the KV cache holds ({reason})")
    r.set("num_blocks", usable + 1, reason)
