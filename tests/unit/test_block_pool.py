"""The pool of KV blocks: states, order of reuse, and a model-based random test."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.block_pool import BlockPool, BlockState


def take(pool: BlockPool, count: int, table: list[int] | None = None) -> list[int]:
    table = [] if table is None else table
    pool.allocate(count, table)
    return table


def test_needs_a_block_besides_the_reserved_one():
    with pytest.raises(ValueError, match="num_blocks must be at least 2"):
        BlockPool(1)


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert sorted(take(pool, 4)) == [1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.state(0) is BlockState.RESERVED
    pool.check_invariants()


def test_fresh_pool_hands_out_consecutive_blocks():
    assert take(BlockPool(9), 8) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_table_grows_into_the_block_behind_it():
    pool = BlockPool(10)
    first, second = take(pool, 2), take(pool, 2)
    assert take(pool, 2, [*second]) == [3, 4, 5, 6]
    assert take(pool, 1, [*first]) == [1, 2, 7]  # 3 is in use, so the head of the list
    pool.check_invariants()


def test_new_tables_leave_room_for_each_other_to_grow():
    pool = BlockPool(21)
    tables: list[list[int]] = [[], [], [], []]
    for table in tables:
        pool.allocate(2, table, room=5)
    assert [t[0] for t in tables] == [1, 6, 11, 16]
    for _ in range(3):
        for table in tables:
            pool.allocate(1, table)
    assert [t[-1] - t[0] for t in tables] == [4] * 4
    pool.check_invariants()


def test_no_cached_block_goes_before_its_turn_while_free_ones_are_plenty():
    pool = BlockPool(41)
    table = take(pool, 2)
    pool.set_name(2, b"a")
    pool.release(2)
    for _ in range(60):  # many releases later
        pool.acquire(2)
        pool.release(2)
    other = take(pool, 1)
    pool.set_name(other[0], b"b")
    for _ in range(60):
        pool.release(other[0])
        pool.acquire(other[0])
    assert take(pool, 1, [table[0]])[-1] != 2
    assert pool.find(b"a") == 2


def test_room_is_a_preference_only():
    pool = BlockPool(6)
    table: list[int] = []
    pool.allocate(1, table, room=100)
    other: list[int] = []
    pool.allocate(4, other, room=100)
    assert sorted(table + other) == [1, 2, 3, 4, 5]


def test_when_all_is_cached_an_old_neighbour_may_go_before_its_turn():
    pool = BlockPool(21)
    blocks = take(pool, 20)
    for block in blocks:
        pool.set_name(block, b"%d" % block)
    for block in blocks:
        pool.release(block)
    assert pool.free_list() == blocks
    table = [3]
    pool.acquire(3)
    assert take(pool, 2, table) == [3, 4, 5]  # old: though 1 and 2 are older
    recent = [17]
    pool.acquire(17)
    assert take(pool, 1, recent) == [17, 1]  # 18 was released recently: the head instead
    pool.check_invariants()


def test_a_cached_neighbour_is_not_preferred():
    pool = BlockPool(6)
    first, second = take(pool, 1), take(pool, 1)
    pool.set_name(second[0], b"name")
    pool.release(second[0])
    assert take(pool, 1, first) == [1, 3]
    assert pool.find(b"name") == 2


def test_released_in_reverse_a_table_is_reused_in_order():
    pool = BlockPool(10)
    table = take(pool, 5)
    for block in reversed(table):
        pool.release(block)
    assert pool.free_list()[:5] == table


def test_unnamed_blocks_are_reused_before_cached_ones_and_those_oldest_first():
    pool = BlockPool(6)
    blocks = take(pool, 5)
    for block in (2, 4):
        pool.set_name(block, b"%d" % block)
    for block in (4, 2, 1, 3, 5):
        pool.release(block)
    assert sorted(pool.free_list()[:3]) == [1, 3, 5]
    assert pool.free_list()[3:] == [4, 2]
    assert [pool.state(b) for b in (2, 3)] == [BlockState.CACHED, BlockState.FREE]
    assert len(blocks) == 5


def test_reuse_forgets_the_name():
    pool = BlockPool(2)
    (block,) = take(pool, 1)
    assert pool.set_name(block, b"a")
    pool.release(block)
    assert pool.find(b"a") == block
    assert take(pool, 1) == [block]
    assert pool.find(b"a") is None
    assert pool.name_of(block) is None


def test_acquire_takes_a_cached_block_out_of_the_list_and_shares_a_used_one():
    pool = BlockPool(4)
    (block,) = take(pool, 1)
    pool.set_name(block, b"a")
    pool.release(block)
    pool.acquire(block)
    assert block not in pool.free_list()
    assert pool.num_free == 2
    pool.acquire(block)
    assert pool.state(block) is BlockState.SHARED
    pool.release(block)
    assert pool.state(block) is BlockState.USED
    pool.release(block)
    assert pool.state(block) is BlockState.CACHED
    pool.check_invariants()


def test_second_block_of_equal_contents_stays_unnamed():
    pool = BlockPool(4)
    first, second = take(pool, 2)
    assert pool.set_name(first, b"a")
    assert pool.set_name(first, b"a")
    assert not pool.set_name(second, b"a")
    assert pool.find(b"a") == first
    pool.release(second)
    assert pool.state(second) is BlockState.FREE


def test_forget_makes_a_cached_block_free_and_leaves_a_used_one_with_its_owner():
    pool = BlockPool(4)
    used, cached = take(pool, 2)
    pool.set_name(used, b"u")
    pool.set_name(cached, b"c")
    pool.release(cached)
    pool.forget(used)
    pool.forget(cached)
    pool.forget(cached)
    assert pool.find(b"u") is None
    assert pool.find(b"c") is None
    assert pool.state(used) is BlockState.USED
    assert pool.free_list()[0] == cached
    pool.check_invariants()


def test_misuse_is_reported_in_words():
    pool = BlockPool(3)
    (block,) = take(pool, 1)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        take(pool, 2)
    pool.release(block)
    with pytest.raises(AssertionError, match="released more often than taken"):
        pool.release(block)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.set_name(block, b"a")


def test_acquire_of_a_free_block_is_refused():
    with pytest.raises(AssertionError, match="its contents are gone"):
        BlockPool(3).acquire(1)


def test_check_invariants_notices_damage():
    pool = BlockPool(4)
    take(pool, 1)
    pool._refs[1] = 0
    with pytest.raises(AssertionError, match="free list"):
        pool.check_invariants()


OPS = st.lists(
    st.tuples(st.sampled_from(["take", "free", "name", "share", "forget"]), st.integers(0, 10**6)),
    min_size=20,
    max_size=150,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ops=OPS, num_blocks=st.integers(2, 20))
def test_random_operations_agree_with_a_naive_model(
    ops: list[tuple[str, int]], num_blocks: int
) -> None:
    """The model: a reference count and a name per block, in plain dictionaries."""
    pool = BlockPool(num_blocks)
    refs = dict.fromkeys(range(1, num_blocks), 0)
    names: dict[int, bytes] = {}
    for op, value in ops:
        used = sorted(b for b in refs if refs[b])
        if op == "take":
            count = value % 3
            if count > pool.num_free:
                continue
            before = [used[value % len(used)]] if used else []
            blocks = take(pool, count, before.copy())[len(before) :]
            assert len(set(blocks)) == count
            for block in blocks:
                assert refs[block] == 0, "a block in two hands"
                refs[block] = 1
                names.pop(block, None)
        elif op == "free" and used:
            block = used[value % len(used)]
            pool.release(block)
            refs[block] -= 1
        elif op == "name" and used:
            block = used[value % len(used)]
            if block not in names:
                name = b"%d" % (value % 30)
                is_new = name not in names.values()
                assert pool.set_name(block, name) == is_new
                if is_new:
                    names[block] = name
        elif op == "share" and names:
            block = sorted(names)[value % len(names)]
            assert pool.find(names[block]) == block
            pool.acquire(block)
            refs[block] += 1
        elif op == "forget" and names:
            block = sorted(names)[value % len(names)]
            pool.forget(block)
            del names[block]
        pool.check_invariants()
        assert pool.num_free == sum(count == 0 for count in refs.values())
        assert all(pool.refs(b) == count for b, count in refs.items())
        assert all(pool.name_of(b) == names.get(b) for b in refs)
        assert pool.states().tolist() == [pool.state(b) for b in range(num_blocks)]
