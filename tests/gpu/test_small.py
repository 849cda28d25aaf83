"""Short runs of the whole engine that reach every kernel, for compute-sanitizer, which makes all slow.

    compute-sanitizer --tool memcheck python -m pytest tests/gpu -m small
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m pytest tests/gpu -m "small" -k eager
    compute-sanitizer --tool racecheck python -m pytest tests/gpu -m small

The second gives every tensor memory of its own, so that reads just behind one are noticed; CUDA graphs
cannot be captured then. racecheck takes up to 50 GB of the host's memory for a test.
"""

from pathlib import Path

import pytest

from engine.ops import jit
from tests.engine_cpu.harness import Harness
from tests.engine_cpu.test_equalities import MIXED_PARAMS
from tests.engine_cpu.tiny_models import make_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.small]

# its vectors need as many numbers as the card has multiprocessors
IN_ONE_KERNEL = "few-rows-in-one-kernel"
VARIANTS = {
    "head64": ("llama", {"dtype": "bfloat16"}, 64),
    "head128-norms": ("qwen3", {"dtype": "bfloat16"}, 128),
    "head128-float16-biases": ("qwen2", {"dtype": "float16"}, 128),
    "window": ("mistral", {"dtype": "bfloat16"}, 64),
    "head80": ("llama", {"dtype": "bfloat16"}, 80),
    "fp8_e4m3": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, 128),
    "fp8_e5m2": ("llama", {"dtype": "float16", "kv_cache_dtype": "fp8_e5m2"}, 64),
    "float32": ("qwen3", {"dtype": "float32"}, 64),
    IN_ONE_KERNEL: ("qwen3", {"dtype": "bfloat16", "max_num_seqs": 4}, 64),
}


@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize("name", VARIANTS)
def test_engine(name: str, mode: str, tmp_path: Path) -> None:
    family, settings, head_dim = VARIANTS[name]
    model_dir = make_tiny(
        family,
        tmp_path,
        tokenizer=False,
        hidden_size=256 if name == IN_ONE_KERNEL else 128,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
    )
    harness = Harness(
        model_dir,
        device="cuda",
        num_blocks=40,
        max_num_batched_tokens=200,  # chunks, some of them long enough for the Hopper kernel
        enforce_eager=mode == "eager",
        **{"max_num_seqs": 9, **settings},
    )
    if name == IN_ONE_KERNEL and jit.device_arch() == "sm_90a":
        assert harness.loop.runner.small_steps is not None
    for i, params in enumerate(MIXED_PARAMS):
        prompt = [(7 * i + j) % 500 + 3 for j in range((1, 15, 16, 64, 65, 150, 300)[i % 7])]
        harness.add(i, prompt, max_tokens=12, logprobs=i % 3, **params)
    results = harness.run()
    assert all(result.token_ids for result in results.values())
    assert harness.loop.nan_events == 0
    harness.assert_empty()
