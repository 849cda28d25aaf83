"""The sampling kernels on a GPU against the sampler on the CPU: equal tokens, draw for draw."""

import numpy as np
import pytest
import torch

from engine.api.sampling import SamplingParams
from engine.ops.sample import DrawParams, reference
from engine.ops.sample_cuda import SamplingClass
from engine.ops.token_masks import pack
from engine.plan import RowInit
from engine.runner.device_sampler import DeviceSampler
from tests.gpu.conftest import Record
from tests.kernels.sampling_cases import (
    Batch,
    candidate_counts,
    check_batch,
    equal_bounds,
    hard_draws,
    mixed_params,
    normal,
    nucleus_ends,
    peculiar_rows,
    poisoned,
    rows_of,
    truncations,
    unlucky_peaks,
)

NAMES = list(peculiar_rows(64))
SIZES = [
    (1, 152_064),
    (2, 128_256),
    (33, 50_257),  # rows begin anywhere
    (64, 32_000),
    (64, 151_936),
    (256, 8_001),
    (7, 262_144),
    (3, 1),
    (5, 65),
]


@pytest.mark.parametrize(("num_rows", "vocab_size"), SIZES)
def test_mixed_requests(device: torch.device, num_rows: int, vocab_size: int) -> None:
    batch = Batch(normal((num_rows, vocab_size), 2.5, seed=num_rows), mixed_params(num_rows))
    check_batch(batch, device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [152_064, 50_257])
def test_sixteen_bit_logits(device: torch.device, dtype: torch.dtype, vocab_size: int) -> None:
    batch = Batch(normal((33, vocab_size), 2.5).to(dtype), mixed_params(33, seed=1))
    check_batch(batch, device)


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("vocab_size", [40_000, 152_064])
def test_truncations(device: torch.device, scale: float, vocab_size: int) -> None:
    params = truncations(seed=int(scale * 100))
    check_batch(Batch(normal((len(params), vocab_size), scale), params), device)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("vocab_size", [5003, 128_256])
def test_peculiar_rows(device: torch.device, name: str, vocab_size: int) -> None:
    params = truncations(seed=3, temperature=0.7)
    row = peculiar_rows(vocab_size)[name]
    check_batch(Batch(rows_of(row, len(params)), params), device, steps=1)


@pytest.mark.parametrize("name", list(hard_draws(8)))
def test_hard_draws(device: torch.device, name: str) -> None:
    logits, params = hard_draws(50_000)[name]
    check_batch(Batch(logits, params), device, steps=1)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 400.0])
def test_numbers_of_candidates(device: torch.device, scale: float) -> None:
    params = candidate_counts()
    logits = normal((len(params), 152_064), scale)
    logits[::4, 50_000:] = -torch.inf
    logits[1::4] = torch.round(logits[1::4])
    check_batch(Batch(logits, params), device, steps=1)


def test_draws_whose_bounds_tell_little(device: torch.device) -> None:
    check_batch(unlucky_peaks(100, 50_000), device, steps=1)
    for setting in ({}, {"top_k": 6000}, {"top_p": 0.999}, {"min_p": 1e-3}):
        check_batch(equal_bounds(10, 50_000, **setting), device, steps=1)


@pytest.mark.parametrize("name", list(nucleus_ends(1, 13_000)))
def test_a_nucleus_that_ends_at_its_limit(device: torch.device, name: str) -> None:
    logits, setting = nucleus_ends(60, 50_000)[name]
    params = [SamplingParams(seed=i, **setting) for i in range(len(logits))]  # type: ignore[arg-type]
    check_batch(Batch(logits, params), device, steps=1)


def test_equals_the_torch_reference_on_the_same_device(device: torch.device) -> None:
    params = truncations(seed=9)
    batch = Batch(normal((len(params), 30_011), 2.0), params)
    logits = batch.logits.to(device)
    draw = DrawParams(
        np.array([p.seed for p in params], np.int64),
        batch.positions,
        np.array([max(p.top_k, 0) for p in params], np.int64),
        np.array([p.top_p for p in params]),
        np.array([p.min_p for p in params]),
    )
    output = batch.device_sampler(device).sample(logits, batch.rows, batch.positions)
    assert output.token_ids.tolist() == reference(logits, draw).tolist()


def test_many_draws_follow_the_softmax(device: torch.device) -> None:
    """20,000 rows of one distribution; 99.9% quantile of chi-square with 7 degrees of freedom."""
    probabilities = np.array([0.02, 0.3, 0.11, 0.2, 0.04, 0.13, 0.12, 0.08])
    num_draws = 20_000
    row = torch.log(torch.from_numpy(probabilities)).float().to(device)
    sampler = DeviceSampler(num_draws, 8, [], device)
    sampler.add(RowInit(1, SamplingParams(seed=77), np.array([0], np.int32), 1, 0, []))
    sampler.flush()
    rows = torch.ones(num_draws, dtype=torch.int32, device=device)
    positions = torch.arange(num_draws, dtype=torch.int32, device=device)
    token_ids, _ = sampler.sample_on_device(
        row.expand(num_draws, 8).contiguous(), rows, positions, SamplingClass.SIMPLE
    )
    counts = torch.bincount(token_ids, minlength=8).cpu().numpy()
    expected = num_draws * probabilities
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_bad_rows_keep_to_themselves(device: torch.device) -> None:
    check_batch(Batch(poisoned((33, 20_001)), mixed_params(33, seed=5)), device)


