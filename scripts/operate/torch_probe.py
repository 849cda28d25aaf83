"""What torch and the libraries for GPUs say, as one JSON object: python -m scripts.operate.torch_probe.

A program of its own, as a wrong build of one of them may crash the process that imports it; the doctor
then says so and goes on.
"""

import contextlib
import importlib
import json
import sys
from typing import Any


def probe() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "mkldnn": torch.backends.mkldnn.is_available(),
        "has_gpu": torch.cuda.is_available(),
        "gpus": [],
        "libraries": {},
    }
    from engine.resolve import has_fast_bfloat16

    found["fast_bfloat16"] = has_fast_bfloat16()
    if found["has_gpu"]:
        found["gpus"] = [describe_gpu(torch, i) for i in range(torch.cuda.device_count())]
        found["libraries"]["cupy"] = version_of("cupy")
    found["libraries"]["nvrtc"] = nvrtc_version()
    return found


def describe_gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "uuid": str(properties.uuid),
        "free": free,
        "total": total,
    }


def version_of(module: str) -> str:
    """Its version, or what importing it says, as `error: ...`."""
    try:
        return str(importlib.import_module(module).__version__)
    except Exception as error:  # whatever a broken installation raises
        return f"error: {error}".splitlines()[0]


def nvrtc_version() -> str:
    from engine.ops.nvrtc import KernelBuildError, version

    try:
        return "{}.{}".format(*version())
    except KernelBuildError as error:
        return f"error: {error}".splitlines()[0]


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # libraries print
        answer = probe()
    print(json.dumps(answer))
