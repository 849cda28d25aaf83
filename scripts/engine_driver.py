"""A whole engine without server or tokenizer, for measurements: token ids in, counts and times out."""

import atexit
import json
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.api.config import EngineConfig
from engine.api.hashing import block_names
from engine.api.messages import AbortReason, AbortRequests, AddRequest, StepOutput
from engine.api.sampling import SamplingParams
from engine.build import build_engine


def qwen2(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, is_tied: bool
) -> dict[str, object]:
    """The config.json of a Qwen2.5 model of this size."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": is_tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }


# Shapes of well-known models, so that speed can be measured without their weights.
SHAPES: dict[str, dict[str, object]] = {
    "7b": qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "1.5b": qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "0.5b": qwen2(896, 4864, 24, 14, 2, 151936, True),
    "tiny": {  # for measurements without a model's work
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "eos_token_id": 2,
    },
}


def add_engine_options(parser: ArgumentParser) -> None:
    """The options of scripts that measure a whole engine."""
    parser.add_argument(
        "--model",
        default="7b",
        help=f"directory, or a shape with random weights: one of {', '.join(SHAPES)} (default: "
        "%(default)s, 15 GB of weights in 16 bits)",
    )
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cuda or cpu; auto: a GPU if torch sees one, else the CPU, which is not for 7b",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="arithmetic and weights, as of serve.py; float32 on a GPU is many times slower "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        help="keys and values, as of serve.py; fp8 takes half the memory, and rounds more "
        "(default: the model's dtype)",
    )
    parser.add_argument("--json", help="write the figures to this file as well")


def model_directory(name: str) -> str:
    """A directory for --model: `name` itself, or one with the config of a known shape, until the process ends."""
    if name not in SHAPES:
        return name
    folder = Path(tempfile.mkdtemp(prefix="sluice-shape-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return str(folder)


def tell_of_cpu(device: str) -> None:
    """One line on stderr where `auto` will take a CPU, whose times are easily mistaken for a GPU's."""
    if device == "auto" and not torch.cuda.is_available():
        print(
            f"{Path(sys.argv[0]).name}: torch sees no GPU, so the CPU is measured: good for comparing "
            "changes with small models (--model tiny or 0.5b), not for 7b; --device cpu asks for it",
            file=sys.stderr,
            flush=True,
        )


@dataclass
class Progress:
    """What one request has received."""

    tokens: int = 0
    first_token: float = 0.0  # time.monotonic()
    last_token: float = 0.0
    is_finished: bool = False


@dataclass
class Driver:
    """An engine and the requests given to it."""

    config: EngineConfig
    requests: dict[int, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        started = time.monotonic()
        self.engine = build_engine(self.config, self.receive)
        self.loop = self.engine.loop
        self.start_seconds = time.monotonic() - started

    @classmethod
    def of_model(cls, model: str, **settings: Any) -> "Driver":
        """`model`: a directory, or the name of one of SHAPES with weights that mean nothing."""
        load_format = "dummy" if model in SHAPES else "auto"
        return cls(EngineConfig(model=model_directory(model), load_format=load_format, **settings))

    def add(self, prompt: np.ndarray, max_tokens: int, **params: object) -> int:
        """Queue a prompt of token ids; returns the request's id."""
        req_id = len(self.requests) + 1
        self.requests[req_id] = Progress()
        ids = prompt.astype(np.int32).tobytes()
        names = b""
        if self.config.enable_prefix_caching:
            names = block_names(ids, self.engine.resolved.block_size)
        settings: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "seed": 0, **params}
        self.loop.take(
            [
                AddRequest(
                    req_id=req_id,
                    token_ids=ids,
                    block_names=names,
                    params=SamplingParams(max_tokens=max_tokens, **settings),  # type: ignore[arg-type]
                    arrival_ns=time.monotonic_ns(),
                )
            ]
        )
        return req_id

    def abort(self, req_id: int) -> None:
        self.loop.take([AbortRequests(req_ids=[req_id], reason=AbortReason.CLIENT)])

    def run(self) -> float:
        """Run until all requests are done; seconds it took."""
        started = time.monotonic()
        while self.loop.has_work():
            self.loop.step()
        return time.monotonic() - started

    def receive(self, output: StepOutput) -> None:
        now = time.monotonic()
        for req_id, count in zip(output.req_ids, output.counts, strict=True):
            if count:
                progress = self.requests[req_id]
                progress.first_token = progress.first_token or now
                progress.last_token = now
                progress.tokens += count
        for index, _, _ in output.finished:
            self.requests[output.req_ids[index]].is_finished = True
        assert not output.rejected, output.rejected

    def prompt(self, rng: np.random.Generator, length: int) -> np.ndarray:
        vocab_size = self.engine.limits.vocab_size
        return rng.integers(10, vocab_size - 10, length, dtype=np.int32)
