"""The sampler against the oracle, against its plain reference, alone and in company."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api.sampling import SamplingParams
from engine.ops import sample_cpu
from engine.ops.logprobs import reference_top_k, top_k_lowest_id
from engine.ops.penalties import PenaltyParams, apply_penalties
from engine.ops.penalties import reference as penalties_reference
from engine.ops.philox import token_bits
from engine.ops.sample import DrawParams, argmax, reference, sample
from engine.ops.token_masks import pack, unpack
from engine.plan import RowInit, StepResult
from engine.runner.device_sampler import spread_masks
from engine.runner.sampler import Sampler
from tests.unit import sampling_oracle as oracle

VOCAB = 50
EOS = [2, 7]


def make_sampler(vocab_size: int = VOCAB, max_rows: int = 66) -> Sampler:
    return Sampler(max_rows, vocab_size, EOS, torch.device("cpu"))


def row_init(
    row: int, params: SamplingParams, prompt: list[int], output: list[int] | None = None
) -> RowInit:
    known = prompt + (output or [])
    return RowInit(row, params, np.array(known, np.int32), len(prompt), 0, [])


def random_logits(shape: tuple[int, int], seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(
        (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)
    )


def step(
    sampler: Sampler, logits: torch.Tensor, rows: list[int], positions: list[int]
) -> StepResult:
    """One sampling step over a copy of `logits`."""
    return sampler.sample(
        logits.clone(), np.array(rows, np.int32), np.array(positions, np.int64)
    ).result()


def sample_once(
    logits: torch.Tensor,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    masks: torch.Tensor | None = None,
    **params: Any,
) -> int:
    """The token for one row `logits` [V] after `prompt` and `output`."""
    prompt = [1] if prompt is None else prompt
    sampler = make_sampler(logits.shape[0])
    sampler.add(row_init(1, SamplingParams(**{"seed": 5, **params}), prompt, output))
    position = np.array([len(prompt) + len(output or [])], np.int64)
    out = sampler.sample(logits.clone()[None], np.array([1], np.int32), position, masks)
    return int(out.result().token_ids[0])


def one_hot(peak: dict[int, float], vocab_size: int = VOCAB) -> torch.Tensor:
    logits = torch.zeros(vocab_size)
    for token_id, value in peak.items():
        logits[token_id] = value
    return logits


def draw_params(
    num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 1
) -> DrawParams:
    seeds = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, num_rows)
    return DrawParams(
        seeds,
        np.arange(num_rows, dtype=np.int64) + 3,
        np.full(num_rows, top_k, np.int64),
        np.full(num_rows, top_p),
        np.full(num_rows, min_p),
    )


# --- against the oracle ---------------------------------------------------------------------------


@st.composite
def requests(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int]]:
    token = st.integers(0, VOCAB - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([0.0, 0.2, 0.7, 0.95, 1.0])),
        top_k=draw(st.sampled_from([-1, 0, 1, 2, 10, VOCAB, VOCAB + 1000])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.2, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.5, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7, -0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=draw(st.lists(token, max_size=3)),
        ignore_eos=draw(st.booleans()),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 3.0]), max_size=4)),
    )
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    return params, prompt, draw(st.lists(token, max_size=6))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0.5, 3.0, 10.0]),
    st.booleans(),
)
def test_equals_oracle(
    batch: list[tuple[SamplingParams, list[int], list[int]]], seed: int, scale: float, coarse: bool
) -> None:
    logits = random_logits((len(batch), VOCAB), seed, scale)
    if coarse:  # many ties
        logits = torch.round(logits)
    sampler = make_sampler()
    rows = [3 * i + 1 for i in range(len(batch))]
    for row, (params, prompt, output) in zip(rows, batch, strict=True):
        sampler.add(row_init(row, params, prompt, output))
    result = step(sampler, logits, rows, [len(prompt) + len(output) for _, prompt, output in batch])
    expected = [
        oracle.choose(logits[i].numpy(), params, prompt, output, EOS)
        for i, (params, prompt, output) in enumerate(batch)
    ]
    assert result.token_ids.tolist() == expected
    assert result.token_ids.dtype == np.int32
    assert result.is_bad is None


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 4099])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, "ties"])
def test_shortcuts_equal_plain_reference(vocab_size: int, scale: float | str) -> None:
    if scale == "ties":
        logits = torch.round(random_logits((6, vocab_size), 1, 2.0) * 2) / 2
    else:
        logits = random_logits((6, vocab_size), 1, float(scale))
    for top_k, top_p, min_p in [
        (0, 1.0, 0.0),
        (5, 1.0, 0.0),
        (50, 0.9, 0.0),
        (3000, 0.95, 0.0),
        (0, 1e-12, 0.0),
        (0, 0.5, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999, 0.0),
        (0, 1.0, 0.3),
        (0, 1.0, 1e-4),
        (20, 0.8, 0.05),
        (0, 0.9, 0.01),
    ]:
        draw = draw_params(6, top_k, top_p, min_p)
        assert torch.equal(sample(logits, np.arange(6), draw), reference(logits, draw))


def test_a_nucleus_ends_where_whole_units_reach_its_limit() -> None:
    """The best of two equals is half of all: what weighs below 2**-40 does not make it less."""
    logits = torch.full((20, 2000), -100.0)
    logits[:, [7, 1500]] = 0.0
    for tail, chosen in ((-28.0, {7}), (-27.0, {7, 1500})):
        logits[:, 20] = tail
        draw = draw_params(20, 0, 0.5, 0.0)
        drawn = sample(logits, np.arange(20), draw)
        assert set(drawn.tolist()) == chosen
        assert torch.equal(drawn, reference(logits, draw))


def test_flat_rows_are_won_by_the_smallest_uniforms() -> None:
    """Winners of a flat row have coarse bits of 0 or little more: the fine bits decide."""
    logits = random_logits((8, 40_003), 9, 0.1)
    draw = draw_params(8)
    drawn = sample(logits, np.arange(8), draw)
    coarse, _ = token_bits(draw.seeds, draw.positions, drawn.numpy())
    assert coarse.min() == 0
    assert coarse.max() < 20
    assert torch.equal(drawn, reference(logits, draw))


def test_kept_tokens_at_every_budget() -> None:
    """The cut falls among the first candidates, among more, or anywhere in the vocabulary."""
    row = random_logits((1, 20_000), 3, 1.0)[0].numpy()
    row[::3] = np.round(row[::3])
    order = np.lexsort((np.arange(len(row)), -row))
    for top_k in (1, 7, 300, 6000, 19_999):
        kept = sample_cpu.kept_tokens(row, row.max(), top_k, 1.0, 0.0)
        np.testing.assert_array_equal(kept, np.sort(order[:top_k]))
    weights = np.exp(row[order] - row.max()).astype(np.float64)
    for top_p in (1e-9, 0.01, 0.1, 0.6, 0.99):
        count = int((np.cumsum(weights) - weights < top_p * weights.sum()).sum())
        kept = sample_cpu.kept_tokens(row, row.max(), 0, top_p, 0.0)
        np.testing.assert_array_equal(kept, np.sort(order[:count]))


# --- distribution ---------------------------------------------------------------------------------

CHI_SQUARE_0_999 = {2: 13.8, 4: 18.5, 7: 24.3}  # degrees of freedom -> 99.9% quantile


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "left"),
    [(0, 1.0, 0.0, 8), (5, 1.0, 0.0, 5), (0, 0.8, 0.0, 5), (0, 1.0, 0.41, 3)],
)
def test_frequencies_are_the_softmax(top_k: int, top_p: float, min_p: float, left: int) -> None:
    """One seed, many positions."""
    probabilities = np.array([0.02, 0.3, 0.11, 0.2, 0.04, 0.13, 0.12, 0.08])
    num_draws = 4000
    logits = torch.log(torch.from_numpy(probabilities)).float().repeat(num_draws, 1)
    draw = draw_params(num_draws, top_k, top_p, min_p)
    draw.seeds[:] = 1234
    counts = np.bincount(sample(logits, np.arange(num_draws), draw).numpy(), minlength=8)
    kept = np.argsort(-probabilities)[:left]
    assert counts.sum() == counts[kept].sum()
    expected = num_draws * probabilities[kept] / probabilities[kept].sum()
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_0_999[left - 1]


def test_rare_tokens_get_their_share() -> None:
    """30,000 tokens of probability 1e-5 each together win 30% of the draws."""
    vocab_size, num_draws = 30_001, 1000
    row = torch.full((vocab_size,), np.log(1e-5))
    row[17] = np.log(0.7)
    draw = draw_params(num_draws)
    drawn = sample(row.expand(num_draws, -1), np.arange(num_draws), draw)
    share = float((drawn != 17).double().mean())
    assert abs(share - 0.3) < 3 * (0.3 * 0.7 / num_draws) ** 0.5


# --- stages ---------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_of_equals() -> None:
    for vocab_size in (5, 64, 65, 200, 1000):
        logits = torch.zeros(3, vocab_size)
        logits[0, vocab_size // 2 :] = 4.0
        logits[1, [vocab_size - 1, vocab_size - 2]] = 1.0
        ids, best = argmax(logits)
        assert ids.tolist() == [vocab_size // 2, vocab_size - 2, 0]
        assert best.tolist() == [4.0, 1.0, 0.0]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.0}, {"temperature": 1e-6}])
def test_forms_of_greedy(params: dict[str, Any]) -> None:
    for seed in range(20):
        logits = torch.round(random_logits((1, VOCAB), seed, 1.0)[0] * 2)  # ties at the top
        greedy = sample_once(logits, temperature=0.0)
        assert greedy == int(np.flatnonzero(logits == logits.max())[0])
        assert sample_once(logits, seed=seed, **params) == greedy


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 1, 10**9])
def test_top_k_off(top_k: int) -> None:
    logits = random_logits((1, VOCAB), 4, 1.0)[0]
    for seed in range(20):
        assert sample_once(logits, top_k=top_k, seed=seed) == sample_once(logits, seed=seed)


def test_equal_weights_under_top_k_leave_the_lowest_ids() -> None:
    drawn = {sample_once(torch.zeros(VOCAB), top_k=3, seed=seed) for seed in range(60)}
    assert drawn == {0, 1, 2}


def test_top_p_counts_the_mass_left_by_top_k() -> None:
    """Of 0.4, 0.3, 0.3 the first two of top_k=2 weigh 4/7 and 3/7: top_p=0.5 leaves one."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.3]))
    assert {sample_once(logits, top_k=2, top_p=0.5, seed=s) for s in range(40)} == {0}
    assert {sample_once(logits, top_p=0.5, seed=s) for s in range(40)} == {0, 1}


