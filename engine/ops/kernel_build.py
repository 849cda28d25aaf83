"""Get many kernels compiled: from the cache what it holds, the rest in a few worker processes."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from engine.ops import nvrtc
from engine.ops.kernel_cache import SOURCE_ROOT, Entry, Job, KernelCache, flatten
from engine.ops.nvrtc import Binary, KernelBuildError

Progress = Callable[[int, int, str], None]  # done, total, what

MAX_WORKERS = 12
WORKER = (sys.executable, "-m", "engine.ops.nvrtc")


@dataclass(frozen=True)
class Built:
    """A job's result, and where it came from."""

    job: Job
    entry: Entry
    cached: bool

    def lines(self) -> list[str]:
        """For reports: one line for each kernel in the source."""
        macros = " ".join(f"{name}={value}" for name, value in self.job.defines)
        origin = "cached" if self.cached else f"compiled in {self.entry.milliseconds:.0f} ms"
        return [
            f"{name} ({self.job.arch} {macros}): {origin}, {r.registers} registers, "
            f"{r.spill_bytes} bytes spilled, {r.stack_bytes} of stack, {r.smem_bytes} of static shared memory"
            for name, r in self.entry.resources.items()
        ]


def build(
    jobs: Sequence[Job],
    cache: KernelCache,
    require_cached: bool = False,
    progress: Progress | None = None,
    workers: int | None = None,
) -> list[Built]:
    """The results of `jobs`, in their order.

    Raises KernelBuildError if one does not compile, or with `require_cached` if one is missing.
    """
    found = {job: Built(job, entry, True) for job in jobs if (entry := cache.find(job)) is not None}
    missing = [job for job in dict.fromkeys(jobs) if job not in found]
    if missing and require_cached:
        names = ", ".join(sorted({job.source for job in missing}))
        raise KernelBuildError(
            f"{len(missing)} kernels are not in {cache.directory} ({names}), and --require-cached "
            "forbids to compile them: run scripts/build_kernels.py with this model, dtypes, block size "
            "and architecture, or leave the flag out"
        )
    total = len(jobs)
    if progress is not None and found:
        progress(len(found), total, "found in the cache")
    for built in compile_all(missing, cache, workers or default_workers()):
        found[built.job] = built
        if progress is not None:
            progress(len(found), total, built.job.source)
    return [found[job] for job in jobs]


def default_workers() -> int:
    """As many as there are cores, less one for the rest of the server."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) - 1))


def compile_all(jobs: Sequence[Job], cache: KernelCache, workers: int) -> Iterator[Built]:
    """Compile and store `jobs`, yielding each as it is done."""
    workers = min(workers, len(jobs))
    if workers <= 1:
        for job in jobs:
            yield finish(job, cache, compile_here)
        return
    with worker_processes(workers) as idle, ThreadPoolExecutor(workers) as threads:

        def compile_one(job: Job) -> Built:
            worker = idle.get()
            try:
                return finish(job, cache, partial(ask, worker))
            finally:
                idle.put(worker)

        futures = [threads.submit(compile_one, job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


def finish(job: Job, cache: KernelCache, compile_job: Callable[[Job], Binary]) -> Built:
    started = time.perf_counter()
    binary = compile_job(job)
    milliseconds = (time.perf_counter() - started) * 1e3
    return Built(job, cache.store(job, binary, milliseconds), False)


def compile_here(job: Job) -> Binary:
    return nvrtc.compile_cubin(flatten(job.source), job.options)


Worker = subprocess.Popen[str]


@contextmanager
def worker_processes(count: int) -> Iterator[SimpleQueue[Worker]]:
    """Idle workers, which end when the block does."""
    processes = [
        subprocess.Popen(
            WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=SOURCE_ROOT.parent
        )
        for _ in range(count)
    ]
    idle: SimpleQueue[Worker] = SimpleQueue()
    for process in processes:
        idle.put(process)
    try:
        yield idle
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ask(worker: Worker, job: Job) -> Binary:
    """Have `worker` compile. Raises KernelBuildError with the compiler's log, or if the worker died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(
            json.dumps({"source": flatten(job.source), "options": job.options}) + "\n"
        )
        worker.stdin.flush()
        line = worker.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        raise KernelBuildError(
            f"{job.source}: the compiling process ended (status {worker.wait()})"
        )
    answer = json.loads(line)
    if "error" in answer:
        raise KernelBuildError(f"{job.source}: {answer['error']}")
    return Binary(base64.b64decode(answer["cubin"]), answer["log"])
