"""The host tier's slots, without a scheduler: who is kept, who makes room, and in which order it is copied."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.host_tier import HostTier


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def tier_with(*numbers: int, num_slots: int = 3, keeps_all: bool = True) -> HostTier:
    """Blocks `numbers` are on the host already, saved in this order."""
    tier = HostTier(num_slots, keeps_all)
    for number in numbers:
        tier.save(number, name(number))
    tier.take_copies()
    return tier


def test_only_what_a_preempted_request_wants_is_saved():
    tier = HostTier(3, keeps_all=False)
    tier.want(1, [name(5), name(6)])
    tier.save(10, name(5))
    tier.save(11, name(7))
    out, back = tier.take_copies()
    assert [block for block, _ in out] == [10]
    assert back == []
    assert name(5) in tier
    assert name(7) not in tier
    tier.check_invariants()


def test_a_request_that_ends_gives_its_slots_back_unless_others_want_them():
    tier = HostTier(3, keeps_all=False)
    tier.want(1, [name(5), name(6)])
    tier.want(2, [name(5)])
    tier.save(10, name(5))
    tier.save(11, name(6))
    assert tier.num_swapped == 2
    tier.unwant(1)
    tier.unwant(1)  # again: nothing
    assert tier.num_used == 1
    assert [block for block, _ in tier.take_copies()[0]] == [10], "6 was not worth copying any more"
    tier.unwant(2)
    assert tier.num_used == tier.num_swapped == 0
    tier.check_invariants()


def test_a_request_without_full_blocks_is_not_swapped():
    tier = HostTier(3, keeps_all=False)
    tier.want(1, [])
    assert tier.num_swapped == 0


def test_what_a_request_takes_back_leaves_after_the_step():
    tier = HostTier(3, keeps_all=False)
    tier.want(1, [name(5), name(6)])
    tier.save(10, name(5))
    tier.save(11, name(6))
    tier.take_copies()
    tier.reserve([name(5)])
    tier.unwant(1)
    assert name(6) not in tier
    tier.load(name(5), 20)
    tier.check_invariants()
    out, back = tier.take_copies()
    assert out == []
    assert [block for _, block in back] == [20]
    assert tier.num_used == 0
    tier.check_invariants()


def test_the_least_recently_used_makes_room():
    tier = tier_with(1, 2, 3)
    tier.save(40, name(1))  # here already: used, not copied
    assert tier.take_copies() == ([], [])
    tier.save(41, name(4))
    assert name(2) not in tier
    assert all(name(number) in tier for number in (1, 3, 4))
    assert len(tier.take_copies()[0]) == 1


def test_a_slot_that_is_read_in_this_step_does_not_make_room():
    tier = tier_with(1, 2, 3)
    tier.reserve([name(1), name(2)])
    tier.save(40, name(4))
    assert name(3) not in tier
    tier.reserve([name(4)])
    tier.save(50, name(5))
    assert name(5) not in tier, "all slots are read: it is computed again"
    for number, block in ((1, 21), (2, 22), (4, 24)):
        tier.load(name(number), block)
    tier.check_invariants()
    out, back = tier.take_copies()
    assert [block for block, _ in out] == [40]
    assert dict(back)[dict(out)[40]] == 24, "what is copied out may be copied in by the same step"
    tier.save(60, name(6))
    assert name(4) not in tier, "what is on the device again makes room first, from its end on"


def test_a_slot_written_twice_in_a_step_gets_the_later_block():
    tier = HostTier(1, keeps_all=True)
    tier.save(10, name(1))
    tier.save(11, name(2))
    assert tier.take_copies() == ([(11, 0)], [])
    assert name(1) not in tier


def test_what_is_discarded_before_the_step_is_not_copied():
    tier = tier_with(1, num_slots=2)
    tier.discard(name(1))
    tier.discard(name(1))
    tier.save(10, name(2))
    tier.discard(name(2))
    assert tier.take_copies() == ([], [])
    assert tier.num_used == 0
    tier.check_invariants()


def test_a_slot_cannot_be_discarded_while_it_is_read():
    tier = tier_with(1)
    tier.reserve([name(1)])
    with pytest.raises(AssertionError, match="while it is read"):
        tier.discard(name(1))


OPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 3)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(OPS, st.integers(1, 5), st.booleans())
def test_what_is_found_is_what_was_saved(
    ops: list[tuple[int, int, int]], num_slots: int, keeps_all: bool
) -> None:
    """A device block is the number of its name, for one step each; memory is a dictionary of slots."""
    tier = HostTier(num_slots, keeps_all)
    memory: dict[int, int] = {}
    expected: dict[int, int] = {}  # device block -> number, of this step's loads

    def run_step() -> None:
        out, back = tier.take_copies()
        slots = [slot for _, slot in out]
        assert len(set(slots)) == len(slots)
        for block, slot in out:
            memory[slot] = block % 100
        assert {block: memory[slot] for slot, block in back} == expected
        expected.clear()

    next_block = 100
    for op, number, req_id in ops:
        if op == 0:
            run_step()
        elif op == 1:
            if req_id not in tier._swapped:
                tier.want(req_id, [name(n) for n in range(number)])
        elif op == 2:
            tier.unwant(req_id)
        elif op == 3 and name(number) in tier:
            names = [name(number)]
            tier.reserve(names)
            tier.load(names[0], next_block)
            expected[next_block] = number
            next_block += 1
        else:
            tier.save(100 * next_block + number, name(number))
            next_block += 1
        tier.check_invariants()
        assert tier.num_used <= num_slots
    run_step()
    assert all(memory[slot] == int.from_bytes(n, "big") for n, slot in tier._slots.items())
