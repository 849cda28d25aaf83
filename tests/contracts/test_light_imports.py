"""Importing the contracts or the server must not load torch: checked in a process of its own."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "cupy", "tokenizers", "safetensors", "gguf", "numpy")


@pytest.mark.parametrize(
    "modules",
    ["engine, engine.api.messages, engine.api.config", "engine.api.messages, server.app"],
)
def test_import_leaves_heavy_modules_out(modules: str) -> None:
    code = f"import sys, {modules}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
