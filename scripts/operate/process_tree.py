"""CPU time of a process and all its descendants, read from /proc (Linux)."""

import asyncio
import os
import time
from pathlib import Path


def read_stat(pid: int) -> tuple[str, int, float] | None:
    """(state, parent, CPU seconds used) of a process from /proc, or None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    ticks = int(fields[11]) + int(fields[12])
    return fields[0], int(fields[1]), ticks / os.sysconf("SC_CLK_TCK")


def is_running(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat[0] != "Z"


def tree_cpu_seconds(root: int) -> dict[int, float]:
    """CPU seconds so far of a process and all its descendants, by process id."""
    stats = {
        int(name): stat
        for name in os.listdir("/proc")
        if name.isdigit() and (stat := read_stat(int(name))) is not None
    }
    members = {root}
    grown = True
    while grown:
        children = {pid for pid, (_, parent, _) in stats.items() if parent in members}
        grown = not children <= members
        members |= children
    return {pid: stats[pid][2] for pid in members if pid in stats}


async def idle_cpu_percent(root: int, seconds: float) -> float:
    """CPU use of a process tree while nobody asks for anything, in percent of one core."""
    before, start = tree_cpu_seconds(root), time.perf_counter()
    await asyncio.sleep(seconds)
    after, end = tree_cpu_seconds(root), time.perf_counter()
    used = sum(cpu - before.get(pid, 0.0) for pid, cpu in after.items())
    return 100 * used / (end - start)