def test_grammar_masks(device: torch.device) -> None:
    masks = torch.from_numpy(np.random.default_rng(1).random((33, 50_257)) < 0.01)
    masks[4] = False
    batch = Batch(normal((33, 50_257), 2.0), mixed_params(33), masks=pack(masks))
    check_batch(batch, device)


def test_penalties_grow_with_the_output(device: torch.device) -> None:
    logits = normal((16, 3001), 0.5)
    logits[:, 11] += 6.0
    check_batch(Batch(logits, mixed_params(16, seed=8)), device, steps=30)


def test_a_row_s_result_does_not_depend_on_its_company(device: torch.device) -> None:
    """Bitwise, log-probabilities included: alone, in 64, and in 64 in another order."""
    batch = Batch(normal((64, 128_256), 1.5), mixed_params(64, seed=2))
    logits = batch.logits.to(device)
    everyone = np.arange(64)
    shuffled = np.random.default_rng(0).permutation(64)

    def run(order: np.ndarray) -> dict[int, tuple[object, ...]]:
        sampler = batch.device_sampler(device)
        output = sampler.sample(logits[order], batch.rows[order], batch.positions[order]).result()
        results: dict[int, tuple[object, ...]] = {}
        for place, i in enumerate(order.tolist()):
            entry = output.logprobs.get(place)
            extra = (
                ()
                if entry is None
                # columns beyond a row's own number depend on what others want
                else (
                    entry.sampled,
                    entry.rank,
                    entry.top_ids.tolist(),
                    entry.top_logprobs.tolist(),
                )
            )
            results[i] = (int(output.token_ids[place]), *extra)
        return results

    together = run(everyone)
    assert run(shuffled) == together
    for i in range(0, 64, 5):
        assert run(everyone[i : i + 1])[i] == together[i]


@pytest.mark.parametrize("which", list(SamplingClass))
def test_a_graph_serves_new_requests(
    device: torch.device, graph_replay: Record, which: SamplingClass
) -> None:
    """Captured once; then other parameters, seeds, rows, positions and logits."""
    num_rows, vocab_size = 12, 20_003
    sampler = DeviceSampler(40, vocab_size, [2, 7], device)
    sampler.flush()
    logits = torch.zeros((num_rows, vocab_size), device=device)
    rows = torch.zeros(num_rows, dtype=torch.int32, device=device)
    positions = torch.ones(num_rows, dtype=torch.int32, device=device)
    last_token = torch.zeros(40, dtype=torch.int64, device=device)
    replay = graph_replay(
        lambda: sampler.sample_on_device(logits, rows, positions, which, last_token=last_token)
    )
    for round_number in range(3):
        if which is SamplingClass.GREEDY:
            params = [SamplingParams(seed=i, temperature=0.0) for i in range(num_rows)]
        elif which is SamplingClass.SIMPLE:
            params = truncations(seed=round_number)[round_number:][:num_rows]
        else:
            params = mixed_params(num_rows, seed=round_number, logprobs=False)
        batch = Batch(normal((num_rows, vocab_size), 2.0, round_number), params, round_number)
        own_rows = (batch.rows + 2 * round_number).astype(np.int32)
        for init, row in zip(batch.inits, own_rows.tolist(), strict=True):
            sampler.free(row)
            init.row = row
            sampler.add(init)
        cpu = Batch(batch.logits, params, round_number).cpu_sampler()
        for step in range(3):
            sampler.flush()
            logits.copy_(batch.logits)
            rows.copy_(torch.from_numpy(own_rows))
            positions.copy_(torch.from_numpy(batch.positions + step))
            replay()
            want = cpu.sample(batch.logits.clone(), batch.rows, batch.positions + step)
            assert sampler.token_ids[:num_rows].tolist() == want.token_ids.tolist()
            assert sampler.is_bad[:num_rows].tolist() == want.is_bad.tolist()
            assert last_token[own_rows].tolist() == want.token_ids.tolist()


def test_log_probabilities_in_a_graph(device: torch.device, graph_replay: Record) -> None:
    batch = Batch(normal((9, 50_257), 2.0), mixed_params(9))
    sampler = batch.device_sampler(device)
    sampler.flush()
    logits = torch.zeros((9, 50_257), device=device)
    rows = torch.from_numpy(batch.rows).to(device)
    token_ids = torch.zeros(9, dtype=torch.int64, device=device)
    is_bad = torch.zeros(9, dtype=torch.bool, device=device)
    results = []
    replay = graph_replay(
        lambda: results.append(
            sampler.logprobs_on_device(logits, rows, token_ids, is_bad, num_top=20)
        )
    )
    logits.copy_(batch.logits)
    token_ids.copy_(torch.arange(9) * 5000)
    replay()
    want = torch.log_softmax(batch.logits, -1)
    for i, params in enumerate(batch.params):
        if params.logprobs is None:
            continue
        assert results[-1].top_ids[i].tolist() == want[i].topk(20).indices.tolist()
        sampled = want[i, 5000 * i]
        assert abs(float(results[-1].sampled[i]) - float(sampled)) < 1e-4
        rank = int((want[i] > sampled).sum()) + 1
        assert abs(int(results[-1].rank[i]) - rank) <= rank // 1000


def test_log_probabilities_of_equals_come_by_id(device: torch.device) -> None:
    params = [SamplingParams(seed=1, temperature=0.0, logprobs=20)] * 2
    logits = torch.zeros((2, 150_000))
    logits[1, 149_990:] = 1.0
    check_batch(Batch(logits, params), device, steps=1)
