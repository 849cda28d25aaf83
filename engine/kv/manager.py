"""Block tables: which KV blocks a request holds, and which of them others may find by content.

A full block is named by its tokens and everything before them (engine.api.hashing). Prefix caching
and resumption after preemption are therefore one operation: look the names up, take what is found,
compute the rest.

With a host tier (engine/kv/host_tier.py) names are looked up there, too, and what is found is copied to
blocks of the device. If prefixes are not to be shared, names are private to their request, for that
purpose alone.

When may a block be named? When every token in it is *known* and *computed* (its step is launched):

    prefill   tokens are known, so the blocks are named when the step that fills them is launched.
              Later readers run after it on the one compute stream; readers in the same step, too,
              since every layer writes all KV of a step with prompt tokens before it attends.
    decode    the token is known only at commit, so the block is named there, and not sooner: in a step
              without prompt tokens, a GPU's rows write and read at the same time (ops/rotated_decode.py).

A named block is never written again: the position that a request writes next lies behind its last
computed token, and all positions of a named block are computed. That holds for the wasted row of a
request found to have ended one step late, as its token was counted as computed when it was launched.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.api.hashing import extend_names, root_name
from engine.kv.block_pool import BlockPool
from engine.kv.host_tier import HostTier
from engine.request import Request

LIKELY_OUTPUT_TOKENS = 512  # room left behind a new table; only a preference, see block_pool


class KVCacheManager:
    """Hands blocks of the pool to requests and takes them back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool,
        tier: HostTier | None = None,
    ) -> None:
        """`num_blocks` counts the reserved block 0. Raises ValueError if there is no other."""
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tier = tier
        self._has_names = enable_prefix_caching or tier is not None
        if tier is not None:
            self.pool.on_overwrite = tier.save

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold at all."""
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner, cached ones included."""
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """The longest run of cached blocks for the request's known tokens; takes no references.

        A block that only the host has is 0 here. Covers at most `request.max_cached_tokens`: some hidden
        states are needed.
        """
        if not self._has_names:
            return []
        find, tier = self.pool.find, self.tier
        blocks: list[int] = []
        for name in request.block_names[: request.max_cached_tokens // self.block_size]:
            block = find(name)
            if block is None:
                if tier is None or name not in tier:
                    break
                block = 0
            blocks.append(block)
        return blocks

    def start(self, request: Request, prefix: list[int], num_tokens: int) -> bool:
        """Attach a prefix and make room for `num_tokens` behind it. All or nothing."""
        num_shared = sum(self.pool.refs(block) > 0 for block in prefix)
        total = self.blocks_for(len(prefix) * self.block_size + num_tokens)
        if total - num_shared > self.pool.num_free:
            return False
        self.attach_prefix(request, prefix)
        has_room = self.extend(request, num_tokens)
        assert has_room, f"request {request.req_id}: blocks were counted wrongly"
        return True

    def attach_prefix(self, request: Request, blocks: list[int]) -> int:
        """Give `blocks`, as `find_prefix` returned them, to a request that holds none.

        Those that the host has need free blocks, as many as there are zeros. Returns the number of
        cached tokens, which count as computed.
        """
        assert not request.block_ids, f"request {request.req_id} already holds blocks"
        request.num_shared_blocks = sum(self.pool.refs(block) > 0 for block in blocks)
        for block in blocks:
            if block:
                self.pool.acquire(block)
        if self.tier is None:
            request.block_ids.extend(blocks)
        else:
            self._attach_with_tier(request, blocks, self.tier)
        request.num_named_blocks = len(blocks)
        request.num_computed = len(blocks) * self.block_size
        return request.num_computed

    def _attach_with_tier(self, request: Request, blocks: list[int], tier: HostTier) -> None:
        """Fill the table; where the host has a block, with a free one that it is copied to."""
        table, room = request.block_ids, self._likely_room(request)
        missing = [
            name for name, block in zip(request.block_names, blocks, strict=False) if block == 0
        ]
        tier.reserve(missing)  # before taking free blocks, which may need slots themselves
        tier.unwant(request.req_id)
        for name, block in zip(request.block_names, blocks, strict=False):
            if block:
                table.append(block)
            else:
                self.pool.allocate(1, table, room)
                self.pool.set_name(table[-1], name)
                tier.load(name, table[-1])

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` more behind the computed ones. All or nothing."""
        table = request.block_ids
        missing = -(-(request.num_computed + num_tokens) // self.block_size) - len(table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        self.pool.allocate(missing, table, room=self._likely_room(request))
        return True

    def _likely_room(self, request: Request) -> int:
        likely = min(request.max_kv_tokens, len(request.token_ids) + LIKELY_OUTPUT_TOKENS)
        return self.blocks_for(likely)

    def name_full_blocks(self, request: Request) -> None:
        """Name the blocks that became full of known and computed tokens. O(new full blocks)."""
        size = self.block_size
        first = request.num_named_blocks
        end = min(len(request.token_ids), request.num_computed) // size
        if end <= first or not self._has_names:
            return
        names = request.block_names
        if len(names) < end:
            if self.enable_prefix_caching:
                parent = names[-1] if names else root_name(request.cache_salt)
                tokens = request.token_ids[len(names) * size : end * size].tobytes()
                names.extend(extend_names(parent, tokens, size))
            else:
                names.extend(private_name(request, index) for index in range(len(names), end))
        for index in range(first, end):
            self.pool.set_name(request.block_ids[index], names[index])
        request.num_named_blocks = end

    def want_back(self, request: Request) -> None:
        """A request is about to be preempted: the host shall keep what is overwritten of its blocks."""
        if self.tier is not None:
            self.tier.want(request.req_id, request.block_names[: request.num_named_blocks])

    def retire(self, request: Request, is_bad: bool) -> None:
        """A request has ended and released its blocks. Their names are forgotten on device and host if
        their contents are not to be trusted (`is_bad`), or if nobody else can know them."""
        tier = self.tier
        if tier is not None:
            tier.unwant(request.req_id)
        if is_bad or (tier is not None and not self.enable_prefix_caching):
            for name in request.block_names:
                block = self.pool.find(name)
                if block is not None:
                    self.pool.forget(block)
                if tier is not None:
                    tier.discard(name)

    def release(self, request: Request) -> None:
        """Take all blocks back, last one first, so that a prefix is reused later than what follows it.

        Named blocks stay findable until they are reused.
        """
        pool = self.pool
        for block in reversed(request.block_ids):
            pool.release(block)
        request.block_ids.clear()
        request.num_computed = 0
        request.num_named_blocks = 0
        request.num_shared_blocks = 0

    def forget_prefixes(self) -> int:
        """No later request finds a block of now, on device or host; returns how many could be found.

        O(blocks).
        """
        num_on_host = self.tier.forget_all() if self.tier is not None else 0
        return self.pool.forget_all() + num_on_host

    def map(self) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """All blocks in order, run-length encoded: `BlockState` and length of each run, both [runs].

        O(blocks), on request only: 100,000 take a few milliseconds.
        """
        states = self.pool.states()
        starts = np.flatnonzero(np.diff(states, prepend=states[:1] + 1))
        return states[starts], np.diff(starts, append=len(states)).astype(np.int32)

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless `requests`, all that hold blocks, account for every reference."""
        pool, size = self.pool, self.block_size
        pool.check_invariants()
        if self.tier is not None:
            self.tier.check_invariants()
        owners = [0] * pool.num_blocks
        full_names: dict[int, bytes] = {}
        for request in requests:
            table = request.block_ids
            assert len(set(table)) == len(table), f"request {request.req_id} holds a block twice"
            for block in table:
                owners[block] += 1
            settled = min(len(request.token_ids), request.num_computed)
            assert request.num_computed <= len(table) * size, "computed tokens without a block"
            assert request.num_named_blocks * size <= settled, "a named block is not full"
            full_names.update(zip(table, request.block_names[: settled // size], strict=False))
        for block, count in enumerate(owners):
            assert count == pool.refs(block), f"block {block}: {count} owners, {pool.refs(block)}"
            if count and pool.name_of(block) is not None:
                assert pool.name_of(block) == full_names.get(block), f"block {block}: wrong name"


def private_name(request: Request, index: int) -> bytes:
    """A name of 16 bytes for a block that is not to be found by its content."""
    return request.sequence.to_bytes(8, "big") + index.to_bytes(8, "big")
