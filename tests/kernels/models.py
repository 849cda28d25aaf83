"""Shapes of models that people serve, as far as kernels care."""

import torch

from engine.ops.jit import KernelConfig


def shape(
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 16,
    softcaps: tuple[bool, ...] = (False,),
) -> KernelConfig:
    return KernelConfig(
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        head_dim=head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        softcaps=softcaps,
    )


MODELS: dict[str, KernelConfig] = {
    "SmolLM2-135M": shape(64, 9, 3, 576, 1536, 49152, block_size=64),
    "Qwen2.5-0.5B fp16": shape(64, 14, 2, 896, 4864, 151936, torch.float16),
    "Qwen2.5-7B": shape(128, 28, 4, 3584, 18944, 152064, block_size=64),
    "Llama-3-8B fp8 cache": shape(128, 32, 8, 4096, 14336, 128256, kv_dtype=torch.float8_e4m3fn),
    "SmolLM2-135M fp32": shape(64, 9, 3, 576, 1536, 49152, torch.float32),
    "Gemma-2-2B": shape(256, 8, 4, 2304, 9216, 256000, block_size=64, softcaps=(True,)),
    "Phi-3-mini": shape(96, 32, 32, 3072, 8192, 32064),
    "head of 80 fp16": shape(80, 32, 32, 2560, 6912, 50304, torch.float16, block_size=32),
    "head of 256": shape(256, 8, 4, 2304, 9216, 256000, block_size=64),
}

# The same sources on an older architecture hold few surprises: the extremes of shape will do.
MODELS_BY_ARCH: dict[str, tuple[str, ...]] = {
    "sm_80": ("Qwen2.5-0.5B fp16", "Qwen2.5-7B", "head of 256"),
    "sm_89": ("Llama-3-8B fp8 cache", "Phi-3-mini", "SmolLM2-135M fp32"),
    "sm_90a": tuple(MODELS),
}
