"""Host memory for KV blocks: the rules for --swap-space and --preemption-mode, and what is built of them."""

from engine.api.config import ConfigError, EngineConfig, check_swap
from engine.kv.host_tier import HostTier
from engine.memory import GIB, available_memory_bytes
from engine.resolve import Resolved
from engine.runner.host_blocks import HostBlocks
from engine.runner.runner import ModelRunner


def check_swap_space(config: EngineConfig) -> None:
    """What is known before weights load. Raises ConfigError for settings that contradict each other, or
    for more memory than is free."""
    check_swap(config)
    check_free(config.swap_space, available_memory_bytes())


def check_free(space: float, free: int) -> None:
    if space * GIB > free:
        raise ConfigError(
            f"--swap-space {space:g}: the host has {max(0, free) / GIB:.2f} GiB of free memory; use "
            "less than that, or 0",
            exit_code=75,
        )


def decide_host_blocks(r: Resolved, config: EngineConfig) -> None:
    """How many blocks the host's memory holds; once the size of a block is known.

    Raises ConfigError where that is none, or where weights and cache have left too little memory.
    """
    space = config.swap_space
    if space == 0:
        r.set("num_host_blocks", 0, "none; --swap-space gives some")
        return
    is_for_prefixes = config.preemption_mode == "recompute"
    if is_for_prefixes and not config.enable_prefix_caching:
        reason = "none: without prefix caching only --preemption-mode swap has a use for it"
        r.set("num_host_blocks", 0, reason)
        return
    promised = 0 if r.is_gpu else r.num_blocks * r.block_bytes  # a CPU's cache, not written to yet
    check_free(space, available_memory_bytes() - promised)
    count = int(space * GIB) // r.block_bytes
    if count == 0:
        raise ConfigError(
            f"--swap-space {space:g}: a KV block has {r.block_bytes / GIB:.4f} GiB, so none fits; use "
            "more, or 0"
        )
    use = "overwritten prefixes" if is_for_prefixes else "preempted requests"
    r.set("num_host_blocks", count, f"for {use}")


def make_host_tier(r: Resolved, config: EngineConfig) -> HostTier | None:
    if r.num_host_blocks == 0:
        return None
    return HostTier(r.num_host_blocks, keeps_all=config.preemption_mode == "recompute")


def add_host_blocks(runner: ModelRunner, r: Resolved, config: EngineConfig) -> None:
    """Take the memory, and pin it if the cache is on a GPU. Raises ConfigError if that fails."""
    try:
        runner.host_blocks = HostBlocks(runner.attention.kv, r.num_host_blocks)
    except MemoryError as error:
        raise ConfigError(
            f"--swap-space {config.swap_space:g}: the memory could not be taken ({error}); use less, or 0",
            exit_code=75,
        ) from error


def swap_space_line(r: Resolved) -> str:
    """The start-up table's."""
    count, reason = r.num_host_blocks, r.reasons["num_host_blocks"]
    if count == 0:
        return reason
    memory = f"{count * r.block_bytes / GIB:.2f} GiB{', pinned' if r.is_gpu else ''}"
    return f"{memory} = {count} blocks = {count * r.block_size} tokens ({reason})"
