"""Batches for the sampling kernels, and the check that they choose what the sampler on the CPU chooses.

Used with emulated kernels on CPU tensors, and on a GPU.
"""

import itertools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api.sampling import SamplingParams
from engine.ops.philox import token_bits
from engine.plan import RowInit, StepResult
from engine.runner.device_sampler import DeviceSampler
from engine.runner.sampler import Sampler

EOS = [2, 7]


@dataclass
class Batch:
    """Requests on rows 1 .. S, with prompts and outputs of a few tokens, and logits for one step."""

    logits: Tensor  # [S, V] on the CPU
    params: list[SamplingParams]
    seed: int = 0
    masks: Tensor | None = None  # int32 [S, ceil(V / 32)]
    inits: list[RowInit] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        vocab_size = self.logits.shape[1]
        self.inits = []
        for row, params in enumerate(self.params, start=1):
            known = rng.integers(0, min(vocab_size + 2, 40), 12).astype(np.int32)
            self.inits.append(RowInit(row, params, known[: rng.integers(4, 12)], 3, 0, []))

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        return np.arange(1, len(self.params) + 1, dtype=np.int32)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        return np.array([len(init.token_ids) for init in self.inits], np.int64)

    def cpu_sampler(self) -> Sampler:
        sampler = Sampler(len(self.params) + 1, self.logits.shape[1], EOS, torch.device("cpu"))
        for init in self.inits:
            sampler.add(init)
        return sampler

    def device_sampler(self, device: torch.device, max_rows: int = 0) -> DeviceSampler:
        max_rows = max(max_rows, len(self.params) + 1)
        sampler = DeviceSampler(max_rows, self.logits.shape[1], EOS, device)
        for init in self.inits:
            sampler.add(init)
        return sampler


def check_batch(batch: Batch, device: torch.device, steps: int = 2) -> None:
    """A few steps on both: the same tokens, bad rows and log-probabilities.

    All steps see the same logits at increasing positions, so what the rows do with them differs.
    """
    on_cpu, on_device = batch.cpu_sampler(), batch.device_sampler(device)
    logits = batch.logits.to(device)
    masks = None if batch.masks is None else batch.masks.to(device)
    before = logits.clone()
    for step in range(steps):
        positions = batch.positions + step
        got = on_device.sample(logits, batch.rows, positions, masks).result()
        want = on_cpu.sample(
            batch.logits.float().clone(), batch.rows, positions, batch.masks
        ).result()
        assert_equal(got, want, batch.params)
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8)), "logits were changed"


def assert_equal(got: StepResult, want: StepResult, params: list[SamplingParams]) -> None:
    def flags(result: StepResult) -> npt.NDArray[np.bool_]:
        none = np.zeros(len(result.token_ids), np.bool_)
        return none if result.is_bad is None else result.is_bad

    wrong = np.flatnonzero((got.token_ids != want.token_ids) | (flags(got) != flags(want)))
    assert wrong.size == 0, "\n".join(
        f"row {i}: token {got.token_ids[i]}, expected {want.token_ids[i]}, "
        f"bad {flags(got)[i]}, expected {flags(want)[i]}: {params[i]}"
        for i in wrong[:5].tolist()
    )
    assert got.logprobs.keys() == want.logprobs.keys()
    for i, entry in want.logprobs.items():
        if flags(want)[i]:
            continue
        where = f"log-probabilities of row {i}"
        # far down, neighbours may round to one log-probability on one device only
        assert abs(got.logprobs[i].rank - entry.rank) <= entry.rank // 1000, where
        np.testing.assert_array_equal(got.logprobs[i].top_ids, entry.top_ids, err_msg=where)
        np.testing.assert_allclose(got.logprobs[i].sampled, entry.sampled, atol=1e-4, err_msg=where)
        np.testing.assert_allclose(
            got.logprobs[i].top_logprobs, entry.top_logprobs, atol=1e-4, err_msg=where
        )


def normal(shape: tuple[int, int], scale: float, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).normal(size=shape) * scale
    return torch.from_numpy(values.astype(np.float32))


