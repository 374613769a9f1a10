"""Which worker has which prefix blocks cached: one table for the whole cluster.

Theory of operation
-------------------
A block's hash names its whole prefix (``PrefixCache.chain``). The table maps it to a bit mask of
workers, one slot each. A chain of hashes is walked once for all workers: those still in the mask
have everything up to here. Of each 16-byte hash 8 bytes are the key: what the index says is a hint
for placement, never trusted with content, and two of a million hashes share a key once in ten
million indexes.

Each worker numbers its batches. A repeat changes nothing; after a gap nothing is taken from the
worker but a snapshot, and what was known before stays as a hint until that comes.

Memory, for each distinct block: a key and a table entry; masks that are equal are one object. A
worker's keys are kept a second time, 8 bytes each, so that forgetting it costs no walk through the
whole table; keys that were removed meanwhile may be among them and do no harm.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import InvariantViolationError, RemoteProtocolError
from services.controller.policy.views import Incarnation

HASH_BYTES = 16
MAX_SHARED_MASKS = 65536
COMPACT_SLACK = 1024


@dataclass(slots=True)
class _Holder:
    """What is known of one worker. ``keys`` contains all its keys, and perhaps more."""

    slot: int
    bit: int
    sequence: int = 0
    num_blocks: int = 0
    keys: "array[int]" = field(default_factory=lambda: array("Q"))


class PrefixIndex:
    """Hash of a prefix block → workers that have it cached."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._holders: dict[Incarnation, _Holder] = {}
        self._slots: list[Incarnation | None] = []

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that somebody has."""
        return len(self._masks)

    def num_blocks_of(self, worker: Incarnation) -> int:
        """Blocks that a worker has, as far as it told."""
        holder = self._holders.get(worker)
        return holder.num_blocks if holder else 0

    def sequence_of(self, worker: Incarnation) -> int:
        """Number of the last batch taken from a worker, 0 before the first.

        A heartbeat that names another number tells of a gap.
        """
        holder = self._holders.get(worker)
        return holder.sequence if holder else 0

    def apply(
        self, worker: Incarnation, sequence: int, added: bytes, removed: bytes, *, is_snapshot: bool
    ) -> bool:
        """Take a batch of hashes, 16 bytes each; a hash in both is there afterwards.

        A snapshot's ``added`` is all that the worker has. Returns False where batches are missing
        before this one: nothing was taken, and a snapshot is needed. A repeat is ignored. Raises
        RemoteProtocolError for frames that are no hashes.
        """
        if len(added) % HASH_BYTES or len(removed) % HASH_BYTES:
            raise RemoteProtocolError(
                f"{worker[0]}: hashes of {len(added)} and {len(removed)} bytes are not whole"
            )
        holder = self._holders.get(worker)
        last = holder.sequence if holder else 0
        if sequence <= last:
            return True
        if not is_snapshot and sequence != last + 1:
            return False
        if holder is None:
            holder = self._admit(worker)
        if is_snapshot:
            self._clear(holder)
        else:
            self._remove(holder, _keys(removed))
        self._add(holder, _keys(added))
        holder.sequence = sequence
        return True

    def drop(self, worker: Incarnation) -> None:
        """Forget a worker; an unknown one is ignored. Costs what it had cached."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._clear(holder)
            self._slots[holder.slot] = None

    def hits(self, hashes: Sequence[bytes]) -> Mapping[Incarnation, int]:
        """Return how many leading blocks of a chain each worker has; those with none are absent."""
        found: dict[Incarnation, int] = {}
        if not hashes or not self._masks:
            return found
        masks = self._masks
        left = -1
        num_walked = 0
        for num_walked, key in enumerate(_keys(b"".join(hashes))):
            mask = masks.get(key, 0) & left
            if mask != left:
                if left != -1:
                    self._note(found, left ^ mask, num_walked)
                left = mask
                if not mask:
                    return found
        self._note(found, left, num_walked + 1)
        return found

    def validate(self) -> None:
        """Raise InvariantViolationError where masks, counts and keys disagree."""
        for worker, holder in self._holders.items():
            if self._slots[holder.slot] != worker or holder.bit != 1 << holder.slot:
                raise InvariantViolationError(f"prefix index: {worker} is not in its slot")
            held = {key for key, mask in self._masks.items() if mask & holder.bit}
            if len(held) != holder.num_blocks or not held <= set(holder.keys):
                raise InvariantViolationError(f"prefix index: {worker} lost keys")
        known = sum(holder.bit for holder in self._holders.values())
        if any(not mask or mask & ~known for mask in self._masks.values()):
            raise InvariantViolationError("prefix index: a block of nobody")

    def _note(self, found: dict[Incarnation, int], mask: int, num_blocks: int) -> None:
        while mask:
            low = mask & -mask
            worker = self._slots[low.bit_length() - 1]
            if worker is not None:
                found[worker] = num_blocks
            mask ^= low

    def _admit(self, worker: Incarnation) -> _Holder:
        if None in self._slots:
            slot = self._slots.index(None)
            self._slots[slot] = worker
        else:
            slot = len(self._slots)
            self._slots.append(worker)
        holder = _Holder(slot, 1 << slot)
        self._holders[worker] = holder
        return holder

    def _add(self, holder: _Holder, keys: list[int]) -> None:
        masks, bit = self._masks, holder.bit
        before = len(holder.keys)
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                continue
            masks[key] = self._share(mask | bit) if mask else bit
            holder.keys.append(key)
        holder.num_blocks += len(holder.keys) - before
        if len(holder.keys) > 2 * holder.num_blocks + COMPACT_SLACK:
            live = {key for key in holder.keys if masks.get(key, 0) & bit}
            holder.keys = array("Q", live)

    def _remove(self, holder: _Holder, keys: Sequence[int]) -> None:
        masks, bit = self._masks, holder.bit
        for key in keys:
            mask = masks.get(key, 0)
            if not mask & bit:
                continue
            if mask == bit:
                del masks[key]
            else:
                masks[key] = self._share(mask ^ bit)
            holder.num_blocks -= 1

    def _clear(self, holder: _Holder) -> None:
        self._remove(holder, holder.keys)
        holder.keys = array("Q")

    def _share(self, mask: int) -> int:
        """Return the one object for equal masks."""
        if len(self._shared) >= MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(mask, mask)


def _keys(hashes: bytes) -> list[int]:
    """Return the first half of each hash."""
    keys: list[int] = np.frombuffer(hashes, dtype="<u8")[::2].tolist()
    return keys
