"""Settings that cannot work, whatever the model: refused before anything starts."""

from pathlib import Path

from engine.api.config import ConfigError, EngineConfig, parse_length
from server.config import ServerConfig


def check_settings(server: ServerConfig, engine: EngineConfig) -> None:
    """Raises ConfigError naming the flag, the value, and what would work."""
    check_server(server)
    check_names(server, engine)
    check_batch(engine)
    check_memory(engine)


def check_server(server: ServerConfig) -> None:
    if not 0 <= server.port <= 65535:
        raise ConfigError(f"--port {server.port}: ports are 1 to 65535, or 0 for any free one")
    at_least("--max-body-size", server.max_body_size, 1)
    at_least("--max-queued-requests", server.max_queued_requests, 1)
    at_least("--sse-keep-alive", server.sse_keep_alive, 0)
    at_least("--drain-timeout", server.drain_timeout, 0)
    at_least("--stall-timeout", server.stall_timeout, 1)
    if server.chat_template and not Path(server.chat_template).is_file():
        raise ConfigError(f"--chat-template {server.chat_template}: there is no such file")


def check_names(server: ServerConfig, engine: EngineConfig) -> None:
    for name in server.served_model_name:
        if not name.strip():
            raise ConfigError("--served-model-name: a name must not be empty")
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


def check_batch(engine: EngineConfig) -> None:
    """Per-step caps that contradict each other."""
    at_least("--max-num-seqs", engine.max_num_seqs, 0)
    at_least("--max-num-batched-tokens", engine.max_num_batched_tokens, 0)
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
    at_least("--block-size", engine.block_size, 1)
    at_least("--num-blocks", engine.num_blocks, 0)
    at_least("--kv-cache-gib", engine.kv_cache_gib, 0)
    at_least("--cpu-threads", engine.cpu_threads, 0)


def at_least(flag: str, value: float, low: float) -> None:
    if not value >= low:
        raise ConfigError(f"{flag} {value}: must be at least {low}")
