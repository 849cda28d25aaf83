"""One log line every ten seconds while there is work, in the terms of the field."""

import asyncio
import logging

from engine.api.messages import EngineStats
from server.health import EngineStatus

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_status(status: EngineStatus, interval_s: float = INTERVAL_S) -> None:
    """Runs until cancelled; silent when nothing happened since the last line."""
    before = status.stats
    while True:
        await asyncio.sleep(interval_s)
        now = status.stats
        if before is not None and now is not None and now != before:
            logger.info("%s", describe(before, now, interval_s))
        before = now


def describe(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """Rates of the last interval and gauges of now."""
    prompt_rate = (now.prompt_tokens - before.prompt_tokens) / seconds
    generation_rate = (now.generation_tokens - before.generation_tokens) / seconds
    used = 1.0 - now.num_free_blocks / now.num_blocks if now.num_blocks else 0.0
    looked_up = now.prefix_query_tokens - before.prefix_query_tokens
    hits = now.prefix_hit_tokens - before.prefix_hit_tokens
    hit_share = f"{hits / looked_up:.0%}" if looked_up else "-"
    line = (
        f"prompt {prompt_rate:.1f} tok/s, generation {generation_rate:.1f} tok/s, "
        f"running {now.num_running}, waiting {now.num_waiting}, KV {used:.1%}, "
        f"prefix hits {hit_share}"
    )
    preempted = now.preemptions - before.preemptions
    if preempted:
        line += (
            f", preempted {preempted}: KV blocks ran out; lower --max-num-seqs, or give more memory "
            "to the KV cache"
        )
    return line