def mixed_params(count: int, seed: int = 0, logprobs: bool = True) -> list[SamplingParams]:
    """Requests that between them use every stage, as many use few."""
    rng = np.random.default_rng(seed)
    params = []
    for i in range(count):
        edited = i % 3 == 2
        params.append(
            SamplingParams(
                seed=int(rng.integers(-(2**63), 2**63 - 1)),
                temperature=float(rng.choice([0.0, 0.6, 1.0, 1.0, 1.5])),
                top_k=int(rng.choice([-1, -1, 2, 20, 50])),
                top_p=float(rng.choice([1.0, 1.0, 0.95, 0.5])),
                min_p=float(rng.choice([0.0, 0.0, 0.05])),
                repetition_penalty=float(rng.choice([1.0, 1.2, 0.8])) if edited else 1.0,
                presence_penalty=0.4 if edited and i % 2 else 0.0,
                frequency_penalty=float(rng.choice([0.0, 0.7, -0.3])) if edited else 0.0,
                logit_bias={i % 30: 4.0, 10**6: 1.0} if edited and i % 4 == 0 else {},
                min_tokens=int(rng.integers(0, 12)) if edited else 0,
                stop_token_ids=[3, 10**6] if edited else [],
                logprobs=[None, 0, 5, 20][i % 4] if logprobs else None,
            )
        )
    return params


def truncations(seed: int = 0, temperature: float = 1.0) -> list[SamplingParams]:
    """One row each for the ways of removing tokens, the extreme ones above all."""
    settings = [
        {},
        {"top_k": 2},
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 1000, "top_p": 0.95},
        {"top_k": 1024},
        {"top_k": 1025},  # past the candidates
        {"top_k": 3000, "top_p": 0.7},
        {"top_k": 3000, "min_p": 0.2},
        {"top_p": 1e-12},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.99},
        {"top_p": 1.0 - 1e-9},
        {"min_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.02, "top_p": 0.9},
        {"min_p": 1e-4, "top_p": 0.97, "top_k": 40},
    ]
    return [
        SamplingParams(seed=1000 * seed + i, temperature=temperature, **setting)  # type: ignore[arg-type]
        for i, setting in enumerate(settings)
    ]


def candidate_counts(seed: int = 0) -> list[SamplingParams]:
    """One row each for numbers of candidates, at the edges of what is compared all with all."""
    counts = [1, 2, 63, 90, 100, 110, 120, 126, 127, 128, 129, 140, 255, 400]
    return [
        SamplingParams(seed=1000 * seed + i, top_k=top_k, top_p=top_p, temperature=temperature)
        for i, (top_k, (top_p, temperature)) in enumerate(
            itertools.product(counts, [(1.0, 1.0), (0.8, 1.7), (0.999, 0.01)])
        )
    ]


def rows_of(logits: npt.NDArray[np.float32] | Tensor, count: int) -> Tensor:
    """The same row [V] for all of `count` requests."""
    return torch.as_tensor(logits).expand(count, -1).contiguous()


