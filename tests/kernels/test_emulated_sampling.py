"""The sampling kernels on the CPU, through their launchers, against the sampler for CPU tensors.

Both draw from the same noise, so tokens must be equal one by one.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.api.sampling import MAX_BIASES, SamplingParams
from engine.ops import logprobs_cuda, sample_cuda
from engine.ops.jit import KernelConfig, VariantSpec
from engine.ops.sample_cuda import (
    BIAS_DTYPE,
    IN_PROMPT,
    MAX_VOCAB,
    MOST_COUNTED,
    ROW_DTYPE,
    STOPS,
    SamplingClass,
    Workspace,
)
from engine.ops.token_masks import pack
from engine.plan import RowInit
from tests.kernels import emulator
from tests.kernels.emulator import emulated
from tests.kernels.sampling_cases import (
    Batch,
    assert_equal,
    candidate_counts,
    check_batch,
    coarse_bits,
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

pytestmark = pytest.mark.skipif(emulator.COMPILER is None, reason="needs g++")

CPU = torch.device("cpu")
NAMES = list(peculiar_rows(64))


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with emulated(sample_cuda, logprobs_cuda):
        yield


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 515, 4096, 4101])
def test_mixed_requests(vocab_size: int) -> None:
    check_batch(Batch(normal((16, vocab_size), 2.0), mixed_params(16)), CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits(dtype: torch.dtype) -> None:
    """Read as they are; rounding makes ties."""
    for vocab_size in (1000, 1003):
        check_batch(Batch(normal((9, vocab_size), 2.0).to(dtype), mixed_params(9)), CPU, steps=1)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_truncations(scale: float) -> None:
    params = truncations()
    check_batch(Batch(normal((len(params), 9001), scale), params), CPU, steps=1)


@pytest.mark.parametrize("name", NAMES)
def test_peculiar_rows(name: str) -> None:
    params = truncations(seed=3, temperature=0.7)
    row = peculiar_rows(5003)[name]
    check_batch(Batch(rows_of(row, len(params)), params), CPU, steps=1)


@pytest.mark.parametrize("name", list(hard_draws(8)))
def test_hard_draws(name: str) -> None:
    logits, params = hard_draws(4500)[name]
    check_batch(Batch(logits, params), CPU, steps=1)


@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0, 400.0])
@pytest.mark.parametrize("vocab_size", [40, 130, 9001])
def test_numbers_of_candidates(vocab_size: int, scale: float) -> None:
    params = candidate_counts()
    logits = normal((len(params), vocab_size), scale)
    logits[::4, vocab_size // 3 :] = -torch.inf
    logits[1::4] = torch.round(logits[1::4])
    check_batch(Batch(logits, params), CPU, steps=1)


@pytest.mark.parametrize("seed", [1, 2])
def test_in_any_order_of_warps(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    real = sample_cuda.variants

    def shuffled(dtype: torch.dtype, sampling_class: SamplingClass) -> list[VariantSpec]:
        specs = real(dtype, sampling_class)
        return [replace(s, defines={**s.defines, "EMU_SHUFFLED": seed}) for s in specs]

    monkeypatch.setattr(sample_cuda, "variants", shuffled)
    params = [*truncations(), *mixed_params(12, logprobs=False)]
    for scale in (0.3, 3.0):
        check_batch(Batch(normal((len(params), 5003), scale), params), CPU, steps=1)


def test_a_likely_token_without_luck() -> None:
    check_batch(unlucky_peaks(40, 4500), CPU, steps=1)


@pytest.mark.parametrize("setting", [{}, {"top_k": 6000}, {"top_p": 0.999}, {"min_p": 1e-3}])
def test_bounds_that_tell_nothing(setting: dict[str, float]) -> None:
    """More rivals than can be listed, whether tokens are removed or not."""
    check_batch(equal_bounds(6, 9000, **setting), CPU, steps=1)


def test_luck_beyond_the_coarse_bits() -> None:
    """A token with coarse bits of 0 has no bound: it wins from far below, if its fine bits let it."""
    vocab_size = 20_000
    params = [SamplingParams(seed=i) for i in range(30)]
    batch = Batch(torch.zeros((len(params), vocab_size)), params)
    boundless = 0
    for logits, seed, position in zip(batch.logits, range(30), batch.positions, strict=True):
        coarse = coarse_bits(seed, int(position), np.arange(vocab_size))
        logits[coarse.argmin()] = -1.5
        boundless += int(coarse.min() == 0)
    assert boundless >= 3
    check_batch(batch, CPU, steps=1)


@pytest.mark.parametrize("name", list(nucleus_ends(1, 13_000)))
def test_a_nucleus_that_ends_at_its_limit(name: str) -> None:
    logits, setting = nucleus_ends(30, 13_000)[name]
    params = [SamplingParams(seed=i, **setting) for i in range(len(logits))]  # type: ignore[arg-type]
    check_batch(Batch(logits, params), CPU, steps=1)


def test_a_plateau_that_the_first_look_misses() -> None:
    params = [SamplingParams(seed=i, top_p=0.9) for i in range(2)]
    row = peculiar_rows(40_000)["plateau"]
    check_batch(Batch(rows_of(row, 2), params), CPU, steps=1)


def test_temperatures_that_merge_or_overflow_logits() -> None:
    logits = normal((6, 600), 1.0)
    logits[3] *= 1e30
    params = [
        SamplingParams(seed=i, temperature=t, top_k=40)
        for i, t in enumerate([2.0, 1e-4, 1.9999999, 0.3, 1.0 / 3.0, 0.999])
    ]
    logits[:, 100:200] = logits[:, :100] * (1 + 1e-7)  # neighbours among floats
    check_batch(Batch(logits, params), CPU, steps=1)


def test_bad_rows_keep_to_themselves() -> None:
    params = mixed_params(11, seed=5)
    batch = Batch(poisoned((11, 300)), params)
    check_batch(batch, CPU)
    result = batch.device_sampler(CPU).sample(batch.logits, batch.rows, batch.positions).result()
    assert result.is_bad is not None
    assert np.flatnonzero(result.is_bad).tolist() == [1, 3, 5, 7, 9]
    assert result.token_ids[[1, 3, 5, 7, 9]].tolist() == [0] * 5


def test_grammar_masks() -> None:
    masks = torch.from_numpy(np.random.default_rng(1).random((9, 515)) < 0.05)
    masks[4] = False  # nothing left
    check_batch(Batch(normal((9, 515), 2.0), mixed_params(9), masks=pack(masks)), CPU, steps=1)


def test_penalties_grow_with_the_output() -> None:
    """Peaked logits: without penalties the same token would come again and again."""
    logits = normal((4, 70), 0.5)
    logits[:, 11] += 6.0
    params = [
        SamplingParams(seed=1, temperature=0.0, frequency_penalty=0.9),
        SamplingParams(seed=2, repetition_penalty=1.7, presence_penalty=0.5, logprobs=2),
        SamplingParams(seed=3, temperature=0.0, repetition_penalty=3.0, min_tokens=14),
        SamplingParams(seed=4, top_k=5, frequency_penalty=-0.2),
    ]
    check_batch(Batch(logits, params), CPU, steps=10)


def test_a_row_s_result_does_not_depend_on_its_company() -> None:
    """Bitwise, log-probabilities included."""
    batch = Batch(normal((24, 4500), 1.0), mixed_params(24, seed=2))
    together = batch.device_sampler(CPU).sample(batch.logits, batch.rows, batch.positions)
    order = np.random.default_rng(0).permutation(24)
    shuffled = batch.device_sampler(CPU, max_rows=50).sample(
        batch.logits[order], batch.rows[order], batch.positions[order]
    )
    first, second = together.result(), shuffled.result()
    for place, i in enumerate(order.tolist()):
        assert second.token_ids[place] == first.token_ids[i]
        one, two = first.logprobs.get(i), second.logprobs.get(place)
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            assert (one.sampled, one.rank) == (two.sampled, two.rank)
            assert one.top_ids.tolist() == two.top_ids.tolist()
            assert one.top_logprobs.tolist() == two.top_logprobs.tolist()
    for i in (0, 7, 23):
        alone = batch.device_sampler(CPU).sample(
            batch.logits[i : i + 1], batch.rows[i : i + 1], batch.positions[i : i + 1]
        )
        assert alone.token_ids.tolist() == first.token_ids[i : i + 1].tolist()


def test_rows_of_any_stride_and_padding_rows() -> None:
    batch = Batch(normal((5, 1030), 2.0), mixed_params(5))
    want = batch.cpu_sampler().sample(batch.logits.clone(), batch.rows, batch.positions)
    wide = torch.full((7, 1041), torch.nan)
    for offset in (0, 3, 8):
        wide[:5, offset : offset + 1030] = batch.logits
        sampler = batch.device_sampler(CPU, max_rows=8)
        sampler.flush()
        last_token = torch.full((6,), -1, dtype=torch.int64)
        rows = torch.tensor([*batch.rows.tolist(), 0, 0], dtype=torch.int32)
        positions = torch.tensor([*batch.positions.tolist(), 1, 1], dtype=torch.int32)
        out = (torch.zeros(7, dtype=torch.int64), torch.zeros(7, dtype=torch.bool))
        token_ids, is_bad = sampler.sample_on_device(
            wide[:, offset : offset + 1030],
            rows,
            positions,
            SamplingClass.FULL,
            last_token=last_token,
            out=out,
        )
        assert token_ids[:5].tolist() == want.token_ids.tolist()
        assert is_bad.tolist() == [False] * 5 + [True] * 2
        assert last_token.tolist() == [0, *want.token_ids.tolist()]


def test_classes_agree_where_the_smaller_one_suffices() -> None:
    logits = torch.round(normal((6, 700), 2.0))
    greedy = Batch(logits, [SamplingParams(seed=i, temperature=0.0) for i in range(6)])
    simple = Batch(logits, mixed_params(6, logprobs=False)[:2] * 3)
    for batch, smallest in ((greedy, SamplingClass.GREEDY), (simple, SamplingClass.SIMPLE)):
        sampler = batch.device_sampler(CPU)
        sampler.flush()
        assert sampler.sampling_class(batch.rows) is smallest
        rows = torch.from_numpy(batch.rows)
        positions = torch.from_numpy(batch.positions.astype(np.int32))
        tokens = [
            sampler.sample_on_device(logits, rows, positions, which)[0].tolist()
            for which in SamplingClass
            if which >= smallest
        ]
        assert tokens.count(tokens[0]) == len(tokens)


def test_sampling_class_counts_only_the_batch_s_rows() -> None:
    batch = Batch(normal((3, 50), 1.0), [SamplingParams(seed=1, temperature=0.0)] * 3)
    sampler = batch.device_sampler(CPU, max_rows=8)
    penalised = SamplingParams(seed=1, presence_penalty=1.0)
    sampler.add(RowInit(5, penalised, np.array([1, 2], np.int32), 1, 0, []))
    assert sampler.sampling_class(batch.rows) is SamplingClass.GREEDY
    assert sampler.sampling_class(batch.rows, has_masks=True) is SamplingClass.FULL
    assert sampler.sampling_class(np.array([1, 5], np.int32)) is SamplingClass.FULL
    sampler.free(5)
    assert sampler.sampling_class(np.array([1, 5], np.int32)) is SamplingClass.GREEDY


def test_a_row_forgets_its_former_request_and_tables_are_used_again() -> None:
    logits = normal((2, 300), 1.0)
    demanding = SamplingParams(
        seed=1, logit_bias={9: 50.0}, min_tokens=5, repetition_penalty=4.0, top_k=3, logprobs=3
    )
    plain = SamplingParams(seed=2)
    batch = Batch(logits, [demanding, demanding])
    sampler = batch.device_sampler(CPU)
    sampler.sample(logits, batch.rows, batch.positions)
    tables = {
        id(table) for pool in (sampler.tokens, sampler.biases) for table in pool.of_row.values()
    }
    assert len(tables) == 4
    for row in (1, 2):
        sampler.free(row)
        sampler.free(row)  # twice is no error
    assert not sampler.tokens.of_row
    assert len(sampler.tokens.free_tables) == len(sampler.biases.free_tables) == 2
    after = Batch(logits, [plain, demanding], seed=4)
    for init in after.inits:
        sampler.add(init)
    assert {id(sampler.tokens.of_row[2]), id(sampler.biases.of_row[2])} <= tables
    got = sampler.sample(logits, after.rows, after.positions).result()
    want = after.cpu_sampler().sample(logits.clone(), after.rows, after.positions).result()
    assert_equal(got, want, after.params)


def test_log_probabilities_of_equals_come_by_id() -> None:
    """More equals than can be sorted, and more wanted than a vocabulary has."""
    params = [SamplingParams(seed=1, temperature=0.0, logprobs=20)] * 2
    logits = torch.zeros((2, 3000))
    logits[1, 2990:] = 1.0
    check_batch(Batch(logits, params), CPU, steps=1)
    check_batch(Batch(normal((2, 7), 1.0), params), CPU, steps=1)


def test_warming_up_leaves_no_trace() -> None:
    batch = Batch(normal((3, 300), 1.0), mixed_params(3))
    want = batch.device_sampler(CPU).sample(batch.logits, batch.rows, batch.positions).result()
    warm = batch.device_sampler(CPU)
    warm.warm_up()
    got = warm.sample(batch.logits, batch.rows, batch.positions).result()
    assert_equal(got, want, batch.params)


def test_a_seed_is_required() -> None:
    batch = Batch(normal((1, 50), 1.0), [])
    with pytest.raises(ValueError, match="row 1 has no seed"):
        batch.device_sampler(CPU, max_rows=2).add(
            RowInit(1, SamplingParams(), np.array([1], np.int32), 1, 0, [])
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [5, 515, 4101])
def test_scores_of_given_tokens(vocab_size: int, dtype: torch.dtype) -> None:
    """More rows than requests may run: a prompt has many, and none of them is a request's row."""
    logits = poisoned((40, vocab_size)).to(dtype)
    batch = Batch(logits, mixed_params(2))
    token_ids = torch.from_numpy(np.random.default_rng(2).integers(0, vocab_size, 40))
    for rows in torch.arange(40).split(batch.device_sampler(CPU, max_rows=4).score_rows):
        for num_top in (0, 3):
            got, bad = batch.device_sampler(CPU, max_rows=4).score(
                logits[rows], token_ids[rows], num_top
            )
            want, also_bad = batch.cpu_sampler().score(
                logits[rows].float(), token_ids[rows], num_top
            )
            assert torch.equal(bad, also_bad)
            good = ~bad
            torch.testing.assert_close(got.sampled, want.sampled, atol=2e-5, rtol=1e-6)
            torch.testing.assert_close(got.top_logprobs, want.top_logprobs, atol=2e-5, rtol=1e-6)
            assert torch.equal(got.rank[good], want.rank[good])
            assert torch.equal(got.top_ids[good], want.top_ids[good])


