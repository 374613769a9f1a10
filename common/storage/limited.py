"""Any store behind a link of limited rate, to try slower storage than there is."""

from collections.abc import Sequence
from dataclasses import replace

from common.storage.interface import BlockStore, Memory, StoreIdentity, StoreStats
from common.traffic.arbiter import TrafficClass
from common.traffic.shared_link import SharedLink


class LimitedStore:
    """A store whose reads pass a link of their own as KV traffic, and take as long as there.

    A miss takes as long as a hit. Lookups and writes are not limited.
    """

    def __init__(self, store: BlockStore, link: SharedLink) -> None:
        self._store = store
        self._link = link

    @property
    def identity(self) -> StoreIdentity:
        """Whose blocks these are."""
        return self._store.identity

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare memory that is often read to."""
        return self._store.register(buffers)

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Return how many leading blocks are stored."""
        return self._store.longest_prefix(hashes, previous)

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read blocks (see ``BlockStore``), for as long as their bytes take at the link's rate."""
        num_bytes = len(hashes) * self.identity.block_bytes
        with self._link.passing(num_bytes, TrafficClass.KV):
            return self._store.read(hashes, buffer, block_ids, previous)

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy of a block to write it later."""
        return self._store.write(block_hash, previous, payload)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was taken is written or dropped."""
        return self._store.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return the counts of now; the time of reads is that of the link too."""
        stats = self._store.stats()
        held_up_ns = int(self._link.stats().kv_wait_seconds * 1e9)
        return replace(stats, read_ns=stats.read_ns + held_up_ns)

    def close(self) -> None:
        """Close the store; what waits at the link passes at once."""
        self._link.lift()
        self._store.close()


def limit_store(store: BlockStore, link: SharedLink) -> BlockStore:
    """Put a store behind a link of its own; one without limit leaves it as it is."""
    return LimitedStore(store, link) if link.bytes_per_second else store
