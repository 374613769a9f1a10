"""A worker's store with what stands before it in host memory."""

from collections.abc import Sequence

from common.kv.pool import KVPool
from common.storage.codec_stage import CodecStage, CodecStats
from common.storage.codec_store import CodecStore
from common.storage.interface import BlockStore, Memory, StoreStats
from common.storage.linked_store import LinkedStore
from common.storage.tiered_store import TieredStore
from common.worker.host_memory import HostedPool, host_block_bytes
from common.worker.pool_copies import open_pool_copies
from common.worker.store_buffer import BufferStats, StoreBuffer
from common.worker.store_paths import BufferedPath, DirectPath, PlacedTier, StorePath

NEEDS_BUFFER = "a pool on a GPU or of several ranks needs a buffer"


class WorkerStore:
    """What outlives an incarnation of the store's use: the store, its codec, its tier, and its
    buffer. Without codec and buffer storage reads into the pool's own memory.
    """

    def __init__(
        self,
        storage: BlockStore,
        pool: HostedPool,
        tier: PlacedTier | None = None,
        buffer: StoreBuffer | None = None,
        stage: CodecStage | None = None,
    ) -> None:
        self.storage = storage
        """Without the tier: what other workers can find. Its blocks are as they are kept."""
        self._pool = pool
        self._tier = tier
        self._buffer = buffer
        self._stage = stage
        self._tiered = self._with_tier(self._with_codec(storage))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all KV heads."""
        return host_block_bytes(self._pool)

    @property
    def stored_block_bytes(self) -> int:
        """Bytes that storage moves for one block."""
        return self.storage.identity.block_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffer; 0 without one."""
        return 0 if self._buffer is None else self._buffer.memory.num_blocks * self.block_bytes

    @property
    def read_memory(self) -> Memory:
        """The memory that storage reads into."""
        if self._stage is not None:
            return self._stage.read_memory
        if self._buffer is not None:
            return self._buffer.memory.buffer
        assert isinstance(self._pool, KVPool), NEEDS_BUFFER
        return self._pool.buffer

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks this worker can read, from wherever."""
        return self._tiered.longest_prefix(hashes)

    @property
    def has_tier(self) -> bool:
        """Whether there is a tier that blocks can be brought into ahead of a read."""
        return self._tier is not None

    @property
    def prefetch_room(self) -> int:
        """How many blocks more the tier takes ahead of a read; 0 without one."""
        return 0 if self._tier is None else self._tier.tier.prefetch_room

    def num_in_tier(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks are in the tier."""
        return 0 if self._tier is None else self._tier.tier.num_held(hashes)

    def prefetch(self, storage: BlockStore, hashes: Sequence[bytes], previous: bytes | None) -> int:
        """Bring successive blocks from ``storage`` into the tier (see ``HostTier.prefetch``)."""
        return (
            0
            if self._tier is None
            else self._tier.tier.prefetch(self._with_codec(storage), hashes, previous)
        )

    def abandon(self, hashes: Sequence[bytes]) -> None:
        """Nobody waits for these blocks, which may have been brought into the tier."""
        if self._tier is not None:
            self._tier.tier.abandon(hashes)

    def abandon_all(self) -> None:
        """Nobody waits for any block in the tier."""
        if self._tier is not None:
            self._tier.tier.abandon_all()

    def open_path(self, linked: LinkedStore) -> StorePath:
        """Return a way between pool and store, whose reads of storage go through ``linked``."""
        storage = self._with_codec(linked)
        if self._buffer is not None:
            reads, writes = open_pool_copies(self._pool), open_pool_copies(self._pool)
            return BufferedPath(storage, self._tier, self._buffer, reads, writes)
        assert isinstance(self._pool, KVPool), NEEDS_BUFFER
        return DirectPath(self._with_tier(storage), self._pool)

    def stats(self) -> StoreStats:
        """Return what was counted since the store was opened."""
        return self._tiered.stats()

    def buffer_stats(self) -> BufferStats:
        """Return what has passed the buffer; zeros without one."""
        return BufferStats() if self._buffer is None else self._buffer.stats()

    def codec_stats(self) -> CodecStats:
        """Return what was encoded and decoded; zeros without a codec."""
        return CodecStats() if self._stage is None else self._stage.stats()

    def close(self) -> None:
        """Write what was taken, and let go of all memory; no path is in use any more."""
        self.storage.close()
        if self._stage is not None:
            self._stage.close()
        if self._buffer is not None:
            self._buffer.memory.close()
        if self._tier is not None:
            self._tier.memory.close()

    def _with_codec(self, storage: BlockStore) -> BlockStore:
        return storage if self._stage is None else CodecStore(storage, self._stage)

    def _with_tier(self, storage: BlockStore) -> BlockStore:
        return storage if self._tier is None else TieredStore(storage, self._tier.tier)
