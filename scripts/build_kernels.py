#!/usr/bin/env python3
"""Compile the CUDA kernels of a model ahead of its first start. Needs no GPU.

    python scripts/build_kernels.py MODEL [--arch sm_90a] [--dtype bfloat16] [--kv-cache-dtype fp8_e4m3]
    python scripts/build_kernels.py MODEL --report

MODEL is a model directory or a .gguf file; of it only the config is read. The result lies in
$XDG_CACHE_HOME/sluice/kernels (default: ~/.cache/sluice/kernels), for the machine of the server to find
or to be copied there. The report says for each kernel what it takes on the device.
"""

import argparse
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from engine.api.config import ConfigError  # noqa: E402
from engine.build_gpu import kernel_config  # noqa: E402
from engine.models.config import ModelConfig  # noqa: E402
from engine.ops import jit  # noqa: E402
from engine.ops.kernel_list import kernel_specs  # noqa: E402
from engine.ops.nvrtc import KernelBuildError  # noqa: E402
from engine.resolve import KV_DTYPES  # noqa: E402
from scripts.bench_command import run_benchmark, with_quiet_children  # noqa: E402
from scripts.loadtest.options import at_least_one  # noqa: E402

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BLOCK_SIZES = (16, 32, 64, 128)  # that kernels take
LEAST_ARCH = 80


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="model directory or .gguf file")
    parser.add_argument(
        "--arch", type=arch_name, help="sm_80, sm_89, sm_90a, ...; default: of this machine's GPU"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: the server's, of this checkpoint")
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, help="default: the model's dtype")
    parser.add_argument(
        "--block-size", type=int, choices=BLOCK_SIZES, help="default: 64 on sm_90a, else 16"
    )
    parser.add_argument(
        "--workers", type=at_least_one, help="compiling processes; default: cores - 1, up to 12"
    )
    parser.add_argument("--report", action="store_true", help="print every kernel's resources")
    return parser.parse_args()


def arch_name(text: str) -> str:
    match = re.fullmatch(r"sm_([1-9][0-9]{1,2})[af]?", text, re.ASCII)
    if match is None or int(match[1]) < LEAST_ARCH:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give sm_{LEAST_ARCH} or a newer one, such as sm_89 or sm_90a"
        )
    return text


def config_of(options: argparse.Namespace, arch: str) -> jit.KernelConfig:
    model = ModelConfig.from_directory(options.model)
    dtype = DTYPES[options.dtype or (model.dtype if model.dtype == "float16" else "bfloat16")]
    kv_dtype = KV_DTYPES[options.kv_cache_dtype] if options.kv_cache_dtype else dtype
    block_size = options.block_size or (64 if arch == "sm_90a" else 16)
    return kernel_config(model, dtype, kv_dtype, block_size, options.arch)


def main() -> int:
    options = parse_arguments()
    if options.arch is None and not torch.cuda.is_available():
        print("this machine has no GPU to compile for: pass --arch, e.g. sm_90a", file=sys.stderr)
        return 2
    try:
        arch = options.arch or jit.device_arch()
        specs = kernel_specs(config_of(options, arch))
        started = time.perf_counter()
        with tqdm(unit="kernel", desc=f"compiling for {arch}", disable=None) as bar:

            def progress(done: int, total: int, what: str) -> None:
                bar.total = total
                bar.update(done - bar.n)

            built = with_quiet_children(
                lambda: jit.prebuild(specs, arch, progress=progress, workers=options.workers)
            )
    except (ConfigError, KernelBuildError) as error:
        print(error, file=sys.stderr)
        return 1
    fresh = sum(not one.cached for one in built)
    seconds = time.perf_counter() - started
    print(f"{len(built)} sources for {arch}: {fresh} compiled in {seconds:.1f} s, the rest cached")
    print(f"in {jit.kernel_cache().directory}")
    if options.report:
        for one in built:
            print(*one.lines(), *one.entry.warnings, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
