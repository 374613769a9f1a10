"""A worker's way to the store of KV blocks: threads that wait for it, so that the loop need not."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import structlog

from common.cuda.driver import CudaError
from common.kv.blocks import PublishedBlocks
from common.storage.codec_stage import CodecStats
from common.storage.interface import StoreStats
from common.storage.linked_store import LinkedStore
from common.traffic.shared_link import LinkStats, SharedLink
from common.worker.store_buffer import BufferStats
from common.worker.worker_store import WorkerStore

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class StoreRead:
    """So many leading blocks were there, whole; all together took ``seconds``.

    ``num_from_storage`` of them came from storage, in ``storage_seconds``, until they were decoded;
    others were in the tier.
    """

    num_blocks: int
    seconds: float
    num_from_storage: int
    storage_seconds: float


class StoreAccess:
    """One incarnation's use of the store; ``link`` is what its reads of storage pass.

    Look-ups, reads, prefetches and copies into the store's queue have a thread each: none waits for
    another kind, but for room in a buffer. The store itself is its opener's to close.
    """

    def __init__(self, store: WorkerStore, link: SharedLink) -> None:
        self._store = store
        self._link = link
        self._linked = LinkedStore(store.storage, link)
        self._path = store.open_path(self._linked)
        self._lookups = ThreadPoolExecutor(1, "store look-up")
        self._reads = ThreadPoolExecutor(1, "store read")
        self._copies = ThreadPoolExecutor(1, "store copy")
        self._ahead = LinkedStore(store.storage, link)
        self._prefetches = ThreadPoolExecutor(1, "store prefetch")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self._store.block_bytes

    @property
    def stored_block_bytes(self) -> int:
        """Bytes that storage moves for one block."""
        return self._store.stored_block_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer that blocks pass; 0 without one."""
        return self._store.buffer_bytes

    async def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt can be read here."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._lookups, self._store.longest_prefix, hashes)

    async def num_stored(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in storage, in turn with ``write``."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._copies, self._store.storage.longest_prefix, hashes)

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

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier to prefetch into."""
        return self._store.has_tier

    @property
    def prefetch_room(self) -> int:
        """How many blocks more may be prefetched now."""
        return self._store.prefetch_room

    def num_in_tier(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in the tier."""
        return self._store.num_in_tier(hashes)

    async def prefetch(self, hashes: Sequence[bytes], previous: bytes | None) -> int:
        """Bring successive blocks into the tier; return how many leading ones came.

        Should the caller be cancelled, the read goes on until ``close`` has returned.
        """
        loop = asyncio.get_running_loop()
        work = self._store.prefetch
        return await loop.run_in_executor(self._prefetches, work, self._ahead, hashes, previous)

    def abandon(self, hashes: Sequence[bytes]) -> None:
        """Nobody waits for these blocks, some of which may have been prefetched."""
        self._store.abandon(hashes)

    def stats(self) -> StoreStats:
        """Return what the store and its tier counted since they were opened, by whomever."""
        return self._store.stats()

    def link_stats(self) -> LinkStats:
        """Return what has passed the link since this was made."""
        return self._link.stats()

    def buffer_stats(self) -> BufferStats:
        """Return what has passed the buffer since it was made; zeros without one."""
        return self._store.buffer_stats()

    def codec_stats(self) -> CodecStats:
        """Return what was encoded and decoded since the store was opened; zeros without a codec."""
        return self._store.codec_stats()

    def close(self) -> None:
        """Wait for what is under way; nothing reads or writes the pool afterwards."""
        self._link.lift()
        for thread in (self._lookups, self._reads, self._copies, self._prefetches):
            thread.shutdown(wait=True, cancel_futures=True)
        self._store.abandon_all()  # the tier outlives this, and who waited for its blocks does not
        self._path.close()

    def _read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> StoreRead:
        linked = self._linked
        num_before, seconds_before = linked.num_read, self._storage_seconds()
        started = perf_counter()
        try:
            num_blocks = self._path.read(hashes, block_ids, previous)
        except CudaError as error:
            # What was written to is published to nobody. A broken device shows in the next step.
            log.error("store_read_failed", reason=str(error))
            num_blocks = 0
        return StoreRead(
            num_blocks=num_blocks,
            seconds=perf_counter() - started,
            num_from_storage=linked.num_read - num_before,
            storage_seconds=self._storage_seconds() - seconds_before,
        )

    def _storage_seconds(self) -> float:
        return self._linked.read_seconds + self._store.codec_stats().decode_seconds

    def _write(self, held: PublishedBlocks) -> int:
        try:
            return self._path.write(held)
        except CudaError as error:
            log.error("store_write_failed", reason=str(error))
            return len(held.hashes)
