"""Two thousand random requests on the GPU engine, graphs and overlap on: nothing leaks, nothing is lost.

Half of them use what only some rows need: penalties, logit bias, log-probabilities, truncation. Prompts
share beginnings, and the KV cache is small enough for preemptions.
"""

import gc
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.api.messages import FinishReason
from engine.models import small_steps
from engine.ops import jit
from tests.engine_cpu.harness import Collected, Harness
from tests.engine_cpu.tiny_models import EOS_ID, make_tiny

NUM_REQUESTS = 2000
VOCAB = 512
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_tiny("qwen3", tmp_path_factory.mktemp("stress"), tokenizer=False, **SHAPE)


def random_prompt(rng: np.random.Generator, beginnings: list[list[int]]) -> list[int]:
    """Mostly short, some of several hundred tokens; a third begin like others."""
    length = int(rng.integers(1, 60) if rng.random() < 0.8 else rng.integers(60, 500))
    start = beginnings[rng.integers(len(beginnings))] if rng.random() < 0.3 else []
    return [*start[: rng.integers(1, 200)], *rng.integers(3, VOCAB, length).tolist()]


def random_sampling(rng: np.random.Generator) -> dict[str, object]:
    """Settings of every kind, alone and together."""
    params: dict[str, object] = {}
    if rng.random() < 0.6:
        params |= {"temperature": float(rng.uniform(0.1, 2)), "seed": int(rng.integers(2**62))}
        choices = (("top_k", int(rng.integers(1, 100))), ("top_p", float(rng.uniform(0.1, 1))))
        params |= {name: value for name, value in choices if rng.random() < 0.4}
        if rng.random() < 0.2:
            params["min_p"] = float(rng.uniform(0.01, 0.3))
    if rng.random() < 0.3:
        params |= {"frequency_penalty": 0.5, "presence_penalty": -0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.2:
        params["logit_bias"] = {
            int(i): float(rng.uniform(-5, 5)) for i in rng.integers(3, VOCAB, 9)
        }
    if rng.random() < 0.2:
        params["logprobs"] = int(rng.integers(0, 6))
    if rng.random() < 0.3:
        params |= {"ignore_eos": False, "stop_token_ids": rng.integers(3, VOCAB, 20).tolist()}
        params["min_tokens"] = int(rng.integers(0, 4))
    return params


def check(result: Collected, max_tokens: int, params: dict[str, object]) -> None:
    """A request's output is whole, or a whole beginning if it was aborted."""
    tokens = result.token_ids
    assert result.rejected is None
    assert all(0 <= token < VOCAB for token in tokens)
    assert all(math.isfinite(value) and value <= 0 for value in result.logprobs)
    assert len(result.logprobs) == (len(tokens) if "logprobs" in params else 0)
    match result.finish:
        case FinishReason.LENGTH:
            assert len(tokens) == max_tokens
        case FinishReason.STOP:
            assert tokens[-1] in {*params["stop_token_ids"], EOS_ID}
            assert params["min_tokens"] <= len(tokens) <= max_tokens
        case other:
            assert other is FinishReason.ABORT
            assert len(tokens) <= max_tokens


def run_wave(harness: Harness, rng: np.random.Generator, first_id: int, count: int) -> list[int]:
    """Requests come in bursts, some are aborted at random. Returns how many ended in which way."""
    beginnings = [rng.integers(3, VOCAB, 200).tolist() for _ in range(5)]
    asked: dict[int, tuple[int, dict[str, object]]] = {}
    live: list[int] = []
    for req_id in range(first_id, first_id + count):
        max_tokens, params = int(rng.integers(1, 80)), random_sampling(rng)
        params["min_tokens"] = min(int(params.get("min_tokens", 0)), max_tokens)  # type: ignore[call-overload]
        asked[req_id] = (max_tokens, params)
        harness.add(req_id, random_prompt(rng, beginnings), max_tokens=max_tokens, **params)
        live.append(req_id)
        for _ in range(int(rng.choice([0, 0, 0, 1, 2, 5]))):
            harness.step()
        if rng.random() < 0.15:
            harness.abort(live.pop(int(rng.integers(len(live)))))
    results = harness.run(max_steps=100_000)
    for req_id, (max_tokens, params) in asked.items():
        check(results[req_id], max_tokens, params)
    harness.assert_empty()
    ends = [results[req_id].finish for req_id in asked]
    return [ends.count(reason) for reason in FinishReason]


@dataclass(frozen=True)
class Kind:
    """Of an engine."""

    kv_cache_dtype: str = "auto"
    max_num_seqs: int = 48
    num_blocks: int = 60
    rows_in_one_kernel: int = 0  # small_steps.MOST_ROWS


KINDS = {
    "auto": Kind(),
    "fp8": Kind(kv_cache_dtype="fp8"),
    "few-rows-in-one-kernel": Kind(max_num_seqs=4, num_blocks=16, rows_in_one_kernel=4),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_two_thousand_random_requests(
    model_dir: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_steps, "MOST_ROWS", kind.rows_in_one_kernel)
    harness = Harness(
        model_dir,
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        overlap="on",
        num_blocks=kind.num_blocks,
        block_size=64,
        max_num_seqs=kind.max_num_seqs,
        max_num_batched_tokens=512,
        admission="greedy",
        kv_cache_dtype=kind.kv_cache_dtype,
        check_invariants=False,
    )
    steps = harness.loop.runner.small_steps
    on_hopper = jit.device_arch() == "sm_90a"
    assert (steps is not None) == (kind.rows_in_one_kernel > 0 and on_hopper)
    rng = np.random.default_rng(20)
    sampler = harness.loop.runner.sampler
    gc.collect()
    before = torch.cuda.memory_allocated()
    ends = np.array(run_wave(harness, rng, 0, NUM_REQUESTS // 2))
    after_first = torch.cuda.memory_allocated()
    ends += run_wave(harness, rng, NUM_REQUESTS // 2, NUM_REQUESTS // 2)
    after_second = torch.cuda.memory_allocated()
    by_reason = dict(zip([reason.name for reason in FinishReason], ends.tolist(), strict=True))
    print(
        f"ended {by_reason}; {harness.loop.steps} steps, {harness.scheduler.preemptions} preemptions; "
        f"{after_first - before} bytes more after the first half, {after_second - before} at the end"
    )
    assert by_reason["ERROR"] == 0
    assert min(by_reason[name] for name in ("STOP", "LENGTH", "ABORT")) > 50
    assert harness.loop.nan_events == harness.loop.failed_steps == 0
    assert harness.scheduler.preemptions > 0
    # only tables of penalties and biases stay, to be used again; a step's output may be alive, too
    allowed = sampler.most_table_bytes + 2**22
    assert after_first - before <= allowed
    assert after_second - before <= allowed
