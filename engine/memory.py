"""How much KV cache fits, and the start-up account of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from engine.api.config import ConfigError, EngineConfig
from engine.models.config import ModelConfig

GIB = 2**30
WORKSPACE_BYTES = GIB // 8  # see estimate_activations
CAPTURE_WORKSPACE_BYTES = GIB * 5 // 32  # see estimate_graphs
GRAPH_NODES_BYTES = 2**20  # of a graph of 24 layers; deeper models' in proportion
LARGEST_AUTO_BYTES = 4 * GIB  # beyond it a CPU is too slow to fill the cache


def kv_block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one KV block over all layers, keys and values."""
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    return per_token * block_size


def kv_memory_bytes(asked_gib: float, to_load: int = 0) -> tuple[int, str]:
    """Bytes for the KV cache on a CPU, and why. `to_load`: bytes that will be taken before it."""
    if asked_gib:
        return int(asked_gib * GIB), f"flag: {asked_gib:g} GiB"
    free = max(0, available_memory_bytes() - to_load)
    chosen = min(free // 4, LARGEST_AUTO_BYTES)
    return chosen, f"auto: {chosen / GIB:.2f} of {free / GIB:.2f} GiB free"


def available_memory_bytes() -> int:
    """Memory that can be taken without swapping: the host's, or the container's limit if lower."""
    available = 0
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    limit = cgroup_headroom_bytes()
    return available if limit is None else min(available, limit)


def cgroup_headroom_bytes() -> int | None:
    """Bytes left under a cgroup v2 memory limit; None without one."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            text = file.read().strip()
        if text == "max":
            return None
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            return max(0, int(text) - int(file.read()))
    except (OSError, ValueError):
        return None


# How torch, cuBLAS, CuPy and the CUDA driver say it, besides torch's own exception.
NO_MEMORY_WORDS = ("out of memory", "out_of_memory", "alloc_failed", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in text for words in NO_MEMORY_WORDS)
    )


@contextmanager
def memory_for(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Turn a lack of memory into a ConfigError (75) that says for what, and what would help.

    It may hide behind another error: the end of a capture that it spoilt raises one of its own.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        chain: list[BaseException] = [error]
        while chain[-1].__context__ is not None:
            chain.append(chain[-1].__context__)
        if not any(isinstance(one, MemoryError) or is_out_of_memory(one) for one in chain):
            raise
        raise ConfigError(
            f"out of memory while {what}: {memory_state(device)}; {remedy}", exit_code=75
        ) from error


def memory_state(device: torch.device) -> str:
    """Who holds the memory of a device, for messages."""
    if device.type != "cuda":
        return f"{available_memory_bytes() / GIB:.2f} GiB are free"
    free, total = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    return (
        f"of {total / GIB:.2f} GiB on {device}, this process holds {ours / GIB:.2f}, others and the "
        f"driver {(total - free - ours) / GIB:.2f}, and {free / GIB:.2f} are free"
    )


@dataclass
class GpuMemory:
    """Where a GPU's memory goes, in bytes. `rows` sums to `total`.

    At a start weights and activations are measured; scripts/doctor.py predicts them. Graphs are an estimate
    until they are captured, as the cache is there by then.
    """

    total: int
    others: int  # held by other processes and by the driver before anything was loaded
    weights: int
    activations: int
    kv_cache: int = 0
    graphs: int = 0
    reserve: int = 0  # left alone by --gpu-memory-utilization
    sampling_tables: int = 0  # of penalties and logit bias, if every row needed them
    is_predicted: bool = False

    def for_cache(self, config: EngineConfig) -> int:
        """Bytes left for the KV cache; notes the reserve. Raises ConfigError (75) if there are none, but not
        where --num-blocks says how many to take: others may then hold more than the share."""
        share = config.gpu_memory_utilization
        allowed = int(self.total * share)
        left = allowed - self.others - self.weights - self.activations - self.sampling_tables
        left -= self.graphs
        if left <= 0 and not config.num_blocks:
            raise ConfigError(
                f"no memory is left for the KV cache: --gpu-memory-utilization {share:g} of "
                f"{self.total / GIB:.1f} GiB allows {allowed / GIB:.1f}, but others hold "
                f"{self.others / GIB:.1f}, weights {self.weights / GIB:.1f}, a full step "
                f"{self.activations / GIB:.1f}, CUDA graphs {self.graphs / GIB:.1f} and sampling tables "
                f"{self.sampling_tables / GIB:.1f}; "
                "raise it, lower --max-num-batched-tokens or --max-num-seqs, give --num-blocks, or free "
                "the GPU",
                exit_code=75,
            )
        self.reserve = self.total - allowed
        return left

    def rows(self) -> list[tuple[str, int]]:
        named = [
            ("other processes and driver", self.others),
            ("weights", self.weights),
            (
                f"activations ({'estimate' if self.is_predicted else 'measured peak'})",
                self.activations,
            ),
            ("KV cache", self.kv_cache),
            ("sampling tables (kept free until needed)", self.sampling_tables),
            (f"CUDA graphs{' (estimate)' if self.is_predicted else ''}", self.graphs),
        ]
        rest = self.total - sum(size for _, size in named)
        reserve = max(0, min(self.reserve, rest))  # less, if --num-blocks took of it
        return [
            *named,
            ("left free (--gpu-memory-utilization)", reserve),
            ("unaccounted", rest - reserve),
        ]

    def lines(self) -> list[str]:
        """`rows` for people, with their sum."""
        return [
            f"{size / GIB:7.2f} GiB  {size / self.total:6.1%}  {what}"
            for what, size in [*self.rows(), ("total", self.total)]
        ]


def estimate_activations(
    model: ModelConfig, dtype: torch.dtype, max_tokens: int, max_seqs: int
) -> int:
    """Bytes that a full step takes beyond the weights, where it cannot be run to measure it.

    What lives at the same time in a layer for `max_tokens`, logits of `max_seqs` rows, and room for the
    workspaces of attention, sampling and libraries, which hardly depend on the model.
    """
    values = max_tokens * layer_width(model)
    return values * dtype.itemsize + logit_bytes(model, max_seqs) + WORKSPACE_BYTES


def estimate_graphs(
    model: ModelConfig, dtype: torch.dtype, max_seqs: int, graph_tokens: int, num_graphs: int
) -> int:
    """Bytes that CUDA graphs take, besides what eager steps do: they share no memory with these.

    Graphs of decode steps use one pool in turn, for what lives in a layer of `max_seqs` rows, and have
    one place for logits. Those of steps with prompt chunks have another pool, for up to `graph_tokens`
    tokens, and places for their hidden states and attention. Each kind's stream has workspaces of
    libraries, and the driver keeps each graph's nodes (some 200 kernels for 24 layers) on the device.
    """
    values = (max_seqs + graph_tokens) * layer_width(model)
    values += graph_tokens * (model.hidden_size + model.num_heads * model.head_dim)
    nodes = num_graphs * GRAPH_NODES_BYTES * max(24, model.num_layers) // 24
    logits = logit_bytes(model, max_seqs)
    return values * dtype.itemsize + logits + CAPTURE_WORKSPACE_BYTES + nodes


def logit_bytes(model: ModelConfig, max_seqs: int) -> int:
    return 4 * max_seqs * model.vocab_size  # float32 in every dtype of the model


def layer_width(model: ModelConfig) -> int:
    """Values of a token that live at the same time in a layer of engine/models/decoder.py: in its MLP, or
    before attention."""
    hidden, inner = model.hidden_size, model.intermediate_size
    q_size, kv_size = model.num_heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    return max(4 * hidden + 3 * inner, 3 * hidden + 3 * q_size + kv_size)
