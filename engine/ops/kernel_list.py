"""All kernels that an engine may launch, gathered from the op files.

Compiling ahead, the report at start and the checks in tests/kernels read this list.
"""

from engine.ops import (
    activation,
    copy_blocks,
    decoder_layers,
    embed_tokens,
    gated_gemm_sm90,
    linear,
    logprobs_cuda,
    narrow_gemm,
    paged_attention_f32,
    paged_decode,
    paged_prefill,
    paged_prefill_sm90,
    plan_decode,
    prepare_decode,
    rms_norm,
    rope_and_cache,
    sample_cuda,
    skinny_gemm,
)
from engine.ops.jit import KernelConfig, VariantSpec

OPS = (
    activation,
    copy_blocks,
    decoder_layers,
    embed_tokens,
    gated_gemm_sm90,
    linear,  # wide_gemm_sm90, where it is chosen
    logprobs_cuda,
    narrow_gemm,
    paged_attention_f32,
    paged_decode,
    paged_prefill,
    paged_prefill_sm90,
    plan_decode,
    prepare_decode,
    rms_norm,
    rope_and_cache,
    sample_cuda,
    skinny_gemm,
)


def kernel_specs(config: KernelConfig) -> list[VariantSpec]:
    """Every variant that a model of this shape needs."""
    return [spec for op in OPS for spec in op.specs(config)]
