"""Sampling: all stages of a step, for batches and vocabularies that people serve."""

import numpy as np
import torch

from engine.api.sampling import SamplingParams
from engine.plan import RowInit
from engine.runner.device_sampler import DeviceSampler
from scripts.bench_cases import Case, Launch

KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(seed=1, temperature=0.0),
    "draw": SamplingParams(seed=1),
    "top-k 50, top-p 0.9": SamplingParams(seed=1, top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(seed=1, top_p=0.9),
    "flat top-p 0.9": SamplingParams(seed=1, top_p=0.9, temperature=2.0),  # past the candidates
    "top-k 50, penalties": SamplingParams(seed=1, top_k=50, repetition_penalty=1.1),
}
SIZES = [(1, 152_064), (8, 152_064), (64, 152_064), (256, 152_064), (64, 262_144)]
REPORTED = 20  # log-probabilities


def bench_cases() -> list[Case]:
    cases = [
        sampling_case(name, num_rows, vocab_size)
        for name in KINDS
        for num_rows, vocab_size in SIZES
    ]
    return [*cases, *(logprobs_case(num_rows, 152_064) for num_rows in (1, 64))]


def make_sampler(params: SamplingParams, num_rows: int, vocab_size: int) -> DeviceSampler:
    sampler = DeviceSampler(num_rows + 1, vocab_size, [2], torch.device("cuda"))
    for row in range(1, num_rows + 1):
        known = np.arange(row, row + 500, dtype=np.int32)
        sampler.add(RowInit(row, params, known, 400, 0, []))
    sampler.flush()
    return sampler


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """As peaked as a language model's: the weight of a token falls with rank ** -1.5, so that 60 tokens
    share 90% of the probability. At temperature 2, 100,000 do."""
    ranks = torch.arange(1, vocab_size + 1, device="cuda", dtype=torch.float32)
    order = torch.rand(num_rows, vocab_size, device="cuda").argsort(-1)
    return (-1.5 * ranks.log() + 10)[order]


def sampling_case(kind: str, num_rows: int, vocab_size: int) -> Case:
    params = KINDS[kind]

    def setup(copies: int) -> list[Launch]:
        sampler = make_sampler(params, num_rows, vocab_size)
        host_rows = np.arange(1, num_rows + 1, dtype=np.int32)
        which = sampler.sampling_class(host_rows)
        rows = torch.from_numpy(host_rows).cuda()
        positions = torch.full_like(rows, 500)

        def launch_on(logits: torch.Tensor) -> Launch:
            return lambda: sampler.sample_on_device(logits, rows, positions, which)

        return [launch_on(random_logits(num_rows, vocab_size)) for _ in range(copies)]

    counts = 2 if params.has_penalties else 0  # bytes of a token's entry in its row's table
    name = f"sample {kind}, {num_rows} x {vocab_size} float32"
    return Case(name, setup, num_bytes=num_rows * vocab_size * (4 + counts))


def logprobs_case(num_rows: int, vocab_size: int) -> Case:
    params = SamplingParams(seed=1, temperature=0.0, logprobs=REPORTED)

    def setup(copies: int) -> list[Launch]:
        sampler = make_sampler(params, num_rows, vocab_size)
        rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device="cuda")
        is_bad = torch.zeros(num_rows, dtype=torch.bool, device="cuda")

        def launch_on(logits: torch.Tensor) -> Launch:
            best = logits.argmax(-1)
            return lambda: sampler.logprobs_on_device(logits, rows, best, is_bad, REPORTED)

        return [launch_on(random_logits(num_rows, vocab_size)) for _ in range(copies)]

    name = f"logprobs {REPORTED}, {num_rows} x {vocab_size} float32"
    return Case(name, setup, num_bytes=num_rows * vocab_size * 4)