def peculiar_rows(vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Rows [V] that are hard on shortcuts."""
    rng = np.random.default_rng(seed)
    plain = torch.from_numpy((rng.normal(size=vocab_size) * 2).astype(np.float32))
    sparse = plain.clone()
    sparse[torch.from_numpy(rng.random(vocab_size) < 0.98)] = -torch.inf
    # all that counts lies between the parts of the row that the draw looks at first
    plateau = torch.full((vocab_size,), -20.0)
    plateau[vocab_size // 8 : vocab_size * 3 // 4] = (
        plain[vocab_size // 8 : vocab_size * 3 // 4] / 100
    )
    peak = plain.clone()
    peak[vocab_size // 2] = 60.0
    # as many groups as candidates are asked for reach 1, no others come near
    far = plain - 200.0
    far[:: max(vocab_size // 64, 1)] = 1.0
    merging = torch.from_numpy(np.nextafter(np.float32(3), np.float32(9)) * np.ones(vocab_size))
    merging = torch.where(plain > 0, merging.float(), 3.0)
    last = plain.clone()
    last[-1] = plain.max() + 1.0
    return {
        "all equal": torch.zeros(vocab_size),
        "two values": torch.from_numpy(rng.integers(0, 2, vocab_size).astype(np.float32)),
        "ties": torch.round(plain * 2) / 2,
        "flat": plain / 50,
        "steep": plain * 20,
        "far from zero": plain + 3000,
        "signed zeros": torch.where(plain > 0, 0.0, -0.0),
        "mostly forbidden": sparse,
        "plateau": plateau,
        "peak": peak,
        "far apart": far,
        "neighbours": merging,
        "best at the end": last,
    }


def coarse_bits(seeds: object, position: int, token_ids: object) -> npt.NDArray[np.int64]:
    return np.asarray(token_bits(np.array(seeds), np.array(position), np.array(token_ids))[0])


def unlucky_peaks(count: int, vocab_size: int) -> Batch:
    """Each row has one likely token, whose noise is about the least there is: others win, of which the
    bounds from coarse bits tell little."""
    peak = vocab_size // 3
    batch = Batch(normal((count, vocab_size), 0.1, 4), [SamplingParams(seed=0)] * count)
    batch.logits[:, peak] += float(np.log(vocab_size)) + 1.5
    seeds = np.arange(100_000)
    for i, position in enumerate(batch.positions.tolist()):
        unlucky = seeds[coarse_bits(seeds, position, [peak]) > 65_400]
        batch.params[i] = batch.inits[i].params = SamplingParams(seed=int(unlucky[i]))
    return batch


def equal_bounds(count: int, vocab_size: int, **setting: float) -> Batch:
    """Logits that make up for the coarse bits: any token may win."""
    params = [SamplingParams(seed=i, **setting) for i in range(count)]  # type: ignore[arg-type]
    batch = Batch(torch.zeros((count, vocab_size)), params)
    for i, position in enumerate(batch.positions.tolist()):
        bits = torch.from_numpy(coarse_bits(i, position, np.arange(vocab_size)))
        batch.logits[i] = torch.log(bits.clamp(min=1).double()).float()
    return batch


def hard_draws(vocab_size: int) -> dict[str, tuple[Tensor, list[SamplingParams]]]:
    """Logits [S, V] and requests that remove no token, whose winner is not where it is expected."""

    def requests(count: int, temperature: float = 1.0) -> list[SamplingParams]:
        return [SamplingParams(seed=77 * i, temperature=temperature) for i in range(count)]

    plain = normal((60, vocab_size), 0.1, 4)
    peak = plain.clone()
    peak[:, vocab_size // 3] += float(np.log(vocab_size))  # often chosen, often with little luck
    two = plain.clone()
    two[:, [0, vocab_size - 1]] += 25.0  # nothing else counts; in two slices
    alone = torch.full((6, vocab_size), -torch.inf)
    alone[torch.arange(6), torch.arange(6) * (vocab_size - 1) // 5] = 1.0
    steps = torch.round(plain[:4] * 20)
    return {
        "a peak without luck": (peak, requests(60)),
        "two peaks": (two, requests(60)),
        "one token left": (alone, requests(6)),
        "equals whose noise is rounded away in float": (
            torch.full((3, vocab_size), 1e9),
            requests(3),
        ),
        "huge": (plain[:3] * 1e31, requests(3)),
        "products that overflow": (plain[:2] * 1e36, requests(2, 0.01)),
        "hot": (steps, requests(4, 2.0)),
        "cold": (steps, requests(4, 2e-5)),
        "very negative": (steps - 1e6, requests(4)),
    }


def nucleus_ends(count: int, vocab_size: int) -> dict[str, tuple[Tensor, dict[str, float]]]:
    """Logits [count, V] and settings for which the nucleus ends exactly at its limit, or would if all
    weights were added up in float, or at another scale of logits."""
    two = torch.full((count, vocab_size), -100.0)
    two[:, [7, vocab_size - 9]] = 0.0
    tail = two.clone()
    tail[:, 20] = -28.0  # below 2**-40, and above the last bit of a sum of doubles
    equals = torch.full((count, vocab_size), -60.0)
    equals[:, : 64 * 64 : 64] = 0.0  # as many groups have one as candidates are asked for
    beyond_float = equals.clone()
    beyond_float[:, 5::1000] = -17.5
    many = torch.full((count, vocab_size), -60.0)
    many[:, : 64 * 200 : 64] = 0.0  # more than are compared all with all
    many[:, 5::1000] = -17.5
    return {
        "half of two": (two, {"top_p": 0.5}),
        "half of two, and a tail": (tail, {"top_p": 0.5}),
        "half of two, a tail and top_k": (tail, {"top_p": 0.5, "top_k": 20}),
        "three quarters of 64": (equals, {"top_p": 0.75}),
        "one of 64, and a tail": (beyond_float, {"top_p": 1 / 64}),
        "one of 200, and a tail": (many, {"top_p": 1 / 200}),
        "far from zero": (
            normal((count, vocab_size), 0.01) + 1e4,
            {"top_p": 0.02, "temperature": 0.01},
        ),
        "too far to know": (
            normal((count, vocab_size), 1e-2) + 1e4,
            {"top_p": 0.02, "temperature": 5e-3},
        ),
    }


def poisoned(shape: tuple[int, int]) -> Tensor:
    """Rows that are bad, each between good ones."""
    logits = normal(shape, 2.0, 3)
    logits[1, -1] = torch.nan
    logits[3, 0] = torch.inf
    logits[5] = -torch.inf
    logits[7] = torch.nan
    logits[9, shape[1] // 2] = -torch.nan
    return logits
