"""Flags of vLLM 0.7.3 that this server does not have.

Whoever moves over finds each of them answered: values that mean what we do anyway, or a detail that has
no counterpart here, are accepted without effect; everything else is refused with a hint.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignFlag:
    """`accepted` values have no effect here; `takes_value` False: the flag stands alone."""

    hint: str
    accepted: tuple[str, ...] = ()
    takes_value: bool = True


def switch(hint: str, accepted: bool = False) -> ForeignFlag:
    """A flag without a value; `accepted`: what it asks for is how this server is anyway."""
    return ForeignFlag(hint, ("",) if accepted else (), takes_value=False)


LOCAL_ONLY = "models are read from local directories; nothing is downloaded by name"
NO_LORA = "LoRA adapters are not supported"
NO_SPECULATION = "speculative decoding is not supported"
NO_MULTIMODAL = "text models only"
PROXY = "put a reverse proxy such as nginx in front for that"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--tensor-parallel-size": ForeignFlag("one device computes; start one server per GPU", ("1",)),
    "--pipeline-parallel-size": ForeignFlag("one device computes", ("1",)),
    "--data-parallel-size": ForeignFlag("start several servers behind a proxy instead", ("1",)),
    "--distributed-executor-backend": ForeignFlag("one device computes, in one process", ("mp",)),
    "--cpu-offload-gb": ForeignFlag("weights stay on the device", ("0",)),
    "--quantization": ForeignFlag("only unquantized weights can be served", ("none", "None")),
    "--calculate-kv-scales": switch("scales of an fp8 KV cache are the checkpoint's, or 1"),
    "--num-scheduler-steps": ForeignFlag("every step is scheduled anew", ("1",)),
    "--num-lookahead-slots": ForeignFlag(NO_SPECULATION, ("0",)),
    "--scheduler-delay-factor": ForeignFlag("requests start as soon as they fit", ("0", "0.0")),
    "--scheduling-policy": ForeignFlag(
        "order is by the requests' priority, then arrival", ("fcfs", "priority")
    ),
    "--max-num-partial-prefills": ForeignFlag("chunks are sized by the token budget", ("1",)),
    "--max-seq-len-to-capture": ForeignFlag("graphs do not depend on the length"),
    "--tokenizer-mode": ForeignFlag("the model's own fast tokenizer is used", ("auto",)),
    "--tokenizer-pool-size": ForeignFlag("the tokenizer has a process of its own", ("0",)),
    "--skip-tokenizer-init": switch("the server needs the tokenizer"),
    "--trust-remote-code": switch("code from a model directory is never run; leave the flag out"),
    "--task": ForeignFlag("the server generates text", ("auto", "generate")),
    "--model-impl": ForeignFlag("models are our own implementations", ("auto", "vllm")),
    "--config-format": ForeignFlag("config.json is read", ("auto", "hf")),
    "--revision": ForeignFlag(LOCAL_ONLY),
    "--code-revision": ForeignFlag(LOCAL_ONLY),
    "--tokenizer-revision": ForeignFlag(LOCAL_ONLY),
    "--download-dir": ForeignFlag(LOCAL_ONLY),
    "--hf-overrides": ForeignFlag("edit config.json in the model directory"),
    "--rope-scaling": ForeignFlag("edit rope_scaling in config.json"),
    "--rope-theta": ForeignFlag("edit rope_theta in config.json"),
    "--override-generation-config": ForeignFlag("edit generation_config.json"),
    "--disable-sliding-window": switch("the model's own window is used"),
    "--guided-decoding-backend": ForeignFlag(
        "there is one, llguidance; leave the flag out", ("auto", "guidance")
    ),
    "--enable-lora": switch(NO_LORA),
    "--lora-modules": ForeignFlag(NO_LORA),
    "--max-loras": ForeignFlag(NO_LORA),
    "--max-lora-rank": ForeignFlag(NO_LORA),
    "--max-cpu-loras": ForeignFlag(NO_LORA),
    "--fully-sharded-loras": switch(NO_LORA),
    "--enable-prompt-adapter": switch("prompt adapters are not supported"),
    "--prompt-adapters": ForeignFlag("prompt adapters are not supported"),
    "--speculative-model": ForeignFlag(NO_SPECULATION),
    "--speculative-config": ForeignFlag(NO_SPECULATION),
    "--num-speculative-tokens": ForeignFlag(NO_SPECULATION, ("0",)),
    "--limit-mm-per-prompt": ForeignFlag(NO_MULTIMODAL),
    "--mm-processor-kwargs": ForeignFlag(NO_MULTIMODAL),
    "--allowed-local-media-path": ForeignFlag(NO_MULTIMODAL),
    "--enable-auto-tool-choice": switch("", accepted=True),
    "--exclude-tools-when-tool-choice-none": switch("", accepted=True),
    "--tool-parser-plugin": ForeignFlag("there are no plug-ins; see --tool-call-parser"),
    "--enable-reasoning": switch("", accepted=True),
    "--response-role": ForeignFlag("answers have the role assistant", ("assistant",)),
    "--chat-template-content-format": ForeignFlag("found out from the template", ("auto",)),
    "--root-path": ForeignFlag(f"paths are served as they are: {PROXY}"),
    "--middleware": ForeignFlag("there are no plug-ins"),
    "--uvicorn-log-level": ForeignFlag("use --log-level"),
    "--max-log-len": ForeignFlag("--log-requests prompts logs their beginnings"),
    "--otlp-traces-endpoint": ForeignFlag("there is no tracing"),
    "--collect-detailed-traces": ForeignFlag("there is no tracing"),
    "--compilation-config": ForeignFlag("nothing is compiled by torch"),
    "--kv-transfer-config": ForeignFlag("one engine keeps the whole KV cache"),
    "--worker-cls": ForeignFlag("there are no plug-ins"),
    "--enable-sleep-mode": switch("stop the server to free the memory"),
    "--disable-frontend-multiprocessing": switch("", accepted=True),
    "--disable-custom-all-reduce": switch("", accepted=True),
    "--use-v2-block-manager": switch("", accepted=True),
    "--disable-async-output-proc": switch("", accepted=True),
    "--enable-prompt-tokens-details": switch("", accepted=True),
    "--enable-request-id-headers": switch("", accepted=True),
}

# What vLLM calls a setting that exists here under another name.
SYNONYMS = {
    "--enable-log-requests": "--log-requests=on",
    "--disable-log-requests": "--log-requests=off",
    "--no-enable-log-requests": "--log-requests=off",
}
