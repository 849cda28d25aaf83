"""The pool of KV blocks: who is free, who is shared, who can be found by content.

A block is in exactly one state:

    reserved   block 0, target of padding writes; never handed out
    free       no references, no name
    cached     no references, but named: its contents can be found and taken up again
    used       one reference or more; named or not

Free and cached blocks form one doubly linked list, threaded through two arrays, so that any block
enters or leaves it in O(1):

    next handed out -> [free] [free] ... [cached, oldest] ... [cached, newest] <- last handed out

A named block returns to the tail and waits there, least recently used first; an unnamed one returns
to the head. Block 0 is never free, so its links serve as the list's two ends.

Attention on a CPU reads a request's blocks without copying if they are consecutive. So a new table
starts where a cursor points, and the cursor moves on by the room the request may come to need; the
table then grows into the blocks behind it if they are still there, else from the head of the list.
Nothing is reserved: it is a preference, like neighbours leaving a seat between them.

    |AAAA....|BB......|CCCCC...|        |      A, B, C grow to the right
                               ^ cursor
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray


class BlockState(IntEnum):
    RESERVED = 0
    FREE = 1
    CACHED = 2
    USED = 3
    SHARED = 4  # used by two or more


# by the number of references, up to 2; a block without any may also be CACHED
OWNED_STATES = np.array([BlockState.FREE, BlockState.USED, BlockState.SHARED], np.uint8)


class BlockPool:
    """Blocks 1 .. num_blocks - 1 with reference counts, names and a free list."""

    def __init__(self, num_blocks: int) -> None:
        """`num_blocks` counts the reserved block 0. Raises ValueError below 2."""
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks must be at least 2 (block 0 is reserved), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1  # free and cached
        # told of a cached block that is handed out, before its name is gone
        self.on_overwrite: Callable[[int, bytes], None] | None = None
        self._num_unnamed = num_blocks - 1  # of them free
        self._next = [*range(1, num_blocks), 0]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]
        self._refs = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._cursor = 1
        self._tick = 0  # named blocks released so far
        self._released_at = [0] * num_blocks  # tick of a named block's last release

    def refs(self, block: int) -> int:
        return self._refs[block]

    def name_of(self, block: int) -> bytes | None:
        return self._names[block]

    def find(self, name: bytes) -> int | None:
        """The block with these contents, used or cached. O(1)."""
        return self._by_name.get(name)

    def allocate(self, count: int, table: list[int], room: int = 0) -> None:
        """Append `count` blocks to `table`, each with one reference. Needs `count <= num_free`.

        `room`: how many blocks the table may come to need in all; matters for an empty table only.
        A cached block that is handed out loses its name.
        """
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        block = table[-1] + 1 if table else self._start(max(count, room))
        for _ in range(count):
            if block == self.num_blocks or not self._is_spare(block):
                block = self._next[0]
            self._unlink(block)
            name = self._names[block]
            if name is not None:
                if self.on_overwrite is not None:
                    self.on_overwrite(block, name)
                del self._by_name[name]
                self._names[block] = None
            self._refs[block] = 1
            table.append(block)
            block += 1

    def acquire(self, block: int) -> None:
        """Take one more reference to a named block, used or cached."""
        if self._refs[block] == 0:
            assert self._names[block] is not None, f"block {block} is free: its contents are gone"
            self._unlink(block)
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back; the last one returns the block to the list."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} released more often than taken"
        self._refs[block] = refs
        if refs == 0:
            self._link(block)

    def set_name(self, block: int, name: bytes) -> bool:
        """Make a used, full block findable. False if another block already has this name: both hold
        the same contents, and the older one is kept."""
        assert self._refs[block] > 0, f"block {block} is named while nobody holds it"
        holder = self._by_name.setdefault(name, block)
        if holder != block:
            return False
        self._names[block] = name
        return True

    def forget(self, block: int) -> None:
        """Drop a block's name, so that nobody finds it any more; whoever holds it keeps it."""
        name = self._names[block]
        if name is None:
            return
        is_cached = self._refs[block] == 0
        if is_cached:
            self._unlink(block)
        del self._by_name[name]
        self._names[block] = None
        if is_cached:  # first to be reused
            self._link(block)

    def forget_all(self) -> int:
        """Drop all names; returns how many there were. O(blocks)."""
        named = list(self._by_name.values())
        for block in named:
            self.forget(block)
        return len(named)

    def states(self) -> NDArray[np.uint8]:
        """`state` of every block, [num_blocks]: a few times faster than asking for each. O(blocks)."""
        refs = np.fromiter(self._refs, np.int32, self.num_blocks)
        states = OWNED_STATES[np.minimum(refs, 2)]
        named = np.fromiter(self._by_name.values(), np.int64, len(self._by_name))
        states[named[refs[named] == 0]] = BlockState.CACHED
        states[0] = BlockState.RESERVED
        return states

    def state(self, block: int) -> BlockState:
        if block == 0:
            return BlockState.RESERVED
        if self._refs[block] > 0:
            return BlockState.USED if self._refs[block] == 1 else BlockState.SHARED
        return BlockState.FREE if self._names[block] is None else BlockState.CACHED

    def free_list(self) -> list[int]:
        """Free and cached blocks in the order in which they will be handed out. O(blocks)."""
        blocks = []
        block = self._next[0]
        while block != 0:
            blocks.append(block)
            assert len(blocks) < self.num_blocks, "the free list has a loop"
            block = self._next[block]
        return blocks

    def check_invariants(self) -> None:
        """Raise AssertionError, in words, unless the pool is consistent. O(blocks)."""
        free = self.free_list()
        assert len(free) == self.num_free, f"{len(free)} blocks listed, {self.num_free} counted"
        idle = {b for b in range(1, self.num_blocks) if self._refs[b] == 0}
        assert set(free) == idle, "the free list is not the set of blocks without references"
        unnamed = sum(self._names[b] is None for b in free)
        assert unnamed == self._num_unnamed, f"{unnamed} unnamed, {self._num_unnamed} counted"
        assert all(count >= 0 for count in self._refs), "a reference count is negative"
        assert self._refs[0] == 0, "the reserved block has an owner"
        assert self._names[0] is None, "the reserved block has a name"
        for block in (0, *free):
            assert self._prev[self._next[block]] == block, f"links around block {block} disagree"
        named = {name: b for b, name in enumerate(self._names) if name is not None}
        assert named == self._by_name, "names by block and blocks by name disagree"

    def _start(self, room: int) -> int:
        """Where a new table begins; moves the cursor behind the room it may need."""
        start = self._cursor
        if start + room > self.num_blocks:
            start = 1
        self._cursor = start + room if start + room < self.num_blocks else 1
        return start

    def _is_spare(self, block: int) -> bool:
        """May `block` be taken out of turn? If it is free; or, where hardly any free block is left, if
        it is cached and old: as many releases ago as half the list is long."""
        if self._refs[block] != 0:
            return False
        if self._names[block] is None:
            return True
        if self._num_unnamed > self.num_blocks // 16:
            return False
        return self._tick - self._released_at[block] > self.num_free // 2

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1
        if self._names[block] is None:
            self._num_unnamed -= 1

    def _link(self, block: int) -> None:
        """Into the list: a named block at the tail, an unnamed one at the head."""
        if self._names[block] is None:
            before = 0
            self._num_unnamed += 1
        else:
            before = self._prev[0]
            self._tick += 1
            self._released_at[block] = self._tick
        after = self._next[before]
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self.num_free += 1
