"""Engine configuration: one dataclass; the command line, `LLM(...)` and the docs derive from it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# Above them no machine gains, and threads or tables fail in ways that no message explains.
MOST_THREADS = 1024
MOST_SEQS = 2**16
MOST_TOKENS = 2**24  # of one step
MOST_BLOCKS = 2**31 - 1  # block numbers are int32
MOST_GIB = 2**20


@dataclass(frozen=True)
class Arg:
    """How a configuration field is shown to people: help text, group, choices, other spellings."""

    help: str
    group: str
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    nargs: str | None = None


def arg(default: Any, help: str, group: str, **more: Any) -> Any:
    """A dataclass field that carries its `Arg`."""
    meta = {"arg": Arg(help=help, group=group, **more)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=meta)
    return field(default=default, metadata=meta)


def arg_of(f: dataclasses.Field[Any]) -> Arg:
    value = f.metadata["arg"]
    assert isinstance(value, Arg)
    return value


class ConfigError(ValueError):
    """A setting that cannot work. `exit_code` 2: change the command; 75: this machine cannot do it."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class EngineConfig:
    """What the engine is asked to do. `auto` values are decided at start and printed with the reason."""

    model: str = arg(
        "",
        "directory of Hugging Face weights, or a .gguf file (default: a small chat model, "
        "prepared once)",
        "model",
        metavar="DIR",
    )
    tokenizer: str = arg(
        "", "directory of the tokenizer, if it is not the model's", "model", metavar="DIR"
    )
    dtype: str = arg(
        "auto",
        "arithmetic and weights; auto: the checkpoint's on a GPU (float32 becomes bfloat16), and on a "
        "CPU bfloat16 where the processor computes it natively, else float32. float32 on a GPU is "
        "many times slower: for comparing numbers",
        "model",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    load_format: str = arg(
        "auto",
        "dummy: random weights in the shapes of config.json, for measurements",
        "model",
        choices=("auto", "dummy"),
    )
    max_model_len: str = arg(
        "auto",
        "longest prompt plus completion, e.g. 8192 or 8k; auto: the model's own, or what "
        "fits into memory. Costs KV cache only when used",
        "model",
        metavar="N",
    )
    seed: int = arg(
        0, "seed of dummy weights and of requests that name none (0: a fresh one)", "model"
    )
    device: str = arg(
        "auto", "auto: a GPU if there is one", "device", choices=("auto", "cpu", "cuda")
    )
    cpu_threads: int = arg(
        0,
        "threads for CPU arithmetic; 0: all cores but one, which the server needs",
        "device",
        metavar="N",
    )
    gpu_memory_utilization: float = arg(
        0.9,
        "share of the GPU's total memory for weights, activations and KV cache",
        "device",
        metavar="F",
    )
    enforce_eager: bool = arg(
        False, "do not capture CUDA graphs: faster start, slower steps", "device"
    )
    block_size: int = arg(
        0,
        "tokens per KV block (16, 32, 64 or 128; on a CPU also 8); larger shares less between "
        "requests; 0: 64 on Hopper GPUs, whose copy engine prefers it, else 16",
        "kv cache",
        metavar="N",
    )
    kv_cache_gib: float = arg(
        0.0,
        "memory for the KV cache on a CPU, in GiB; 0: a quarter of what is free, at most 4",
        "kv cache",
        metavar="GIB",
    )
    num_blocks: int = arg(
        0,
        "number of KV blocks, overriding the memory calculation (0: calculate)",
        "kv cache",
        metavar="N",
        aliases=("--num-gpu-blocks-override",),
    )
    enable_prefix_caching: bool = arg(
        True,
        "keep KV blocks of finished requests and share them between equal prefixes",
        "kv cache",
        aliases=("--disable-prefix-caching",),
    )
    max_num_seqs: int = arg(
        0,
        "most requests in one step; 0: 1024 on a GPU of 64 GiB or more, 256 on a smaller one, 64 on a CPU",
        "scheduler",
        metavar="N",
    )
    max_num_batched_tokens: int = arg(
        0,
        "most tokens in one step (the token budget); larger prefills faster and lets running "
        "requests wait longer; 0: 8192 on a GPU, 512 on a CPU",
        "scheduler",
        metavar="N",
    )
    enable_chunked_prefill: bool = arg(
        True,
        "split long prompts over steps; off: a prompt must fit into the token budget",
        "scheduler",
    )
    admission: str = arg(
        "peak",
        "peak: start a request only if its future KV demand fits; greedy: start at once "
        "and preempt when blocks run out",
        "scheduler",
        choices=("peak", "greedy"),
    )
    overlap: str = arg(
        "auto",
        "schedule the next step while the GPU computes; auto: on for GPUs, off for CPUs, "
        "where it would only delay each token",
        "scheduler",
        choices=("auto", "on", "off"),
    )
    log_level: str = arg(
        "info",
        "debug shows each request's way through the engine",
        "logging",
        choices=("debug", "info", "warning", "error"),
    )
    profile_dir: str = arg(
        "",
        "directory for the traces of /start_profile, which needs an admin key; while one is recorded "
        "each step is slower",
        "logging",
        metavar="DIR",
    )
    check_invariants: bool = arg(
        False, "verify scheduler and block pool after every step (slow; for tests)", "logging"
    )
    kv_cache_dtype: str = arg(
        "auto",
        "auto: the model's dtype; fp8 (= fp8_e4m3) and fp8_e5m2 halve the cache, so that twice the "
        "tokens fit, at some loss of accuracy; on a CPU decode becomes slower",
        "kv cache",
        choices=("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
    )
    require_cached: bool = arg(
        False,
        "refuse to start where a GPU kernel would have to be compiled; for images that "
        "scripts/build_kernels.py has prepared. Off, a first start takes some seconds longer",
        "device",
    )
    swap_space: float = arg(
        0.0,
        "host memory for KV blocks, in GiB, pinned on a GPU; 0: none. For preempted requests with "
        "--preemption-mode swap, else for cached prefixes that the device has no room for; then each "
        "cached block is copied to the host before it is overwritten",
        "kv cache",
        metavar="GIB",
    )
    preemption_mode: str = arg(
        "recompute",
        "swap: KV blocks of a preempted request are copied to --swap-space when others need their "
        "room, and back when it resumes; recompute: what was overwritten is computed again",
        "scheduler",
        choices=("recompute", "swap"),
    )


def parse_length(text: str, flag: str = "--max-model-len") -> int | None:
    """`8192`, `8k`, `32K` -> tokens; `auto` -> None. Raises ConfigError otherwise."""
    value = str(text).strip().lower()
    if value == "auto":
        return None
    factor = 1
    if value.endswith("k"):
        value, factor = value[:-1], 1024
    try:
        tokens = int(float(value) * factor)
    except (ValueError, OverflowError):  # the latter: infinity
        tokens = 0
    if tokens < 1:
        raise ConfigError(f"{flag} {text}: expected a number of tokens such as 8192 or 8k, or auto")
    return tokens


def check_swap(config: EngineConfig) -> None:
    """Raises ConfigError for a --swap-space out of range, or too small for the --preemption-mode."""
    space, mode = config.swap_space, config.preemption_mode
    if mode not in ("recompute", "swap"):
        raise ConfigError(f"--preemption-mode {mode}: expected recompute or swap")
    if not 0 <= space <= MOST_GIB:
        raise ConfigError(f"--swap-space {space:g}: expected GiB, from 0 (none) to {MOST_GIB}")
    if mode == "swap" and space == 0:
        raise ConfigError(
            "--preemption-mode swap needs host memory for KV blocks: add --swap-space with a size in "
            "GiB, such as 4, or leave the mode at recompute"
        )
