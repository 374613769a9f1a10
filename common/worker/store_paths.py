"""The two ways of a block between the store and a pool.

::

    direct      storage ------------------> pool         the pool is in host memory
    buffered    storage --> buffer -------> pool         and any pool
                host tier ----------------> pool         either way, past storage

On the buffered path copies to the pool go on while the next blocks are read. A path is one
worker's, and its reads and its writes have a thread each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.kv.blocks import PublishedBlocks
from common.kv.pool import KVPool
from common.storage.host_tier import HostTier
from common.storage.interface import BlockStore, Memory
from common.storage.linked_store import num_leading_hits
from common.storage.tiered_store import TieredStore
from common.worker.host_memory import HostMemory
from common.worker.pool_copies import PoolCopies
from common.worker.store_buffer import StoreBuffer


class StorePath(Protocol):
    """How blocks get from the store into the pool and back."""

    def read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> int:
        """Read successive blocks into the pool's; return how many leading ones are there, whole.

        Others hold undefined bytes then, and nothing writes to any of them any more.
        """
        ...

    def write(self, held: PublishedBlocks) -> int:
        """Offer blocks to the store, in their order; return how many were dropped.

        Nobody could find a block after one that was dropped: it is dropped too.
        """
        ...

    def close(self) -> None:
        """Let go of what it copies with; no call is under way or follows."""
        ...


@dataclass(frozen=True, slots=True)
class PlacedTier:
    """A tier and the memory that its slots are in."""

    tier: HostTier
    memory: HostMemory


class DirectPath:
    """The store reads into the pool's memory and takes blocks from there."""

    def __init__(self, store: BlockStore, pool: KVPool) -> None:
        self._store = store
        self._pool = pool

    def read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> int:
        """Read without a detour."""
        return num_leading_hits(self._store.read(hashes, self._pool.buffer, block_ids, previous))

    def write(self, held: PublishedBlocks) -> int:
        """Offer blocks where they lie."""
        return offer(self._store, self._pool.buffer, held.block_ids, held.hashes, held.previous)

    def close(self) -> None:
        """Have nothing to let go of."""


class BufferedPath:
    """Blocks pass ``buffer``; those of ``tier`` go into the pool from where they are.

    ``reads`` and ``writes`` are the copies of each thread.
    """

    def __init__(
        self,
        storage: BlockStore,
        tier: PlacedTier | None,
        buffer: StoreBuffer,
        reads: PoolCopies,
        writes: PoolCopies,
    ) -> None:
        self._storage = storage
        self._tier = tier
        self._store = storage if tier is None else TieredStore(storage, tier.tier)
        self._size = storage.identity.block_bytes
        self._buffer = buffer
        self._reads = reads
        self._writes = writes

    def read(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> int:
        """Read as many blocks at a time as find room (see ``StorePath``)."""
        done = 0
        while done < len(hashes):
            done += self._upload_lent(hashes[done:], block_ids[done:])
            end = len(hashes)
            if self._tier is not None:
                end = done + self._tier.tier.num_missing(hashes[done:])
            before = hashes[done - 1] if done else previous
            done += self._read_storage(hashes[done:end], block_ids[done:end], before)
            if done < end:
                break
        return done

    def write(self, held: PublishedBlocks) -> int:
        """Copy as many blocks at a time out of the pool as find room, and offer those."""
        memory = self._buffer.memory
        done, num_blocks = 0, len(held.hashes)
        previous = held.previous
        while done < num_blocks:
            slots = self._buffer.take(num_blocks - done)
            end = done + len(slots)
            try:
                self._writes.download(memory, slots, held.block_ids[done:end])
                self._writes.wait()
                self._buffer.count(downloaded=len(slots) * self._size)
                hashes = held.hashes[done:end]
                num_dropped = offer(self._store, memory.buffer, slots, hashes, previous)
            finally:
                self._writes.settle()
                self._buffer.give_back(slots)
            if num_dropped:
                return num_dropped + num_blocks - end
            done, previous = end, hashes[-1]
        return 0

    def close(self) -> None:
        """Let go of both threads' copies."""
        self._reads.close()
        self._writes.close()

    def _upload_lent(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> int:
        """Copy the leading blocks that the tier has; return how many."""
        if self._tier is None:
            return 0
        with self._tier.tier.lent(hashes) as slots:
            if not slots:
                return 0
            try:
                self._reads.upload(self._tier.memory, slots, block_ids[: len(slots)])
                self._reads.wait()
            finally:
                self._reads.settle()
        self._buffer.count(uploaded=len(slots) * self._size)
        return len(slots)

    def _read_storage(
        self, hashes: Sequence[bytes], block_ids: Sequence[int], previous: bytes | None
    ) -> int:
        """Read until a block is not whole, and copy what came before; return how many."""
        memory = self._buffer.memory
        done = 0
        copied: list[int] = []
        slots: list[int] = []
        try:
            while done < len(hashes):
                slots = self._buffer.try_take(len(hashes) - done)
                if not slots:
                    # Whoever waits for room must hold none.
                    copied = self._finish(copied)
                    slots = self._buffer.take(len(hashes) - done)
                part = hashes[done : done + len(slots)]
                before = hashes[done - 1] if done else previous
                hits = self._storage.read(part, memory.buffer, slots, before)
                num_whole = num_leading_hits(hits)
                whole, filled = part[:num_whole], slots[:num_whole]
                copied = self._finish(copied)
                self._reads.upload(memory, filled, block_ids[done : done + num_whole])
                copied, slots = slots, []
                self._buffer.count(loaded=sum(hits) * self._size, uploaded=num_whole * self._size)
                if self._tier is not None:
                    self._tier.tier.put(whole, before, memory.buffer, filled)
                done += num_whole
                if num_whole < len(part):
                    break
            self._reads.wait()
        finally:
            self._reads.settle()
            self._buffer.give_back(copied + slots)
        return done

    def _finish(self, copied: list[int]) -> list[int]:
        """Wait for the copies from these slots; give them back."""
        self._reads.wait()
        self._buffer.give_back(copied)
        return []


def offer(
    store: BlockStore,
    memory: Memory,
    places: Sequence[int],
    hashes: Sequence[bytes],
    previous: bytes | None,
) -> int:
    """Offer successive blocks of ``memory`` until one is dropped; return how many are not taken."""
    size = store.identity.block_bytes
    view = memoryview(memory)
    for number, (place, block_hash) in enumerate(zip(places, hashes, strict=True)):
        if not store.write(block_hash, previous, view[place * size : (place + 1) * size]):
            return len(hashes) - number
        previous = block_hash
    return 0
