"""A store whose reads pass a link that its reader shares with other traffic."""

from collections.abc import Sequence
from time import perf_counter

from common.storage.interface import BlockStore, Memory, StoreIdentity, StoreStats
from common.traffic.arbiter import TrafficClass
from common.traffic.shared_link import SharedLink


class LinkedStore:
    """``storage`` behind ``link`` (see ``BlockStore``). Both stay their owner's.

    ``num_read`` leading blocks came in calls of ``read`` that took ``read_seconds`` together, both
    of calls that brought any. They are for the thread that reads.
    """

    def __init__(self, storage: BlockStore, link: SharedLink) -> None:
        self._storage = storage
        self._link = link
        self.num_read = 0
        self.read_seconds = 0.0

    @property
    def identity(self) -> StoreIdentity:
        """Whose blocks these are."""
        return self._storage.identity

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare memory."""
        return self._storage.register(buffers)

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Look up, past the link: no block moves."""
        return self._storage.longest_prefix(hashes, previous)

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read, and let as many bytes pass the link as were asked for."""
        started = perf_counter()
        with self._link.passing(len(hashes) * self.identity.block_bytes, TrafficClass.KV):
            hits = self._storage.read(hashes, buffer, block_ids, previous)
        if num_leading := num_leading_hits(hits):
            self.num_read += num_leading
            self.read_seconds += perf_counter() - started
        return hits

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy of a block; writes do not pass the link."""
        return self._storage.write(block_hash, previous, payload)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait for the queue."""
        return self._storage.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return the counts of now."""
        return self._storage.stats()

    def close(self) -> None:
        """Close storage."""
        self._storage.close()


def num_leading_hits(hits: Sequence[bool]) -> int:
    """Return how many blocks are there before the first that is not."""
    return hits.index(False) if False in hits else len(hits)