def test_min_p_is_taken_after_temperature() -> None:
    logits = torch.log(torch.tensor([0.6, 0.3, 0.1]))
    assert {sample_once(logits, min_p=0.4, seed=s) for s in range(40)} == {0, 1}
    assert {sample_once(logits, min_p=0.4, temperature=0.5, seed=s) for s in range(40)} == {0}
    assert {sample_once(logits, min_p=0.4, temperature=2.0, seed=s) for s in range(40)} == {0, 1, 2}


def test_bias_comes_before_repetition_penalty() -> None:
    """1 - 3 is negative, so the penalty multiplies: -2 * 2 = -4. The other order gives -2.5."""
    logits = one_hot({4: 1.0, 5: -3.0}, 6) - one_hot({0: 9, 1: 9, 2: 9, 3: 9}, 6)
    params = {"logit_bias": {4: -3.0}, "repetition_penalty": 2.0, "temperature": 0.0}
    assert sample_once(logits, prompt=[4], **params) == 5


def test_penalties_come_before_temperature() -> None:
    """At temperature 0.01 a difference of 1 decides; a penalty of 1.5 on the best turns it."""
    logits = one_hot({3: 10.0, 4: 9.0})
    assert sample_once(logits, output=[3], temperature=0.01, presence_penalty=0.5) == 3
    assert sample_once(logits, output=[3], temperature=0.01, presence_penalty=1.5) == 4