def test_too_large_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 524289: sampling kernels take up to 524288"):
        Workspace.allocate(1, MAX_VOCAB + 1, CPU)


def test_a_record_is_what_the_kernel_reads() -> None:
    assert ROW_DTYPE.itemsize == 72
    assert [ROW_DTYPE.fields[name][1] for name in ("seed", "tokens", "biases", "top_p")] == [
        0,
        8,
        16,
        24,
    ]
    assert ROW_DTYPE.fields["min_length"][1] == 32
    assert ROW_DTYPE.fields["num_logprobs"][1] == 64
    assert ROW_DTYPE.fields["num_biases"][1] == 68
    assert BIAS_DTYPE.itemsize == 8


def test_biases_anywhere_in_the_vocabulary() -> None:
    """As many as may be, at the edges of what a thread and a block read, and given in no order."""
    vocab_size = 4101
    rng = np.random.default_rng(5)
    edges = [0, 7, 8, 63, 64, 4088, 4095, 4096, 4100, vocab_size]
    many = rng.permutation(vocab_size)[: MAX_BIASES - 1].tolist()
    params = [SamplingParams(seed=1, logit_bias={edge: 60.0}) for edge in edges]
    params += [
        SamplingParams(seed=2, logit_bias={t: float(rng.normal() * 9) for t in [*many, 10**6]}),
        SamplingParams(temperature=0.0, seed=3, logit_bias=dict.fromkeys(range(64), -100.0)),
        SamplingParams(temperature=0.0, seed=3, logit_bias={5: -100.0, 4: 50.0, 4099: 49.0}),
    ]
    batch = Batch(normal((len(params), vocab_size), 2.0), params)
    check_batch(batch, CPU)
    sampler = batch.device_sampler(CPU)
    token_ids = sampler.sample(batch.logits, batch.rows, batch.positions).result().token_ids
    assert token_ids[: len(edges) - 1].tolist() == edges[:-1]


