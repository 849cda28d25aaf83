"""The server's processes by name, and the CPU time of each while it runs."""

import threading
import time
from bisect import bisect_left
from pathlib import Path

SAMPLE_S = 0.05
MARKS = {
    "server": "frontend.serve",
    "tokenizer_proc": "tokenizer_proc",
    "engine": "frontend.engine",
}


def find_processes(root: int) -> dict[str, int]:
    """Names and process ids of `root` and its children."""
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    found = {}
    for pid in [root, *map(int, children)]:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        for name, mark in MARKS.items():
            if mark in command.split("--config")[0]:
                found[name] = pid
    return found


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond where the kernel counts so (proc(5), schedstat)."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9


class CpuWatch(threading.Thread):
    """Samples CPU times until `end`; `used` tells what a span of time took. Costs 1% of a core."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.pids = pids
        self.times: list[float] = []  # monotonic seconds
        self.samples: list[dict[str, float]] = []
        self.ended = threading.Event()

    def run(self) -> None:
        while True:
            is_last = self.ended.wait(SAMPLE_S)
            self.samples.append({name: cpu_seconds(pid) for name, pid in self.pids.items()})
            self.times.append(time.monotonic())
            if is_last:
                return

    def end(self) -> None:
        self.ended.set()
        self.join()

    def used(self, start: float, end: float) -> dict[str, float]:
        """CPU seconds by process name in [start, end], between the samples next to them."""
        return {name: self._at(name, end) - self._at(name, start) for name in self.pids}

    def _at(self, name: str, moment: float) -> float:
        i = min(max(bisect_left(self.times, moment), 1), len(self.times) - 1)
        before, after = self.times[i - 1], self.times[i]
        share = (moment - before) / (after - before)
        low, high = self.samples[i - 1][name], self.samples[i][name]
        return low + (high - low) * min(1.0, max(0.0, share))
