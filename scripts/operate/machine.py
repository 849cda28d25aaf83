"""The doctor's look at the machine: processor, memory, limits of the container and the user, ports."""

import ctypes
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

from engine.api.config import ConfigError, EngineConfig
from scripts.operate.findings import Findings
from server.config import ServerConfig
from server.file_limit import ENOUGH_FILES, LEAST_FILES, allowed_files

GIB = 2**30
LEAST_PYTHON = (3, 11)
LEAST_FREE_GIB = 1.0  # of a cache folder: the default model, or a model's kernels
LEAST_SHM = 64 * 2**20
LEAST_MEMLOCK = 64 * 2**20
SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies")
EARLIEST_YEAR = 2025


def check_machine(found: Findings, server: ServerConfig, engine: EngineConfig) -> None:
    check_python(found)
    check_processor(found, engine)
    check_memory(found, engine)
    check_folders(found)
    check_limits(found, engine)
    check_clock(found)
    check_port(found, server)


def check_python(found: Findings) -> None:
    version, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    if sys.version_info < LEAST_PYTHON:
        wanted = ".".join(map(str, LEAST_PYTHON))
        found.fail("python", version, f"make the environment with Python {wanted} or newer")
    elif sys.platform != "linux":
        found.fail("python", f"{version} on {system}", "run on Linux, or in a container of it")
    else:
        found.ok("python", f"{version}, {system}, {sys.prefix}")


def check_processor(found: Findings, engine: EngineConfig) -> None:
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    text = f"{processor_name()}: {cores} of {os.cpu_count()} cores for this process"
    threads = engine.cpu_threads or max(1, cores - 1)
    if quota is not None and quota < threads:
        most = max(1, int(quota))
        found.warn(
            "processor",
            f"{text}, but the container's limit is {quota:g} CPUs and {threads} threads would compute",
            f"pass --cpu-threads {most} (or set the same cpuset): threads that wait for their share of "
            "time stop all others of a step",
        )
    elif engine.cpu_threads > cores:
        found.warn(
            "processor",
            f"{text}; --cpu-threads asks for {engine.cpu_threads}",
            f"pass at most {cores}: more threads than cores wait for each other",
        )
    else:
        limit = "" if quota is None else f", container limit {quota:g}"
        found.ok("processor", text + limit)


def processor_name() -> str:
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_flags() -> set[str]:
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            return set(line.partition(":")[2].split())
    return set()


def cpu_quota() -> float | None:
    """CPUs that the container's limit allows (cgroup v2, else v1); None without a limit."""
    parts = read("/sys/fs/cgroup/cpu.max").split()
    if not parts:
        parts = [
            read(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
    try:
        quota, period = float(parts[0]), float(parts[1])
    except (ValueError, IndexError):  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None


def check_memory(found: Findings, engine: EngineConfig) -> None:
    total, available = memory("MemTotal"), memory("MemAvailable")
    text = f"{available / GIB:.1f} GiB free of {total / GIB:.1f}"
    limit = cgroup_limit()
    if limit is not None:
        text += f", container limit {limit / GIB:.1f}"
    if engine.swap_space * GIB > available:
        found.fail(
            "memory",
            f"{text}; --swap-space asks for {engine.swap_space:g}",
            f"pass --swap-space {max(0, int(available / GIB) - 1)} or less",
        )
    elif available < GIB:
        found.warn("memory", text, "end other programs: the default model alone takes about 1 GiB")
    else:
        found.ok("memory", text)


def memory(name: str) -> int:
    """Bytes, from /proc/meminfo."""
    for line in read("/proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def cgroup_limit() -> int | None:
    text = read("/sys/fs/cgroup/memory.max").strip()
    return int(text) if text.isdigit() else None


def check_folders(found: Findings) -> None:
    from engine.ops.kernel_cache import default_directory
    from server.default_model import default_cache_dir

    for name, folder in (
        ("model cache", default_cache_dir()),
        ("kernel cache", default_directory()),
    ):
        check_cache(found, name, folder)
    check_temporary_folder(found)


def check_temporary_folder(found: Findings) -> None:
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        found.fail("temporary files", str(error.strerror), "set TMPDIR to a folder with some space")
        return
    if not os.access(parent, os.W_OK | os.X_OK):
        found.fail("temporary files", f"{parent} cannot be written", "set TMPDIR to another folder")
    elif shutil.disk_usage(parent).free < 2**20:
        found.fail("temporary files", f"{parent} is full", "free some space, or set TMPDIR")
    else:
        found.ok("temporary files", f"{parent}, for sockets")


def check_cache(found: Findings, name: str, folder: Path) -> None:
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free / GIB
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    size = sum(file.stat().st_size for file in files) / GIB
    text = f"{folder}: {size:.2f} GiB in {len(files)} files, {free:.1f} GiB free"
    if not os.access(there, os.W_OK | os.X_OK):
        found.fail(name, f"{there} cannot be written", "set XDG_CACHE_HOME to a folder of yours")
    elif free < LEAST_FREE_GIB:
        found.warn(name, text, "free some space, or set XDG_CACHE_HOME to a larger disk")
    else:
        found.ok(name, text)


def check_limits(found: Findings, engine: EngineConfig) -> None:
    files = allowed_files()
    if files < LEAST_FILES:
        found.warn(
            "open files",
            f"{files} at most: about as many connections",
            f"ulimit -Hn {ENOUGH_FILES} as root before the start; LimitNOFILE= in a systemd unit",
        )
    else:
        found.ok("open files", f"{files} at most")
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if memlock != resource.RLIM_INFINITY and memlock < LEAST_MEMLOCK and engine.swap_space:
        found.warn(
            "locked memory",
            f"{memlock // 1024} KiB at most",
            "ulimit -l unlimited: --swap-space is pinned for a GPU, and some drivers count that",
        )
    else:
        found.ok("locked memory", f"{shown_limit(memlock)} bytes at most")
    check_shared_memory(found)


def shown_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def check_shared_memory(found: Findings) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        found.warn("/dev/shm", "is missing", "mount a tmpfs there: several GPUs talk through it")
        return
    usage = shutil.disk_usage(folder)
    text = f"{usage.free / 2**20:.0f} MiB free of {usage.total / 2**20:.0f}"
    if usage.free < LEAST_SHM:
        found.warn(
            "/dev/shm",
            text,
            "docker run --shm-size=1g: several GPUs talk through it (one does not)",
        )
    else:
        found.ok("/dev/shm", text)


def check_clock(found: Findings) -> None:
    source = read("/sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    year = time.gmtime().tm_year
    if year < EARLIEST_YEAR:
        found.warn(
            "clock",
            f"the year is {year}",
            "set the clock: certificates and times in answers depend on it",
        )
    elif source in SLOW_CLOCKS:
        found.warn(
            "clock",
            f"clock source {source}, microseconds for each look at the time",
            "boot with clocksource=tsc if the machine has a stable one",
        )
    else:
        found.ok("clock", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, source {source or 'unknown'}")


def check_port(found: Findings, server: ServerConfig) -> None:
    from server.http_server import bind, close_all

    if server.port == 0:
        found.ok("port", "any free one")
        return
    try:
        close_all(bind(server.host, server.port))
    except ConfigError as error:
        remedy = "end what listens there (`ss -ltnp` names it), or choose another --port"
        found.fail("port", str(error), remedy)
    else:
        found.ok("port", f"{server.host}:{server.port} is free")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def read(path: str) -> str:
    """A file of the kernel; "" where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