def test_counts_end_at_what_the_table_holds() -> None:
    """The penalty stays what it is then; the bits above are not touched."""
    params = SamplingParams(
        temperature=0.0,
        seed=1,
        frequency_penalty=1e-3,
        min_tokens=50_000,
        max_tokens=100_000,
        stop_token_ids=[3],
    )
    tokens = np.concatenate([[3], np.full(MOST_COUNTED + 5, 3)]).astype(np.int32)
    logits = torch.zeros((1, 16))
    logits[0, 3] = 100.0
    sampler = Batch(logits, []).device_sampler(CPU, max_rows=2)
    for beyond in (-1, 0, 5):
        sampler.add(RowInit(1, params, tokens[: 1 + MOST_COUNTED + beyond], 1, 0, []))
        for step in range(2):
            position = np.array([100_000 + step], np.int64)  # it may stop by then
            sample = sampler.sample(logits, np.array([1], np.int32), position).result()
            assert sample.token_ids[0] == 3
        entry = int(sampler.tokens.of_row[1].numpy().view(np.uint16)[3])
        assert entry == IN_PROMPT | STOPS | MOST_COUNTED


def test_specs_cover_what_is_launched() -> None:
    config = KernelConfig(
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        head_dim=64,
        num_heads=4,
        num_kv_heads=2,
        block_size=16,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=1000,
    )
    specs = [*sample_cuda.specs(config), *logprobs_cuda.specs(config)]
    for which in SamplingClass:  # of float32 logits, which models of any dtype give
        assert all(spec in specs for spec in sample_cuda.variants(torch.float32, which))
    assert all(spec in specs for spec in logprobs_cuda.variants(torch.float32))
