"""A worker's way to the store of KV blocks: threads that wait for it, so that the loop need not."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from common.kv.blocks import PublishedBlocks
from common.kv.pool import KVPool
from common.storage.interface import BlockStore, StoreStats
from common.traffic.arbiter import TrafficClass
from common.traffic.shared_link import LinkStats, SharedLink


@dataclass(frozen=True, slots=True)
class StoreRead:
    """So many leading blocks were there, whole; all together took ``seconds``."""

    num_blocks: int
    seconds: float


class StoreAccess:
    """One incarnation's use of the store; ``link`` is what its reads pass.

    Look-ups, reads and copies into the store's queue have a thread each: none waits for another
    kind. The store itself is its opener's to close.
    """

    def __init__(self, store: BlockStore, pool: KVPool, link: SharedLink) -> None:
        self._store = store
        self._pool = pool
        self._link = link
        self._lookups = ThreadPoolExecutor(1, "store look-up")
        self._reads = ThreadPoolExecutor(1, "store read")
        self._copies = ThreadPoolExecutor(1, "store copy")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._pool.block_bytes

    async def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt are stored."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lookups, self._store.longest_prefix, hashes)

    async def num_stored(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt are stored, in turn with ``write``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._copies, self._store.longest_prefix, hashes)

    async def read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> StoreRead:
        """Read successive blocks into the pool's, and count the leading ones that are whole.

        Others hold undefined bytes then. Should the caller be cancelled, the read goes on: the
        blocks may be written to until ``close`` has returned.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reads, self._read, hashes, block_ids, previous)

    async def write(self, held: PublishedBlocks) -> int:
        """Have copies of blocks written some time, in their order; return how many were dropped.

        Nobody could find a block after one that was dropped: it is dropped too.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._copies, self._write, held)

    def stats(self) -> StoreStats:
        """Return what the store counted since it was opened, by whatever incarnation."""
        return self._store.stats()

    def link_stats(self) -> LinkStats:
        """Return what has passed the link since this was made."""
        return self._link.stats()

    def close(self) -> None:
        """Wait for what is under way; nothing reads or writes the pool afterwards."""
        self._link.lift()
        for thread in (self._lookups, self._reads, self._copies):
            thread.shutdown(wait=True, cancel_futures=True)

    def _read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> StoreRead:
        started = perf_counter()
        with self._link.passing(len(hashes) * self.block_bytes, TrafficClass.KV):
            hits = self._store.read(hashes, self._pool.buffer, block_ids, previous)
        num_leading = hits.index(False) if False in hits else len(hits)
        return StoreRead(num_leading, perf_counter() - started)

    def _write(self, held: PublishedBlocks) -> int:
        previous, size = held.previous, self.block_bytes
        for number, (block_id, block_hash) in enumerate(
            zip(held.block_ids, held.hashes, strict=True)
        ):
            payload = self._pool.buffer[block_id * size : (block_id + 1) * size]
            if not self._store.write(block_hash, previous, payload):
                return len(held.block_ids) - number
            previous = block_hash
        return 0
