"""Model families by the name that config.json gives their architecture.

To add one: a file with a function `decoder_spec(config)`, a line here, and a row in
tests/engine_cpu/test_models.py. The modules import torch, so they are imported when used.
"""

ARCHITECTURES = {
    "LlamaForCausalLM": "engine.models.llama",
    "MistralForCausalLM": "engine.models.mistral",
    "Qwen2ForCausalLM": "engine.models.qwen2",
    "Qwen3ForCausalLM": "engine.models.qwen3",
}
