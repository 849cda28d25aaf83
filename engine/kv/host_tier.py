"""A second home for KV blocks, in host memory: what is about to be overwritten on the device can be
copied here under its name, and back.

Blocks are named by content, so swapping a request out is no state of its own. It is preempted as ever:
it gives its blocks back, which stay on the device under their names until somebody needs the room. At
that moment, and no earlier, a block is copied to a slot here. When the request resumes, its names are
looked up on the device first, then here; what is found nowhere is computed again.

    device   [a][b][c][d]   preempted: all four are free, named, and wanted back
    device   [a][b][x][y]   another request needs two: d and c are copied out first
    host     [c][d]
    device   [x][y][a][b][ ][ ]   resumed: a and b are still there, c and d are copied in

A step executes its copies out before anything else, then its copies in, then the forward pass, all in
order on the compute stream. Three rules make that order enough:

  * A block copied out holds what its name says: it was filled by an earlier step, and nothing of this
    one has run. A slot written twice in one step gets only the later block.
  * A slot that is read in a step is not written in the same step, as copies out run first.
  * A block copied in may be named at once: its readers run later.

The order of slots is that of their last use, and the least recently used one makes room.
"""

from collections import Counter, OrderedDict

Copies = list[tuple[int, int]]


class HostTier:
    """Names and slots; the data is in engine/runner/host_blocks.py."""

    def __init__(self, num_slots: int, keeps_all: bool) -> None:
        """`keeps_all`: every named block comes here, as a second level of the prefix cache; else only
        those of preempted requests, which leave when their request resumes."""
        assert num_slots > 0, "a host tier without slots"
        self.num_slots = num_slots
        self.keeps_all = keeps_all
        self.num_saved = 0  # blocks copied out since the start
        self.num_loaded = 0  # blocks copied in
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._idle = list(range(num_slots - 1, -1, -1))
        self._swapped: dict[int, list[bytes]] = {}  # what preempted requests want back, by req_id
        self._wanted: Counter[bytes] = Counter()  # the same by name
        self._saves: dict[int, int] = {}  # slot -> device block, for the next step
        self._loads: dict[int, bytes] = {}  # slot -> name, read by the next step
        self._load_pairs: Copies = []

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    @property
    def num_used(self) -> int:
        return len(self._slots)

    @property
    def num_swapped(self) -> int:
        """Preempted requests whose blocks are kept for them."""
        return len(self._swapped)

    def want(self, req_id: int, names: list[bytes]) -> None:
        """A request is preempted: keep the blocks it will look for."""
        if names and not self.keeps_all:
            self._swapped[req_id] = names
            self._wanted.update(names)

    def unwant(self, req_id: int) -> None:
        """It resumes or has ended. What only it wanted makes room, unless it is read in this step."""
        for name in self._swapped.pop(req_id, ()):
            self._wanted[name] -= 1
            if self._wanted[name] == 0:
                del self._wanted[name]
                if self._slots.get(name) not in self._loads:
                    self.discard(name)

    def save(self, block: int, name: bytes) -> None:
        """A named block is about to be overwritten on the device: copy it if it is worth it."""
        if name in self._slots:
            self._slots.move_to_end(name)
        elif self.keeps_all or name in self._wanted:
            slot = self._take_slot()
            if slot is not None:
                self._slots[name] = slot
                self._saves[slot] = block
                self.num_saved += 1

    def reserve(self, names: list[bytes]) -> None:
        """These will be read in this step: their slots are not for others until it is planned."""
        for name in names:
            self._loads[self._slots[name]] = name

    def load(self, name: bytes, block: int) -> None:
        """Copy a reserved name to a device block."""
        self._load_pairs.append((self._slots[name], block))
        self.num_loaded += 1

    def discard(self, name: bytes) -> None:
        """Forget a name, if it is here."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            assert slot not in self._loads, f"slot {slot} is given up while it is read"
            self._saves.pop(slot, None)
            self._idle.append(slot)

    def forget_all(self) -> int:
        """Forget all names but those that the next step reads; returns how many."""
        names = [name for name, slot in self._slots.items() if slot not in self._loads]
        for name in names:
            self.discard(name)
        return len(names)

    def take_copies(self) -> tuple[Copies, Copies]:
        """The next step's copies: out as (block, slot), in as (slot, block)."""
        out = [(block, slot) for slot, block in self._saves.items()]
        back, read = self._load_pairs, self._loads
        self._saves, self._loads, self._load_pairs = {}, {}, []
        for name in read.values():  # on the device now: the first to make room here
            if self.keeps_all:
                self._slots.move_to_end(name, last=False)
            elif name not in self._wanted:
                self.discard(name)
        return out, back

    def check_invariants(self) -> None:
        """Raise AssertionError, in words, unless the tables agree. O(slots)."""
        used = list(self._slots.values())
        assert sorted([*used, *self._idle]) == list(range(self.num_slots)), (
            "a slot is lost or shared"
        )
        assert set(self._saves) <= set(used), "a slot without a name is written"
        assert set(self._loads) <= set(used), "a slot without a name is read"
        wanted = Counter(name for names in self._swapped.values() for name in names)
        assert wanted == self._wanted, "wanted names are miscounted"
        assert self.keeps_all or set(self._slots) <= set(wanted) | set(self._loads.values()), (
            "a block is kept that nobody wants"
        )

    def _take_slot(self) -> int | None:
        """An idle slot, or the least recently used one that this step does not read."""
        if self._idle:
            return self._idle.pop()
        for name, slot in self._slots.items():
            if slot not in self._loads:
                del self._slots[name]
                self._saves.pop(slot, None)
                return slot
        return None
