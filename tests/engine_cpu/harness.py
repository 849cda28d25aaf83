"""A whole engine in the test's process, driven step by step."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.api.config import EngineConfig
from engine.api.hashing import block_names
from engine.api.messages import AbortReason, AbortRequests, AddRequest, FinishReason, StepOutput
from engine.api.sampling import SamplingParams
from engine.build import build_engine


@dataclass
class Collected:
    """What one request received."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    rejected: str | None = None
    # by prompt token from the second on: (logprob, rank, [(id, logprob) of the best])
    prompt_logprobs: list[tuple[float, int, list[tuple[int, float]]]] = field(default_factory=list)


class Harness:
    """Builds an engine on a model directory and collects its output by request."""

    def __init__(self, model: Path, **settings: object) -> None:
        defaults: dict[str, object] = {
            "dtype": "float32",
            "cpu_threads": 1,
            "num_blocks": 256,
            "check_invariants": True,
        }
        config = EngineConfig(model=str(model), **{**defaults, **settings})  # type: ignore[arg-type]
        self.results: dict[int, Collected] = {}
        self.engine = build_engine(config, self.receive)
        self.loop = self.engine.loop
        self.block_size = self.engine.resolved.block_size

    @property
    def scheduler(self):
        return self.loop.scheduler

    def add(self, req_id: int, prompt: list[int], **params: object) -> None:
        ids = np.asarray(prompt, np.int32).tobytes()
        params = {"temperature": 0.0, "max_tokens": 16, "seed": 0, "ignore_eos": True, **params}
        self.results[req_id] = Collected()
        caching = self.engine.config.enable_prefix_caching
        request = AddRequest(
            req_id=req_id,
            token_ids=ids,
            block_names=block_names(ids, self.block_size) if caching else b"",
            params=SamplingParams(**params),
            arrival_ns=time.monotonic_ns(),
        )
        self.loop.take([request])

    def abort(self, *req_ids: int) -> None:
        self.loop.take([AbortRequests(req_ids=list(req_ids), reason=AbortReason.CLIENT)])

    def step(self) -> None:
        self.loop.step()

    def run(self, max_steps: int = 20_000) -> dict[int, Collected]:
        for _ in range(max_steps):
            if not self.loop.has_work():
                break
            self.loop.step()
        else:
            raise AssertionError(f"the engine still has work after {max_steps} steps")
        self.loop.step()  # what the last step left to say, e.g. of aborts
        return self.results

    def generate(self, prompt: list[int], **params: object) -> Collected:
        req_id = max(self.results, default=0) + 1
        self.add(req_id, prompt, **params)
        return self.run()[req_id]

    def receive(self, output: StepOutput) -> None:
        for span in output.prompt_logprobs:
            result = self.results[span.req_id]
            assert not result.token_ids, "the prompt's log-probabilities come before tokens"
            assert span.first == 1 + len(result.prompt_logprobs), "a prompt token left out or twice"
            values = np.frombuffer(span.logprobs, np.float32)
            ranks = np.frombuffer(span.ranks, np.int32)
            ids = np.frombuffer(span.top_ids, np.int32).reshape(len(values), -1)
            best = np.frombuffer(span.top_logprobs, np.float32).reshape(len(values), -1)
            for i in range(len(values)):
                top = list(zip(ids[i].tolist(), best[i].tolist(), strict=True))
                result.prompt_logprobs.append((float(values[i]), int(ranks[i]), top))
        position = 0
        spans = []
        for req_id, count in zip(output.req_ids, output.counts, strict=True):
            result = self.results[req_id]
            assert result.finish is None, f"tokens after the end of request {req_id}"
            result.token_ids += output.token_ids[position : position + count]
            spans.append((position, position + count, result))
            position += count
        assert position == len(output.token_ids)
        for entry in output.logprobs:
            result = next(r for start, end, r in spans if start <= entry.index < end)
            result.logprobs.append(entry.sampled)
            ids = np.frombuffer(entry.top_ids, np.int32).tolist()
            values = np.frombuffer(entry.top_logprobs, np.float32).tolist()
            result.top_logprobs.append(list(zip(ids, values, strict=True)))
        for index, reason, stop_token in output.finished:
            result = self.results[output.req_ids[index]]
            assert result.finish is None, "two terminals"
            result.finish, result.stop_token = reason, stop_token
        for req_id, cached, _ in output.started:
            self.results[req_id].cached_tokens = cached
        for req_id, code, _ in output.rejected:
            assert self.results[req_id].rejected is None
            self.results[req_id].rejected = code

    def assert_empty(self) -> None:
        """Nothing runs, nothing waits, every block can be taken again."""
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_waiting == 0
        assert self.scheduler.kv.pool.num_free == self.engine.resolved.num_blocks - 1
        self.scheduler.check_invariants()