def test_presence_and_frequency_ignore_the_prompt() -> None:
    logits = one_hot({3: 10.0, 4: 9.0})
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    assert sample_once(logits, prompt=[3, 3, 3], **strong) == 3
    assert sample_once(logits, prompt=[1], output=[3], **strong) == 4


def test_repetition_covers_prompt_and_output() -> None:
    logits = one_hot({3: 10.0, 4: 9.0})
    assert sample_once(logits, prompt=[3], repetition_penalty=2.0, temperature=0.0) == 4
    assert sample_once(logits, prompt=[1], output=[3], repetition_penalty=2.0, temperature=0.0) == 4
    assert sample_once(-logits, prompt=[0], repetition_penalty=2.0, temperature=0.0) == 0


def test_min_tokens_beats_a_bias_towards_eos() -> None:
    params = {"min_tokens": 3, "max_tokens": 9, "logit_bias": {2: 100.0, 7: 99.0, 9: 98.0}}
    logits = random_logits((1, VOCAB))[0]
    for num_output in range(5):
        output = [11] * num_output
        free = num_output >= 3
        common = {"output": output, "temperature": 0.0, **params}
        assert sample_once(logits, **common) == (2 if free else 9)
        with_stop = sample_once(logits, **common, stop_token_ids=[9])
        assert with_stop == 2 if free else with_stop not in (2, 7, 9)
        # ignore_eos: EOS is a token like any other, stop ids are still masked
        assert sample_once(logits, **common, ignore_eos=True, stop_token_ids=[9]) == 2


