"""Blocks of the store that stay in bounded host memory: the tier between the pool and storage.

Theory of operation
-------------------
The memory is cut into slots of one block. A block is findable once its bytes are complete, so
nothing half-written is ever lent. Who reads a slot borrows it, and a borrowed slot keeps its block.

Room is made as in the folder of a ``file:`` store (``tree.py``): the least recently used block
without successors goes, so whole tails go before what they hang from. Time is counted in blocks
that were offered. A block that was asked for counts as used half a tier later than it was: a long
prompt that passes through once gives way to what is read again and again, until that has not been
read for half a tier's worth of others. What the newest blocks hang from never makes room for
them; they are refused then, with all that would hang from them.

Blocks may be brought here ahead of their first read (``prefetch``). Until that read, the end of the
wait for it (``abandon``) or their eviction they are *ahead*, and at most ``AHEAD_SHARE`` of the
slots are: so much of what is used less than anything else can give way to guesses, and no more.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import flowpath_native
import numpy as np

from common.errors import InvariantViolationError
from common.storage.interface import BlockStore, Memory
from common.storage.linked_store import num_leading_hits
from common.storage.tree import BlockTree

AHEAD_SHARE = 4
"""At most 1 / 4 of the slots, and at least one, have blocks ahead of their first read."""


@dataclass(frozen=True, slots=True)
class TierStats:
    """What is in a tier now, and the blocks counted since it was made."""

    num_blocks: int
    num_hits: int
    num_added: int
    num_evicted: int
    num_refused: int
    """Blocks that found no room, for what is there is used more."""
    num_prefetched: int
    num_prefetch_used: int
    num_prefetch_wasted: int
    """Prefetched ones are used, wasted, or still ahead of their first read."""


class HostTier:
    """Copies of whole blocks in ``memory``, by prefix hash. May be used from any thread.

    ``memory`` is its owner's to free, after the last call.
    """

    def __init__(self, memory: Memory, block_bytes: int) -> None:
        self._memory = memory
        self._block_bytes = block_bytes
        with memoryview(memory) as view:
            self.num_slots = view.nbytes // block_bytes
        self._mutex = threading.Lock()
        self._tree = BlockTree()
        self._slot_of: dict[bytes, int] = {}
        self._free = list(reversed(range(self.num_slots)))
        self._filling: set[bytes] = set()
        self._borrowed: Counter[bytes] = Counter()
        self._refused: dict[bytes, None] = {}
        self._tick = 0
        self._num_hits = 0
        self._num_added = 0
        self._num_evicted = 0
        self._num_refused = 0
        self._max_ahead = max(1, self.num_slots // AHEAD_SHARE)
        self._ahead: set[bytes] = set()
        self._num_reading_ahead = 0
        self._num_prefetched = 0
        self._num_prefetch_used = 0
        self._num_prefetch_wasted = 0

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are here."""
        with self._mutex:
            return _num_leading(hashes, self._slot_of, is_in=True)

    def num_missing(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are not here."""
        with self._mutex:
            return _num_leading(hashes, self._slot_of, is_in=False)

    @contextmanager
    def lent(self, hashes: Sequence[bytes]) -> Iterator[list[int]]:
        """Lend the slots of the leading blocks that are here, perhaps none, and count them as hits.

        Their bytes stay as they are until the end of the block.
        """
        with self._mutex:
            lent = hashes[: _num_leading(hashes, self._slot_of, is_in=True)]
            slots = [self._slot_of[block_hash] for block_hash in lent]
            self._borrowed.update(lent)
            for block_hash in lent:
                self._tree.touch(block_hash, self._tick + self.num_slots // 2)
            self._num_hits += len(lent)
            self._num_prefetch_used += self._first_read(lent)
        try:
            yield slots
        finally:
            with self._mutex:
                self._borrowed -= Counter(lent)

    def copy_out(self, slots: Sequence[int], buffer: Memory, block_ids: Sequence[int]) -> None:
        """Copy lent slots to their places in ``buffer``, without the GIL.

        ValueError where an id is outside of the buffer.
        """
        self._copy(buffer, self._memory, slots, block_ids)

    def put(
        self,
        hashes: Sequence[bytes],
        previous: bytes | None,
        source: Memory,
        block_ids: Sequence[int],
    ) -> None:
        """Take copies of successive blocks that lie in ``source``, as far as they find room.

        They must be whole, and stay as they are during the call.
        """
        parents = [previous, *hashes]
        with self._mutex:
            places = self._reserve(hashes, parents)
        is_copied = False
        try:
            numbers = [number for number, _ in places]
            sources = [block_ids[number] for number in numbers]
            self._copy(self._memory, source, sources, [slot for _, slot in places])
            is_copied = True
        finally:
            with self._mutex:
                for number, slot in places:
                    self._filling.discard(hashes[number])
                    if is_copied:
                        self._add(hashes[number], parents[number], slot)
                    else:
                        self._free.append(slot)

    @property
    def prefetch_room(self) -> int:
        """How many more blocks may be brought here ahead of their first read."""
        with self._mutex:
            return self._max_ahead - len(self._ahead) - self._num_reading_ahead

    def prefetch(self, storage: BlockStore, hashes: Sequence[bytes], previous: bytes | None) -> int:
        """Read successive blocks from ``storage``, as far as they may be here ahead of a read.

        Return how many leading ones were read and are here now; the first that is here already,
        finds no room or is not whole ends that.
        """
        with self._mutex:
            slots = self._reserve_ahead(hashes, previous)
            self._num_reading_ahead += len(slots)
        part = hashes[: len(slots)]
        num_whole = 0
        try:
            if slots:
                num_whole = num_leading_hits(storage.read(part, self._memory, slots, previous))
        finally:
            with self._mutex:
                self._num_reading_ahead -= len(slots)
                self._filling.difference_update(part)
                self._free += slots[num_whole:]
                for number in range(num_whole):
                    parent = hashes[number - 1] if number else previous
                    self._add(part[number], parent, slots[number])
                self._ahead.update(part[:num_whole])
                self._num_prefetched += num_whole
        return num_whole

    def abandon(self, hashes: Sequence[bytes]) -> None:
        """Nobody waits for these blocks: those not read yet are blocks like any other now."""
        with self._mutex:
            self._num_prefetch_wasted += self._first_read(hashes)

    def abandon_all(self) -> None:
        """Nobody waits for any block that was not read yet: who did has ended."""
        with self._mutex:
            self._num_prefetch_wasted += len(self._ahead)
            self._ahead.clear()

    def stats(self) -> TierStats:
        """Return the counts of now."""
        with self._mutex:
            return TierStats(
                num_blocks=len(self._slot_of),
                num_hits=self._num_hits,
                num_added=self._num_added,
                num_evicted=self._num_evicted,
                num_refused=self._num_refused,
                num_prefetched=self._num_prefetched,
                num_prefetch_used=self._num_prefetch_used,
                num_prefetch_wasted=self._num_prefetch_wasted,
            )

    def validate(self) -> None:
        """Raise InvariantViolationError unless each slot has one block or is free or filling."""
        with self._mutex:
            self._tree.validate()
            slots = sorted([*self._slot_of.values(), *self._free])
            num_filling = self.num_slots - len(slots)
            if len(set(slots)) != len(slots) or num_filling != len(self._filling):
                raise InvariantViolationError(f"host tier: slots {slots} of {self.num_slots}")
            if any(block_hash not in self._tree for block_hash in self._slot_of):
                raise InvariantViolationError("host tier: a block could not be evicted")
            if not self._ahead <= self._slot_of.keys():
                raise InvariantViolationError("host tier: a block that is not here is ahead")
            ended = self._num_prefetch_used + self._num_prefetch_wasted
            if ended + len(self._ahead) != self._num_prefetched:
                raise InvariantViolationError("host tier: prefetched blocks are miscounted")

    def _reserve(
        self, hashes: Sequence[bytes], parents: Sequence[bytes | None]
    ) -> list[tuple[int, int]]:
        """Return (number, slot) of each block that is new and finds room."""
        places: list[tuple[int, int]] = []
        keep = {*parents, *hashes}
        for number, block_hash in enumerate(hashes):
            self._tick += 1
            if block_hash in self._slot_of:
                self._tree.touch(block_hash, self._tick)
                continue
            if block_hash in self._filling:
                continue
            slot = None if parents[number] in self._refused else self._take_slot(keep)
            if slot is None:
                self._refuse(block_hash)
                continue
            self._refused.pop(block_hash, None)
            self._filling.add(block_hash)
            places.append((number, slot))
        return places

    def _reserve_ahead(self, hashes: Sequence[bytes], previous: bytes | None) -> list[int]:
        """Return slots of the leading blocks that are new and may be here ahead of a read."""
        slots: list[int] = []
        keep = {previous, *hashes}
        if previous is not None and previous in self._slot_of:
            self._tick += 1
            self._tree.touch(previous, self._tick)  # it is waited for: others are older
        room = self._max_ahead - len(self._ahead) - self._num_reading_ahead
        for block_hash in hashes[: max(0, room)]:
            if block_hash in self._slot_of or block_hash in self._filling:
                break
            slot = self._take_slot(keep)
            if slot is None:
                break
            self._tick += 1
            self._filling.add(block_hash)
            slots.append(slot)
        return slots

    def _first_read(self, hashes: Sequence[bytes]) -> int:
        """Take blocks off those that are ahead; return how many of them were."""
        found = self._ahead.intersection(hashes)
        self._ahead -= found
        return len(found)

    def _take_slot(self, keep: set[bytes | None]) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = self._tree.oldest_leaf()
        if oldest is None or oldest in keep or oldest in self._borrowed:
            return None
        self._tree.remove(oldest)
        self._num_evicted += 1
        self._num_prefetch_wasted += self._first_read([oldest])
        return self._slot_of.pop(oldest)

    def _refuse(self, block_hash: bytes) -> None:
        self._num_refused += 1
        self._refused[block_hash] = None
        if len(self._refused) > self.num_slots:
            del self._refused[next(iter(self._refused))]

    def _add(self, block_hash: bytes, parent: bytes | None, slot: int) -> None:
        self._slot_of[block_hash] = slot
        self._tree.add(block_hash, parent, self._block_bytes, self._tick)
        self._num_added += 1

    def _copy(
        self, target: Memory, source: Memory, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        if not source_ids:
            return
        runs = flowpath_native.align(
            np.asarray(source_ids, dtype=np.int32), np.asarray(target_ids, dtype=np.int32)
        )
        flowpath_native.copy_runs(target, source, runs, self._block_bytes)


def _num_leading(hashes: Sequence[bytes], held: dict[bytes, int], *, is_in: bool) -> int:
    for number, block_hash in enumerate(hashes):
        if (block_hash in held) is not is_in:
            return number
    return len(hashes)
