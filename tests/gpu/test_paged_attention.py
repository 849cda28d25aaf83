"""Paged attention on a CUDA device: decode and prefill kernels, plans, and the backend over both."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionSpec, GraphAttention, KVCache, StepInputs
from engine.attention.paged import PagedAttention
from engine.ops import jit, paged_decode, paged_prefill, plan_decode
from engine.ops.plan_decode import DecodePlan, PlanLimits
from tests.gpu.conftest import Record
from tests.kernels.paged_attention_cases import (
    FP8,
    NEVER_SPLIT,
    Context,
    Decoder,
    Heads,
    assert_close,
    check_prefill,
    limits_of,
    make_context,
    make_queries,
    nan_output,
    prefill,
)

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = FP8
LENS = [1, 15, 16, 17, 63, 64, 65, 129, 0, 1000, 4097]
CHUNKS = [(1, 1), (5, 5), (200, 200), (300, 1000), (1, 77), (128, 640), (17, 4097), (129, 129)]

VARIANTS = [
    Heads(64, 1, 4),
    Heads(64, 7, 2, FP16, block_size=64),
    Heads(64, 3, 3, block_size=32),
    Heads(80, 1, 3, FP16),
    Heads(80, 4, 2, block_size=64),
    Heads(96, 1, 2),
    Heads(96, 3, 2, FP16, block_size=64),
    Heads(128, 1, 2, block_size=64),
    Heads(128, 2, 4, FP16),
    Heads(128, 4, 8),
    Heads(128, 4, 2, FP16, block_size=64),
    Heads(128, 7, 4, block_size=64),
    Heads(128, 8, 2, block_size=128),
    Heads(128, 16, 1, FP16, block_size=64),
    Heads(128, 20, 2),  # more query heads than a tile has rows
    Heads(192, 2, 2),
    Heads(256, 2, 2),
    Heads(256, 8, 1, FP16, block_size=64),
    Heads(32, 4, 2, block_size=64),
]
CAPPED = [
    Heads(64, 2, 2, FP16, softcap=20.0),
    Heads(128, 2, 2, block_size=64, softcap=5.0),
    Heads(256, 2, 2, softcap=50.0),
]
CACHED_IN_FP8 = [
    Heads(64, 7, 2, BF16, E4M3, block_size=64),
    Heads(80, 4, 2, FP16, E4M3),
    Heads(96, 2, 1, BF16, E5M2),
    Heads(128, 4, 8, BF16, E4M3),
    Heads(128, 7, 4, BF16, E4M3, block_size=64),
    Heads(128, 4, 2, FP16, E5M2, block_size=64),
    Heads(128, 4, 2, BF16, E4M3, softcap=5.0),
    Heads(256, 4, 1, BF16, E4M3),
]
ALL = [*VARIANTS, *CAPPED, *CACHED_IN_FP8]


@pytest.fixture(scope="module", autouse=True)
def kernels_built_together() -> None:
    """All variants at once, in several processes."""
    arch = jit.device_arch()
    specs = [
        op.variant(h.dtype, h.cache_dtype, h.head_dim, h.group, h.block_size, h.softcap > 0, arch)
        for op in (paged_decode, paged_prefill)
        for h in ALL
    ]
    jit.prebuild(specs, arch)


def on_gpu(heads: Heads, lens: Sequence[int]) -> Context:
    return make_context(heads, list(lens), "cuda")


def run_prefill(
    context: Context, q: Tensor, q_lens: list[int], out: Tensor, window: int | None = None
) -> None:
    prefill(context, q, q_lens, out, jit.device_arch(), window)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


# --- decode ---


@pytest.mark.parametrize("heads", ALL, ids=str)
@pytest.mark.parametrize("item_tokens", [NEVER_SPLIT, 0], ids=["unsplit", "split"])
def test_decode(heads: Heads, item_tokens: int) -> None:
    decoder = Decoder(on_gpu(heads, LENS), limits_of(heads, 2000, item_tokens=item_tokens))
    for _ in range(2):  # twice: the first call must leave scratch usable
        decoder.out.fill_(float("nan"))
        decoder.attend()
        decoder.check()
    parts = decoder.plan.items[: int(decoder.plan.num_items), 4]
    assert bool((parts >= 0).any()) == (item_tokens != NEVER_SPLIT)


@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 500, 10_000])
@pytest.mark.parametrize("heads", [VARIANTS[1], VARIANTS[9], VARIANTS[16]], ids=str)
def test_decode_in_a_window(heads: Heads, window: int) -> None:
    for item_tokens in (NEVER_SPLIT, 0):
        decoder = Decoder(on_gpu(heads, LENS), limits_of(heads, 2000, item_tokens=item_tokens))
        decoder.attend(window)
        decoder.check(window)


@pytest.mark.parametrize("heads", [VARIANTS[9], VARIANTS[11]], ids=str)
@pytest.mark.parametrize("lens", [[1], [4097], [33] * 300, [8000, 1], list(range(1, 200, 3))])
def test_decode_of_other_batches(heads: Heads, lens: list[int]) -> None:
    for slots in (40, 264):
        decoder = Decoder(on_gpu(heads, lens), limits_of(heads, slots))
        decoder.attend()
        decoder.check()


@pytest.mark.parametrize("heads", [VARIANTS[9], CACHED_IN_FP8[0]], ids=str)
def test_decode_with_the_limits_of_this_device(heads: Heads, device: torch.device) -> None:
    limits = paged_decode.plan_limits(
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.cache_dtype, 8192, False, device
    )
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert limits.slots in (sms, 2 * sms, 4 * sms)
    for lens in (LENS, [700] * 600):
        decoder = Decoder(on_gpu(heads, lens), limits)
        decoder.attend()
        decoder.check()


def test_decode_of_shared_blocks() -> None:
    """Three rows with the same first 64 tokens, two of them with all the same blocks."""
    heads = Heads(128, 4, 2)
    context = on_gpu(heads, [100, 90, 90])
    first, second, third = context.rows.tolist()
    context.block_table[second, :4] = context.block_table[first, :4]
    context.block_table[third] = context.block_table[second]
    decoder = Decoder(context, limits_of(heads, 264))
    decoder.q[2] = decoder.q[1]
    decoder.attend()
    decoder.check()
    assert torch.equal(bits(decoder.out[1]), bits(decoder.out[2]))


def test_decode_gives_the_same_bits_every_time() -> None:
    decoder = Decoder(on_gpu(Heads(128, 7, 4), [3000, 4097, 700]), limits_of(Heads(128, 7, 4), 264))
    decoder.attend()
    first = decoder.out.clone()
    for _ in range(50):
        decoder.attend_planned()
        assert torch.equal(bits(first), bits(decoder.out))


def test_fixed_chunks_make_rows_independent_of_their_batch() -> None:
    heads = Heads(128, 4, 8)
    lens = [1, 15, 300, 8000, 513, 2048, 4097] * 4
    together = Decoder(on_gpu(heads, lens), limits_of(heads, 264, is_fixed=True))
    together.attend()
    together.check()
    for i, length in enumerate(lens[:7]):
        context = together.context
        alone_in = Context(
            heads,
            [length],
            context.k_cache,
            context.v_cache,
            context.block_table,
            context.rows[i : i + 1],
        )
        alone = Decoder(alone_in, limits_of(heads, 264, is_fixed=True))
        alone.q[0] = together.q[i]
        alone.attend()
        assert torch.equal(bits(alone.out[0]), bits(together.out[i])), f"length {length}"


@pytest.mark.parametrize("heads", [VARIANTS[9], VARIANTS[1], CACHED_IN_FP8[3]], ids=str)
def test_decode_in_a_graph_follows_new_lengths(heads: Heads, graph_replay: Record) -> None:
    """Plan and attention in one graph, replayed for other rows, lengths and queries. The padded batch
    has rows of one token in block 0."""
    batch, longest = 8, [4097, 1000, 65, 3000, 17, 1, 2049, 500]
    context = on_gpu(heads, longest)
    context.block_table[0] = 0  # the dummy row
    for cache in (context.k_cache, context.v_cache):
        cache.view(torch.uint8)[0] = 0
    decoder = Decoder(context, limits_of(heads, 264))
    decoder.rows = context.rows.clone()
    replay = graph_replay(decoder.attend)
    all_rows = context.rows.clone()
    generator = np.random.default_rng(0)
    for _ in range(6):
        count = int(generator.integers(1, batch + 1))
        order = generator.permutation(batch)[:count]
        lens = [int(generator.integers(1, longest[i] + 1)) for i in order]
        decoder.seq_lens.fill_(1)
        decoder.seq_lens[:count] = torch.tensor(lens, dtype=torch.int32)
        decoder.rows.zero_()
        decoder.rows[:count] = all_rows[torch.from_numpy(order).cuda()]
        decoder.q.normal_()
        decoder.out.fill_(float("nan"))
        replay()
        decoder.context = Context(
            heads, lens, context.k_cache, context.v_cache, context.block_table, decoder.rows
        )
        decoder.check()
        assert torch.isfinite(decoder.out).all(), "padding rows must be finite"


# --- plans ---


@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 500])
def test_the_device_plans_as_numpy_does(window: int | None, is_fixed: bool) -> None:
    generator = np.random.default_rng(1)
    for batch in (1, 2, 31, 32, 33, 100, 256, 700, 1024):
        for limits in (
            PlanLimits(8, 264, is_fixed, 40_000),
            PlanLimits(1, 396, is_fixed, 40_000),
            PlanLimits(64, 108, is_fixed, 40_000),
        ):
            lens = generator.integers(0, generator.choice([20, 300, 8000, 40_000]), batch)
            rows = generator.integers(0, 5000, batch).astype(np.int32)
            seq_lens = lens.astype(np.int32)
            plan = DecodePlan.allocate(limits, batch, torch.device("cuda"))
            device_rows = torch.from_numpy(rows).cuda()
            plan_decode.plan_decode(plan, torch.from_numpy(seq_lens).cuda(), device_rows, window)
            want = plan_decode.reference(seq_lens, rows, window, limits)
            assert int(plan.num_items) == len(want), f"batch {batch}, {limits}"
            got = plan.items[: len(want)].cpu().numpy()
            different = np.nonzero((got != want).any(1))[0]
            assert not len(different), (
                f"batch {batch}, {limits}: item {different[0]} is {got[different[0]]} instead of "
                f"{want[different[0]]}"
            )


# --- prefill ---


@pytest.mark.parametrize("heads", ALL, ids=str)
def test_prefill(heads: Heads) -> None:
    q_lens = [q_len for q_len, _ in CHUNKS]
    context = on_gpu(heads, [kv_len for _, kv_len in CHUNKS])
    q = make_queries(heads, sum(q_lens) + 3, "cuda")
    out = nan_output(q)
    run_prefill(context, q, q_lens, out)
    check_prefill(context, q, q_lens, out, None)


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 300, 10_000])
@pytest.mark.parametrize("heads", [VARIANTS[1], VARIANTS[9], VARIANTS[16]], ids=str)
def test_prefill_in_a_window(heads: Heads, window: int) -> None:
    q_lens = [q_len for q_len, _ in CHUNKS]
    context = on_gpu(heads, [kv_len for _, kv_len in CHUNKS])
    q = make_queries(heads, sum(q_lens), "cuda")
    out = nan_output(q)
    run_prefill(context, q, q_lens, out, window)
    check_prefill(context, q, q_lens, out, window)


@pytest.mark.parametrize(
    "heads", [VARIANTS[9], VARIANTS[11], VARIANTS[6], CACHED_IN_FP8[4]], ids=str
)
def test_prefill_of_lengths_around_tiles(heads: Heads) -> None:
    q_lens = [n + d for n in (16, 32, 64, 128) for d in (-1, 0, 1)]
    context = on_gpu(heads, [n + 130 * (i % 3) for i, n in enumerate(q_lens)])
    q = make_queries(heads, sum(q_lens), "cuda")
    out = nan_output(q)
    run_prefill(context, q, q_lens, out)
    check_prefill(context, q, q_lens, out, None)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("heads", [VARIANTS[9], VARIANTS[11], CACHED_IN_FP8[3]], ids=str)
def test_a_token_does_not_depend_on_how_its_prompt_is_cut(heads: Heads, window: int | None) -> None:
    context = on_gpu(heads, [1100])
    q = make_queries(heads, 1100, "cuda")
    want, got = nan_output(q), nan_output(q)
    run_prefill(context, q, [1100], want, window)
    begin = 0
    for end in (1, 130, 515, 516, 1100):
        piece = Context(
            heads, [end], context.k_cache, context.v_cache, context.block_table, context.rows
        )
        run_prefill(piece, q[begin:end], [end - begin], got[begin:end], window)
        begin = end
    different = (bits(got) != bits(want)).nonzero()
    assert not len(different), f"differs at (token, head, column) {different[:5].tolist()}"


def test_one_query_takes_either_kernel() -> None:
    heads = Heads(128, 4, 8, block_size=64)
    decoder = Decoder(on_gpu(heads, [700, 33, 1]), limits_of(heads, 264))
    decoder.attend()
    decoder.check()
    out = nan_output(decoder.q)
    run_prefill(decoder.context, decoder.q, [1, 1, 1], out)
    check_prefill(decoder.context, decoder.q, [1, 1, 1], out, None)


# --- backend ---


class Steps:
    """A backend of one layer over a context, and inputs for steps over it."""

    def __init__(
        self, heads: Heads, lens: list[int], window: int | None, **settings: object
    ) -> None:
        self.context = on_gpu(heads, lens)
        self.context.block_table[0] = 0
        for cache in (self.context.k_cache, self.context.v_cache):
            cache.view(torch.uint8)[0] = 0
        self.window = window
        self.spec = AttentionSpec(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.scale, window, heads.softcap
        )
        caches = [self.context.k_cache], [self.context.v_cache]
        kv = KVCache(*caches, heads.block_size, [heads.kv_scales])
        self.backend = self.make_backend(kv, **settings)

    def make_backend(self, kv: KVCache, **settings: object) -> GraphAttention:
        device = torch.device("cuda", torch.cuda.current_device())
        return PagedAttention(kv, [self.spec], 16, 8192, device, **settings)

    def inputs(self, q_lens: list[int], num_tokens: int, from_host: bool) -> StepInputs:
        context = self.context
        lens = torch.tensor(context.lens, dtype=torch.int32, device="cuda")
        none = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        table = context.block_table
        return StepInputs(
            input_ids=none,
            positions=none,
            slot_mapping=none,
            logits_indices=none[:0],
            block_table=table[context.rows.long()].contiguous() if from_host else table,
            rows=context.rows.cpu().numpy(),
            num_decodes=sum(q == 1 for q in q_lens),
            query_start=[0, *np.cumsum(q_lens).tolist()],
            seq_lens=context.lens,
            block_ids=np.zeros((0, 0), np.int32),
            rows_device=None if from_host else context.rows,
            seq_lens_device=None if from_host else lens,
        )

    def check(self, q: Tensor, q_lens: list[int], out: Tensor) -> None:
        ends = np.cumsum([0, *q_lens]).tolist()
        want = [
            self.context.expected(i, q[ends[i] : ends[i + 1]], self.window)
            for i in range(len(q_lens))
        ]
        assert out.shape == (len(q), q.shape[1] * q.shape[2])
        assert_close(out[: ends[-1]].view(-1, *q.shape[1:]), torch.cat(want), f"step {q_lens}")
        assert torch.isfinite(out).all(), "padding tokens must be finite"


STEPS = {
    "decode": ([1, 1, 1, 1], [1, 700, 65, 4097]),
    "prefill": ([64, 300, 7], [64, 1000, 7]),
    "mixed": ([1, 1, 5, 64, 200], [300, 17, 40, 640, 200]),
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    "heads", [VARIANTS[11], VARIANTS[1], VARIANTS[16], CACHED_IN_FP8[3]], ids=str
)
def test_backend(heads: Heads, window: int | None, kind: str) -> None:
    q_lens, lens = STEPS[kind]
    steps = Steps(heads, lens, window)
    q = make_queries(heads, sum(q_lens) + 2, "cuda")
    for from_host in (False, True):
        inputs = steps.inputs(q_lens, len(q), from_host)
        steps.backend.plan(inputs, [steps.spec])
        steps.check(q, q_lens, steps.backend.attend(0, q, steps.spec, inputs))


def test_deterministic_backend() -> None:
    q_lens, lens = STEPS["mixed"]
    heads = VARIANTS[11]
    steps = Steps(heads, lens, None, deterministic=True)
    q = make_queries(heads, sum(q_lens), "cuda")
    inputs = steps.inputs(q_lens, len(q), False)
    steps.backend.plan(inputs, [steps.spec])
    out = steps.backend.attend(0, q, steps.spec, inputs)
    steps.check(q, q_lens, out)
    inputs.num_decodes = 1  # the second row's one token as a chunk
    steps.backend.plan(inputs, [steps.spec])
    assert torch.equal(bits(steps.backend.attend(0, q, steps.spec, inputs)[0]), bits(out[0]))


def test_backend_in_a_graph(graph_replay: Record) -> None:
    heads, batch = VARIANTS[11], 8
    longest = [700, 4097, 1, 65, 300, 2000, 16, 33]
    steps = Steps(heads, longest, None)
    context, backend = steps.context, steps.backend
    q = make_queries(heads, batch, "cuda")
    inputs = steps.inputs([1] * batch, batch, False)
    rows, seq_lens = inputs.rows_device.clone(), inputs.seq_lens_device
    inputs.rows_device = rows
    result: list[Tensor] = []

    def step() -> Tensor:
        backend.plan_on_device(seq_lens, rows, batch)
        result[:] = [backend.attend(0, q, steps.spec, inputs)]
        return result[0]

    replay = graph_replay(step)
    captured = result[0]
    for count in (8, 3, 1, 8):
        lens = [max(1, n - 13 * count) for n in longest[:count]]
        seq_lens.fill_(1)
        seq_lens[:count] = torch.tensor(lens, dtype=torch.int32)
        rows.zero_()
        rows[:count] = context.rows[:count]
        q.normal_()
        replay()
        context.lens = lens
        steps.check(q, [1] * count, captured)


# --- refusals ---


def test_layouts_outside_the_contract_are_refused() -> None:
    heads = Heads(128, 4, 2)
    decoder = Decoder(on_gpu(heads, [5]), limits_of(heads, 264))
    decoder.plan_work(None)
    decoder.q = decoder.q.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="heads must be contiguous"):
        decoder.attend_planned()
    with pytest.raises(ValueError, match=r"float8_e4m3fn or float8_e5m2"):
        paged_decode.attention_defines(BF16, FP16, 128, 4, 16, False)