def test_grammar_mask() -> None:
    masks = torch.zeros((1, VOCAB), dtype=torch.bool)
    masks[0, [8, 30]] = True
    drawn = {sample_once(torch.zeros(VOCAB), masks=pack(masks), seed=seed) for seed in range(30)}
    assert drawn == {8, 30}


def test_masks_of_some_rows_of_a_batch() -> None:
    given = np.arange(6, dtype=np.int32).reshape(2, 3)
    cpu = torch.device("cpu")
    whole = spread_masks(np.array([1, 3]), given, 5, cpu)
    assert whole.tolist() == [[-1] * 3, [0, 1, 2], [-1] * 3, [3, 4, 5], [-1] * 3]
    assert spread_masks(np.array([0, 1]), given, 2, cpu).tolist() == given.tolist()
    nobody = spread_masks(np.zeros(0, np.int64), given[:0], 2, cpu)
    assert nobody.tolist() == [[-1] * 3] * 2


def test_masks_are_bits() -> None:
    for vocab_size in (1, 31, 32, 33, 100):
        allowed = torch.rand((3, vocab_size)) < 0.5
        masks = pack(allowed)
        assert masks.shape == (3, -(-vocab_size // 32))
        assert torch.equal(torch.from_numpy(unpack(masks.numpy(), vocab_size)), allowed)
        assert [bool(masks[0, t // 32] >> t % 32 & 1) for t in range(vocab_size)] == allowed[
            0
        ].tolist()


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    logits = one_hot({3: 10.0, 4: 9.0})
    params = {"logit_bias": {VOCAB: 50.0}, "min_tokens": 1, "stop_token_ids": [VOCAB + 3]}
    assert (
        sample_once(logits, prompt=[VOCAB + 1], repetition_penalty=1.1, temperature=0.0, **params)
        == 3
    )


def test_a_vanishing_repetition_penalty_stays_finite() -> None:
    logits = one_hot({3: 10.0, 4: 9.0})
    assert sample_once(logits, prompt=[4], repetition_penalty=1e-300) == 4


def test_penalty_shortcut_equals_reference() -> None:
    logits = random_logits((5, 300))
    rng = np.random.default_rng(2)
    counts = torch.from_numpy(rng.integers(-8, 4, (8, 300)).clip(0).astype(np.int32))
    seen = (counts > 0) | torch.from_numpy(rng.random((8, 300)) < 0.1)
    params = PenaltyParams(
        np.array([1.3, 1.0, 0.7], np.float32),
        np.array([0.5, -0.2, 0.0], np.float32),
        np.array([0.0, 0.3, 1.1], np.float32),
    )
    which, slots = [4, 0, 2], [6, 1, 3]
    expected = logits.clone()
    expected[which] = penalties_reference(logits[which], seen[slots], counts[slots], params)
    apply_penalties(logits, which, seen, counts, slots, params)
    assert torch.equal(logits, expected)


# --- state over time ------------------------------------------------------------------------------


def test_resumed_row_continues_as_if_never_stopped() -> None:
    """Penalty counts grow on the device; a resumed row rebuilds them from the ids known so far."""
    params = SamplingParams(
        seed=9,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        min_tokens=6,
        temperature=0.8,
    )
    prompt = [5, 6, 5]
    logits = random_logits((20, VOCAB), 8, 2.0)
    undisturbed = make_sampler()
    undisturbed.add(row_init(4, params, prompt))
    output: list[int] = []
    for i in range(20):
        output.append(int(step(undisturbed, logits[i : i + 1], [4], [3 + i]).token_ids[0]))
    expected = [
        oracle.choose(logits[i].numpy(), params, prompt, output[:i], EOS) for i in range(20)
    ]
    assert output == expected
    for start in (1, 7, 13):
        resumed = make_sampler()
        resumed.add(row_init(2, params, prompt, output[:start]))
        rest = [
            int(step(resumed, logits[i : i + 1], [2], [3 + i]).token_ids[0])
            for i in range(start, 20)
        ]
        assert rest == output[start:]
        slot, old_slot = resumed.penalty_counts.slot_of[2], undisturbed.penalty_counts.slot_of[4]
        for name in ("seen", "counts"):
            table = getattr(resumed.penalty_counts, name)
            assert torch.equal(table[slot], getattr(undisturbed.penalty_counts, name)[old_slot])


def test_penalty_tables_grow_only_for_rows_that_need_them() -> None:
    sampler = make_sampler()
    sampler.add(row_init(1, SamplingParams(seed=1), [3]))
    assert sampler.penalty_counts.seen.shape[0] == 0
    penalised = SamplingParams(seed=1, frequency_penalty=2.0, temperature=0.0)
    logits = one_hot({3: 10.0, 4: 9.0}).repeat(6, 1)
    rows = [2, 3, 4, 5, 6, 7]
    for row in rows:
        sampler.add(row_init(row, penalised, [1], [3] * (row - 2)))
    assert step(sampler, logits, rows, [row - 1 for row in rows]).token_ids.tolist() == [
        3,  # none, then one, two ... of token 3 so far
        *[4] * 5,
    ]
    for row in rows:
        sampler.free(row)
    sampler.free(2)  # twice is no error
    assert len(sampler.penalty_counts.free_slots) == sampler.penalty_counts.seen.shape[0]
    sampler.add(row_init(2, penalised, [1]))
    assert step(sampler, logits[:1], [2], [1]).token_ids.tolist() == [3]


def test_a_row_forgets_its_former_request() -> None:
    sampler = make_sampler()
    demanding = SamplingParams(
        seed=1,
        logit_bias={9: 100.0},
        min_tokens=5,
        repetition_penalty=5.0,
        top_k=3,
        top_p=0.5,
        min_p=0.5,
        logprobs=3,
    )
    plain = SamplingParams(seed=2, temperature=1.0)
    logits = random_logits((1, VOCAB), 5, 1.0)
    sampler.add(row_init(1, demanding, [3]))
    step(sampler, logits, [1], [1])
    sampler.free(1)
    sampler.add(row_init(1, plain, [3]))
    result = step(sampler, logits, [1], [1])
    assert result.token_ids.tolist() == [oracle.choose(logits[0].numpy(), plain, [3], [], EOS)]
    assert result.logprobs == {}


def test_a_seed_is_required() -> None:
    with pytest.raises(ValueError, match="row 1 has no seed"):
        make_sampler().add(row_init(1, SamplingParams(), [1]))


# --- independence of rows -------------------------------------------------------------------------


def mixed_params(i: int) -> SamplingParams:
    """64 different requests that between them use every stage."""
    return SamplingParams(
        seed=1000 + i,
        temperature=[0.0, 1.0, 0.7, 1.5][i % 4],
        top_k=[-1, 40, -1, 7, -1][i % 5],
        top_p=[1.0, 0.9, 0.3][i % 3],
        min_p=[0.0, 0.02][i % 2],
        repetition_penalty=[1.0, 1.1][i // 2 % 2],
        presence_penalty=[0.0, 0.5, 0.0][i // 3 % 3],
        logit_bias={i: 2.0} if i % 6 == 0 else {},
        min_tokens=4 if i % 7 == 0 else 0,
        logprobs=[None, 0, 5][i % 3],
    )


def entries(result: StepResult, index: int) -> list[Any] | None:
    entry = result.logprobs.get(index)
    if entry is None:
        return None
    return [entry.sampled, entry.rank, entry.top_ids.tolist(), entry.top_logprobs.tolist()]


@pytest.mark.parametrize("vocab_size", [300, 4099])
def test_alone_equals_in_a_batch_of_64_bitwise(vocab_size: int) -> None:
    logits = random_logits((64, vocab_size), 6, 2.0)
    inits = [row_init(i + 1, mixed_params(i), [i, i + 1], [i + 2] * (i % 5)) for i in range(64)]
    positions = [len(init.token_ids) for init in inits]
    batch = make_sampler(vocab_size)
    for init in inits:
        batch.add(init)
    together = step(batch, logits, list(range(1, 65)), positions)
    assert len(together.logprobs) == 42

    shuffled = np.random.default_rng(1).permutation(64)
    again = make_sampler(vocab_size)
    for init in inits:
        again.add(init)
    mixed = step(again, logits[shuffled], (shuffled + 1).tolist(), [positions[i] for i in shuffled])
    for i, init in enumerate(inits):
        alone = make_sampler(vocab_size)
        init.row = 1
        alone.add(init)
        single = step(alone, logits[i : i + 1], [1], positions[i : i + 1])
        place = int(np.flatnonzero(shuffled == i)[0])
        assert single.token_ids[0] == together.token_ids[i] == mixed.token_ids[place]
        assert entries(single, 0) == entries(together, i) == entries(mixed, place)


@pytest.mark.parametrize("poison", [np.nan, np.inf, "nothing left"])
def test_bad_rows_are_flagged_and_keep_to_themselves(poison: float | str) -> None:
    logits = random_logits((64, 300), 6, 2.0)
    rows, positions = list(range(1, 65)), [2] * 64

    def run(values: torch.Tensor) -> StepResult:
        sampler = make_sampler(300)
        for i in range(64):
            sampler.add(row_init(i + 1, mixed_params(i), [i, i + 1]))
        return step(sampler, values, rows, positions)

    clean = run(logits)
    assert clean.is_bad is None
    bad = [0, 1, 5, 20, 63]  # greedy, drawn, truncated, with log-probabilities
    for i in bad:
        if poison == "nothing left":
            logits[i] = -np.inf
        else:
            logits[i, 10 * i % 300] = float(poison)
    dirty = run(logits)
    assert dirty.is_bad is not None
    assert np.flatnonzero(dirty.is_bad).tolist() == bad
    assert dirty.token_ids[bad].tolist() == [0] * len(bad)
    for i in set(range(64)) - set(bad):
        assert dirty.token_ids[i] == clean.token_ids[i]
        assert entries(dirty, i) == entries(clean, i)


# --- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits((3, VOCAB), 2)
    sampler = make_sampler()
    changing = {"logit_bias": {33: 100.0}, "temperature": 0.3, "repetition_penalty": 2.0}
    for row, k in ((1, 5), (2, None), (3, 0)):
        sampler.add(row_init(row, SamplingParams(seed=row, logprobs=k, **changing), [1, 2]))
    result = step(sampler, logits, [1, 2, 3], [2, 2, 2])
    assert set(result.logprobs) == {0, 2}
    expected = torch.log_softmax(logits, dim=-1)
    for i, k in ((0, 5), (2, 0)):
        entry = result.logprobs[i]
        assert result.token_ids[i] == 33
        assert entry.sampled == expected[i, 33].item()
        assert entry.rank == 1 + int((logits[i] > logits[i, 33]).sum())
        best = expected[i].topk(k)
        assert entry.top_ids.tolist() == best.indices.tolist()
        assert entry.top_ids.dtype == np.int32
        assert entry.top_logprobs.tolist() == best.values.tolist()
        assert entry.top_logprobs.dtype == np.float32


def test_top_logprobs_of_a_tiny_vocabulary() -> None:
    sampler = make_sampler(4)
    sampler.add(row_init(1, SamplingParams(seed=1, logprobs=20), [1]))
    entry = step(sampler, torch.zeros(1, 4), [1], [1]).logprobs[0]
    assert entry.top_ids.tolist() == [0, 1, 2, 3]
    assert entry.rank == 1


@given(
    st.lists(st.sampled_from([-np.inf, -2.5, -0.5, -0.0, 0.0, 1.0, 3.0]), min_size=1, max_size=12)
)
def test_top_k_orders_equals_by_id(values: list[float]) -> None:
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    for k in (0, 1, 3, 12):
        assert top_k_lowest_id(torch.tensor([values]), k)[0].tolist() == order[:k]
        assert reference_top_k(torch.tensor([values]), min(k, len(values)))[0].tolist() == order[:k]
