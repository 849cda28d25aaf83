"""The doctor's look at what is installed: packages, torch, and what a GPU needs."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.api.config import EngineConfig
from scripts.operate.findings import Findings
from scripts.operate.machine import GIB, cpu_flags, has_driver, read
from server.config import REPOSITORY, child_environment

PROBE_TIMEOUT_S = 120.0
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}  # what else the tests are run with
CUPY = ("cupy-cuda12x", "cupy-cuda13x")  # by the driver's CUDA
LEAST_CAPABILITY = [8, 0]


def check_installation(found: Findings, engine: EngineConfig) -> dict[str, Any]:
    """Returns what the probe of torch said; empty if it failed."""
    check_packages(found, REPOSITORY / "requirements.txt")
    probe = run_probe(found)
    if probe:
        check_dtype(found, engine, probe)
        check_gpu(found, engine, probe)
    return probe


def requirements(file: Path) -> dict[str, str]:
    """Package -> pinned version."""
    pairs = (line.split("==") for line in file.read_text(encoding="utf-8").splitlines())
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def check_packages(found: Findings, file: Path) -> None:
    wanted = requirements(file)
    missing, differing, too_old = [], [], []
    for name, version in wanted.items():
        installed = installed_version(name)
        if installed is None:
            missing.append(name)
        elif numbers(installed) < OLDEST.get(name, ()):
            too_old.append(f"{name} {installed} (at least {'.'.join(map(str, OLDEST[name]))})")
        elif numbers(installed) != numbers(version):
            differing.append(f"{name} {installed} for {version}")
    install = f"{sys.executable} -m pip install -r {file.name}"
    needed = [name for name in missing if name not in CUPY]
    if needed or too_old:
        what = [f"{name} missing" for name in needed] + too_old
        found.fail("packages", ", ".join(what), install)
    elif differing:
        found.warn(
            "packages",
            ", ".join(differing),
            f"{install} gives the versions that the tests were run with",
        )
    else:
        found.ok("packages", f"{len(wanted) - len(missing)} as pinned in {file.name}")


def installed_version(name: str) -> str | None:
    for candidate in CUPY if name in CUPY else (name,):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0)."""
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts if part.isdigit())


def run_probe(found: Findings) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "scripts.operate.torch_probe"],
            cwd=REPOSITORY,
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "look at `nvidia-smi`: a driver that hangs is the usual cause; restart the machine"
        found.fail("torch", f"looking at the devices took over {PROBE_TIMEOUT_S:g} s", remedy)
        return {}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        probe: dict[str, Any] = json.loads(lines[-1])
        build = f"CUDA {probe['cuda_build']}" if probe["cuda_build"] else "CPU only"
        found.ok("torch", f"{probe['torch']}, {build}")
        return probe
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    if done.returncode < 0:
        reason = f"importing it ended with signal {-done.returncode}: a build for other processors?"
    found.fail("torch", reason, "install it again: pip install --force-reinstall torch")
    return {}


def check_dtype(found: Findings, engine: EngineConfig, probe: dict[str, Any]) -> None:
    """The arithmetic that a CPU would choose, and why (engine/resolve.py decides)."""
    if probe["has_gpu"] and engine.device != "cpu":
        found.ok("dtype", f"--dtype {engine.dtype}; on a GPU auto is the checkpoint's own")
        return
    flags = cpu_flags()
    useful = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    text = f"the processor has {', '.join(useful) or 'none of AVX2, AVX-512 and AMX'}"
    fast = probe["fast_bfloat16"]
    if engine.dtype == "auto":
        chosen, reason = ("bfloat16", "multiplied natively") if fast else ("float32", "no bfloat16")
        found.ok("dtype", f"auto is {chosen} on this CPU ({reason}); {text}")
    elif engine.dtype == "bfloat16" and not fast:
        remedy = "leave --dtype out, which takes float32: 2.5 to 5 times faster on this CPU"
        found.warn("dtype", f"--dtype bfloat16; {text}", remedy)
    else:
        found.ok("dtype", f"--dtype {engine.dtype}; {text}")
    if not probe["mkldnn"]:
        found.warn(
            "oneDNN", "torch has none", "install torch's own build: products are 2 times slower"
        )


def check_gpu(found: Findings, engine: EngineConfig, probe: dict[str, Any]) -> None:
    if not probe["has_gpu"]:
        explain_missing_gpu(found, engine, probe)
        return
    for index, gpu in enumerate(probe["gpus"]):
        describe_gpu(found, index, gpu)
    holders = memory_holders()
    if holders:
        found.warn(
            "gpu memory", f"held by {holders}", "end them, or lower --gpu-memory-utilization"
        )
    for name, remedy in (
        ("cupy", f"pip install {CUPY[0]} (CUDA 12) or {CUPY[1]} (CUDA 13)"),
        ("nvrtc", "pip install -r requirements-dev.txt, or torch's CUDA build, which brings it"),
    ):
        version = probe["libraries"].get(name, "error: not looked for")
        if version.startswith("error: "):
            found.fail(name, version.removeprefix("error: "), remedy)
        else:
            found.ok(name, version)


def explain_missing_gpu(found: Findings, engine: EngineConfig, probe: dict[str, Any]) -> None:
    wanted = engine.device == "cuda"
    tell = found.fail if wanted else found.warn
    if not has_driver():
        if wanted:
            found.fail("gpu", "no NVIDIA driver (libcuda.so.1)", "install one, or use --device cpu")
        else:
            found.ok("gpu", "none: the CPU computes")
    elif not probe["cuda_build"]:
        tell("gpu", "there is a driver, but torch is built for CPUs only", "install torch for CUDA")
    else:
        driver = (read("/proc/driver/nvidia/version").splitlines() or ["unknown"])[0]
        tell(
            "gpu",
            f"torch for CUDA {probe['cuda_build']} sees no GPU; driver: {driver}",
            "look at CUDA_VISIBLE_DEVICES and `nvidia-smi`; a driver older than torch's CUDA, or a "
            "container started without --gpus all, gives the same",
        )


def describe_gpu(found: Findings, index: int, gpu: dict[str, Any]) -> None:
    major, minor = gpu["capability"]
    text = (
        f"{gpu['name']}, compute capability {major}.{minor}, {gpu['free'] / GIB:.1f} GiB free of "
        f"{gpu['total'] / GIB:.1f}, uuid {gpu['uuid']}"
    )
    if gpu["capability"] < LEAST_CAPABILITY:
        remedy = "the kernels need 8.0 (Ampere) or newer: use another GPU, or --device cpu"
        found.fail(f"gpu {index}", text, remedy)
    else:
        found.ok(f"gpu {index}", text)


def memory_holders() -> str:
    """Processes that hold memory of a GPU, as nvidia-smi names them; "" if none, or it is missing."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return "; ".join(line.strip() for line in done.stdout.splitlines() if line.strip())
