"""A whole engine without server or tokenizer, for measurements: token ids in, counts and times out."""

import dataclasses
import sys
import time
from argparse import ArgumentParser
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.api.config import EngineConfig, arg_of
from engine.api.hashing import block_names
from engine.api.messages import AbortReason, AbortRequests, AddRequest, FinishReason, StepOutput
from engine.api.sampling import SamplingParams
from engine.build import build_engine
from engine.models.config import ModelConfig
from scripts.bench_command import CannotMeasure

# Of well-known models, and a tiny one: their config.json, so that speed can be measured without weights.
SHAPES = {name: Path(__file__).parent / "shapes" / name for name in ("7b", "1.5b", "0.5b", "tiny")}
CHOICES = {f.name: arg_of(f).choices for f in dataclasses.fields(EngineConfig)}


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
        choices=CHOICES["device"],
        help="auto, cuda or cpu; auto: a GPU if torch sees one, else the CPU, which is not for 7b",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=CHOICES["dtype"],
        help="arithmetic and weights, as of serve.py; float32 on a GPU is many times slower "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=CHOICES["kv_cache_dtype"],
        help="keys and values, as of serve.py; fp8 takes half the memory, and rounds more "
        "(default: the model's dtype)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")


def model_directory(name: str) -> str:
    """A directory for --model: `name` itself, or the one of a known shape."""
    return str(SHAPES.get(name, name))


def model_length(name: str) -> int:
    """Tokens that --model takes, prompt and answer together. Raises ConfigError."""
    return ModelConfig.from_directory(model_directory(name)).max_model_len


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


@dataclass
class Driver:
    """An engine and the requests given to it."""

    config: EngineConfig
    requests: dict[int, Progress] = field(default_factory=dict)
    unfinished: set[int] = field(default_factory=set)  # of the requests; aborted ones not counted

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
        self.unfinished.add(req_id)
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
        self.unfinished.discard(req_id)
        self.loop.take([AbortRequests(req_ids=[req_id], reason=AbortReason.CLIENT)])

    def run(self) -> float:
        """Run until all requests are done; seconds it took. Raises CannotMeasure if one was not served."""
        started = time.monotonic()
        while self.loop.has_work():
            self.loop.step()
        seconds = time.monotonic() - started
        self.check_finished()
        return seconds

    def check_finished(self) -> None:
        """Call when no work is left. Raises CannotMeasure if a request was refused or broken off."""
        if self.unfinished:
            self.loop.send_output()  # no step does it for a request that was refused at once
            count = len(self.unfinished)
            raise CannotMeasure(f"{count} requests were not finished: no figures", exit_code=1)

    def receive(self, output: StepOutput) -> None:
        now = time.monotonic()
        for req_id, count in zip(output.req_ids, output.counts, strict=True):
            if count:
                progress = self.requests[req_id]
                progress.first_token = progress.first_token or now
                progress.last_token = now
                progress.tokens += count
        for index, reason, _ in output.finished:
            req_id = output.req_ids[index]
            if reason == FinishReason.ERROR:
                raise CannotMeasure(f"request {req_id} failed with its step", exit_code=1)
            if reason == FinishReason.LENGTH:
                self.unfinished.discard(req_id)
        for req_id, code, message in output.rejected:
            raise CannotMeasure(f"request {req_id} was refused: {code}: {message}", exit_code=1)

    def prompt(self, rng: np.random.Generator, length: int) -> np.ndarray:
        vocab_size = self.engine.limits.vocab_size
        return rng.integers(10, vocab_size - 10, length, dtype=np.int32)
