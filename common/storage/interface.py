"""What a store of KV blocks can do, whatever keeps the bytes.

A store holds Full Blocks: all layers of one block, the pool's own bytes (papers: DualPath A.5). A
block is found by its prefix hash (``common.kv.prefix_cache``), within what its bytes depend on
besides: the ``StoreIdentity``. A hash names a whole prefix, so whoever stores it stores the same
bytes, and nothing is ever changed in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

Memory = Buffer
"""Contiguous bytes: ``memoryview``, ``mmap``, ``bytearray``."""


NO_CODEC = "none"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a block's bytes depend on besides its tokens: two stores share only equal ones.

    ``block_bytes`` is the payload of one block, a multiple of 4096; ``tenant_salt`` keeps tenants'
    blocks apart. ``codec`` is how the payload was made of the pool's bytes, ``none`` where it is
    those.
    """

    model_fingerprint: str
    layout_fingerprint: str
    dtype: str
    block_bytes: int
    tenant_salt: str = ""
    codec: str = NO_CODEC


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds, as far as this process knows, and what became of what was asked of it.

    Counts begin when the store is opened. ``num_`` counts blocks.
    """

    num_blocks: int = 0
    stored_bytes: int = 0
    capacity_bytes: int = 0
    queued_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    read_bytes: int = 0
    read_ns: int = 0
    """Nanoseconds that calls of ``read`` took, one after the other."""
    num_damaged: int = 0
    """Found damaged, cut or to be something else, and removed."""
    num_read_errors: int = 0
    """Misses that the system's refusal caused (permissions, a broken disk, a lost connection)."""
    num_written: int = 0
    written_bytes: int = 0
    num_known: int = 0
    """Offered although stored already."""
    num_dropped_full: int = 0
    """Offered while the queue was full, or to a store that only reads."""
    num_dropped_orphans: int = 0
    """Offered without the block before them being stored: nobody could find them."""
    num_write_errors: int = 0
    num_unencodable: int = 0
    """Offered with numbers that the store's codec has no place for."""
    num_evicted: int = 0
    tier_bytes: int = 0
    """In the tier of host memory before the store, where there is one."""
    num_tier_hits: int = 0
    """Found in the tier: storage was not asked."""
    num_tier_evicted: int = 0
    num_tier_refused: int = 0
    """Read or written, and not kept in the tier: what is there is used more."""
    num_prefetched: int = 0
    """Brought into the tier ahead of a read."""
    num_prefetch_used: int = 0
    """Of these, blocks that a read found there."""
    num_prefetch_wasted: int = 0
    """Of these, blocks that were evicted, or not waited for any more, before a read."""


class BlockStore(Protocol):
    """A store of one identity's blocks. All methods may be called from any thread.

    ``hashes`` are those of successive blocks of one prefix; ``previous`` is the hash before the
    first, None where the first begins the prompt. Nothing that happens to stored bytes raises: a
    block is whole or it is a miss.
    """

    @property
    def identity(self) -> StoreIdentity:
        """Whose blocks these are."""
        ...

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare writable memory that ``read`` will often be given, in place of earlier memory.

        True where that makes reads cheaper. The buffers are held until ``close``.
        """
        ...

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Return how many leading blocks are stored, and keep those from eviction for a while.

        May wait for the disk or the network, a little.
        """
        ...

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read each block into ``buffer``, at its id times ``block_bytes``; tell which are there.

        Waits until nothing is in flight, without the GIL. What a miss leaves in its place is
        undefined. A buffer aligned to 4096 is written to directly. ValueError where an id is
        outside of the buffer.
        """
        ...

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy of a block to write it later; False when it was dropped.

        Never waits for the disk. Blocks are written in the order in which they came; a block whose
        predecessor is not stored is dropped then. Only a durable block is found.
        """
        ...

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all that was taken is written or dropped; False when that took too long."""
        ...

    def stats(self) -> StoreStats:
        """Return the counts of now."""
        ...

    def close(self) -> None:
        """Write what was taken, within a deadline, and let go of everything.

        No other call may be under way or follow, but a second close does nothing.
        """
        ...


class NoStore:
    """The store that is none: every lookup misses and nothing is kept."""

    def __init__(self, identity: StoreIdentity) -> None:
        self.identity = identity

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare nothing."""
        del buffers
        return False

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Find nothing."""
        del hashes, previous
        return 0

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Miss every block."""
        del buffer, block_ids, previous
        return [False] * len(hashes)

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Drop the block."""
        del block_hash, previous, payload
        return False

    def flush(self, timeout_seconds: float) -> bool:
        """Have nothing to wait for."""
        del timeout_seconds
        return True

    def stats(self) -> StoreStats:
        """Return zeros."""
        return StoreStats()

    def close(self) -> None:
        """Have nothing to let go of."""
