"""A store with a tier of host memory in front."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from common.storage.host_tier import HostTier
from common.storage.interface import BlockStore, Memory, StoreIdentity, StoreStats


class TieredStore:
    """``storage`` with its recently used blocks in ``tier`` too (see ``BlockStore``).

    What is written is in the tier as soon as ``storage`` has taken it. Both stay their owner's to
    close.
    """

    def __init__(self, storage: BlockStore, tier: HostTier) -> None:
        self._storage = storage
        self._tier = tier

    @property
    def identity(self) -> StoreIdentity:
        """Whose blocks these are."""
        return self._storage.identity

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare memory for what storage reads."""
        return self._storage.register(buffers)

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Count the leading blocks that either has; storage is told of the use of all."""
        count = self._storage.longest_prefix(hashes, previous)
        while count < len(hashes) and (num_held := self._tier.num_held(hashes[count:])):
            count += num_held
            count += self._storage.longest_prefix(hashes[count:], hashes[count - 1])
        return count

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Copy what is in the tier, and read the rest from storage."""
        if len(hashes) != len(block_ids):
            raise ValueError(f"{len(hashes)} blocks for {len(block_ids)} ids")
        hits: list[bool] = []
        while (start := len(hits)) < len(hashes):
            with self._tier.lent(hashes[start:]) as slots:
                self._tier.copy_out(slots, buffer, block_ids[start : start + len(slots)])
            hits += [True] * len(slots)
            start = len(hits)
            end = start + self._tier.num_missing(hashes[start:])
            if start == end:
                continue
            part, ids = hashes[start:end], block_ids[start:end]
            before = hashes[start - 1] if start else previous
            came = self._storage.read(part, buffer, ids, before)
            for first, last in _runs_of_hits(came):
                parent = part[first - 1] if first else before
                self._tier.put(part[first:last], parent, buffer, ids[first:last])
            hits += came
        return hits

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy for storage, and one for the tier."""
        if not self._storage.write(block_hash, previous, payload):
            return False
        self._tier.put([block_hash], previous, payload, [0])
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until storage has written what it took."""
        return self._storage.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return storage's counts with the tier's beside them: its hits are no hits of storage."""
        tier = self._tier.stats()
        return replace(
            self._storage.stats(),
            tier_bytes=tier.num_blocks * self.identity.block_bytes,
            num_tier_hits=tier.num_hits,
            num_tier_evicted=tier.num_evicted,
            num_tier_refused=tier.num_refused,
            num_prefetched=tier.num_prefetched,
            num_prefetch_used=tier.num_prefetch_used,
            num_prefetch_wasted=tier.num_prefetch_wasted,
        )

    def close(self) -> None:
        """Close storage."""
        self._storage.close()


def _runs_of_hits(hits: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield the bounds of each run of True."""
    start = 0
    while start < len(hits):
        if not hits[start]:
            start += 1
            continue
        end = start
        while end < len(hits) and hits[end]:
            end += 1
        yield start, end
        start = end
