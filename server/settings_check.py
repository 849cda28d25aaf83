"""Settings that cannot work, whatever the model: refused before anything starts."""

import ctypes
import dataclasses
import os
from pathlib import Path

from engine.api.config import (
    MOST_BLOCKS,
    MOST_GIB,
    MOST_SEQS,
    MOST_THREADS,
    MOST_TOKENS,
    ConfigError,
    EngineConfig,
    check_swap,
    parse_length,
)
from server.access import Access
from server.config import ServerConfig, check_file
from server.cors import CorsPolicy
from server.tls import tls_context

WEEK_S = 7 * 24 * 3600
BLOCK_SIZES = (8, 16, 32, 64, 128)
CANNOT_WORK = 75  # exit code: not on this machine


def check_settings(server: ServerConfig, engine: EngineConfig) -> None:
    """Raises ConfigError naming the flag, the value, and what would work."""
    check_working_directory()
    check_text(server)
    check_text(engine)
    check_server(server)
    check_names(server, engine)
    check_device(engine)
    check_batch(engine)
    check_memory(engine)


def check_working_directory() -> None:
    """Paths are relative to it, and packages fail to load without one."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory has been removed or replaced: cd to one that exists, then start"
        ) from None


def check_text(config: ServerConfig | EngineConfig) -> None:
    """Settings go to the other processes, and names to clients, as UTF-8."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
                raise ConfigError(
                    f"--{field.name.replace('_', '-')} {text!a}: is not UTF-8 text; use another "
                    "name, or a link with another name to the same file"
                )


def check_server(server: ServerConfig) -> None:
    if (
        not server.host.strip()
    ):  # to a socket it is every interface: an unset variable is no consent
        raise ConfigError(
            "--host is empty: leave it out for this machine alone, or write 0.0.0.0 for all interfaces"
        )
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"--port {server.port}: ports are 1 to 65535, or 0 for any free one")
    at_least("--max-body-size", server.max_body_size, 1)
    at_least("--max-queued-requests", server.max_queued_requests, 1)
    in_range("--sse-keep-alive", server.sse_keep_alive, 0, WEEK_S)
    in_range("--drain-timeout", server.drain_timeout, 0, WEEK_S)
    in_range("--write-timeout", server.write_timeout, 1, WEEK_S)
    in_range("--stall-timeout", server.stall_timeout, 1, WEEK_S)
    in_range("--request-timeout", server.request_timeout, 0, WEEK_S)
    in_range("--queue-timeout", server.queue_timeout, 0, WEEK_S)
    in_range("--max-n", server.max_n, 1, 128)
    in_range("--max-stop", server.max_stop, 0, 16)
    in_range("--max-logprobs", server.max_logprobs, 0, 20)
    Access.from_config(server)
    CorsPolicy.from_config(server)
    tls_context(server)
    if server.chat_template:
        check_file("--chat-template", server.chat_template)


def check_names(server: ServerConfig, engine: EngineConfig) -> None:
    for name in server.served_model_name:
        if not name.strip():
            raise ConfigError("--served-model-name: a name must not be empty")
        if not name.isprintable():  # it stands in the log, in metrics and in answers
            raise ConfigError(
                f"--served-model-name {name!a:.200}: has characters that cannot be printed; use another name"
            )
        if not engine.model and looks_like_model(name):
            # The flag takes every word up to the next flag: a model after it would not be seen.
            raise ConfigError(
                f"--served-model-name {name}: looks like a model, and no other is given; write it "
                f"first, or as --model {name}"
            )


def looks_like_model(name: str) -> bool:
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(("./", "../"))
    return is_path or path.suffix == ".gguf" or path.is_dir()


def check_device(engine: EngineConfig) -> None:
    """What needs no torch to be known; the engine looks at the device itself."""
    in_range("--seed", engine.seed, -(2**63), 2**63 - 1)
    in_range("--cpu-threads", engine.cpu_threads, 0, MOST_THREADS)
    if engine.device == "cpu" and engine.dtype in ("half", "float16"):
        raise ConfigError(
            f"--dtype {engine.dtype} is for GPUs; with --device cpu use bfloat16 or float32"
        )
    if engine.device != "cuda":
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError(
            "--device cuda: there is no NVIDIA driver here (libcuda.so.1 cannot be loaded); "
            "install one, or use --device cpu",
            CANNOT_WORK,
        ) from None


def check_batch(engine: EngineConfig) -> None:
    """Per-step caps that contradict each other."""
    in_range("--max-num-seqs", engine.max_num_seqs, 0, MOST_SEQS)
    in_range("--max-num-batched-tokens", engine.max_num_batched_tokens, 0, MOST_TOKENS)
    length = parse_length(engine.max_model_len)
    tokens, seqs = engine.max_num_batched_tokens, engine.max_num_seqs
    if tokens and seqs and tokens < seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}, and every "
            f"running request needs one token a step: use at least {seqs}"
        )
    if tokens and length and not engine.enable_chunked_prefill and tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens {tokens} is less than --max-model-len {length}, and without "
            f"chunked prefill a whole prompt must fit into a step: use at least {length}, or "
            "leave out --no-enable-chunked-prefill"
        )


def check_memory(engine: EngineConfig) -> None:
    share = engine.gpu_memory_utilization
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share}: a share of the GPU's memory, above 0 and at most 1"
        )
    if engine.block_size and engine.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"--block-size {engine.block_size}: choose {sizes}, or 0 for automatic")
    in_range("--num-blocks", engine.num_blocks, 0, MOST_BLOCKS)
    in_range("--kv-cache-gib", engine.kv_cache_gib, 0, MOST_GIB)
    check_swap(engine)


def at_least(flag: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{flag} {value}: must be at least {low}")


def in_range(flag: str, value: float, low: float, high: float) -> None:
    """Refuses infinity and NaN as well."""
    if not low <= value <= high:
        raise ConfigError(f"{flag} {value}: must be between {low} and {high}")
