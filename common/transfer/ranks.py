"""Workers of several tensor-parallel ranks as one source and one target of blocks.

Block i of such a worker is block i of every rank's pool. To all who count, check and lease blocks
it is one block: what travels as its checksum is one number, made of those of the ranks' blocks.

Rank 0's process does it all: it maps the pools of its own ranks as it maps those of a peer.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.cuda.checksum import finish_checksums
from common.errors import TransferError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, PeerPool
from common.messages.fields import CudaPoolHandle, PoolHandle, RanksPoolHandle
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.head_copies import block_checksums, write_heads
from common.transfer.heads import HeadTransfer, plan_heads, rank_layout
from common.transfer.rates import measure_mapping
from common.transfer.runs import write_blocks

Sums = NDArray[np.uint64]
Pairs = tuple[Sequence[int], Sequence[int]]
"""(source ids, target ids)"""


@dataclass(frozen=True, slots=True)
class MovedHeads:
    """What a pair of ranks has moved: checksums of whole blocks, or parts of their sums."""

    num_calls: int
    num_bytes: int
    sums: Sums


class RankPair(Protocol):
    """The way from one source rank's pool to one target rank's. For one thread at a time."""

    @property
    def transfer(self) -> HeadTransfer:
        """What is moved of every block."""
        ...

    def write(self, pairs: Pairs) -> MovedHeads:
        """Move it and wait; TransferError when that failed, and nothing of it goes on."""
        ...

    def measure(self) -> LinkRate:
        """Measure the way without writing."""
        ...

    def close(self) -> None:
        """Let go of what belongs to the pair alone."""
        ...


class RankMemory(Protocol):
    """One rank's pool as this process sees it, wherever it is."""

    @property
    def num_blocks(self) -> int:
        """How many blocks are given out."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this rank."""
        ...

    def checksum(self, block_ids: Sequence[int]) -> Sums:
        """Return the checksum of each named block; ValueError for one outside of the pool."""
        ...

    def pair_with(self, target: "RankMemory", transfer: HeadTransfer) -> RankPair:
        """Return the way from here to a target; TransferError where there is none."""
        ...

    def close(self) -> None:
        """Let go of the memory; a second call does nothing."""
        ...


class MemoryPair:
    """Implements ``RankPair`` between two pools in host memory."""

    def __init__(self, transfer: HeadTransfer, source: memoryview, target: memoryview) -> None:
        self.transfer = transfer
        self._source = source
        self._target = target

    def write(self, pairs: Pairs) -> MovedHeads:
        """Copy in the calling thread, with the GIL released."""
        target, source = self._target, self._source
        if self.transfer.is_whole:
            report = write_blocks(target, source, pairs, self.transfer.source_block_bytes)
            return MovedHeads(report.num_calls, report.num_bytes, report.checksums)
        heads = write_heads(target, source, self.transfer, pairs)
        num_calls = heads.num_blocks * self.transfer.pieces.count
        return MovedHeads(num_calls, heads.num_bytes, heads.partial_sums)

    def measure(self) -> LinkRate:
        """Compare reading the target's pool with plain memory."""
        return measure_mapping(self._target)

    def close(self) -> None:
        """Let go of both views, without which the pools cannot be unmapped."""
        self._source = self._target = memoryview(b"")


class MemoryRank:
    """Implements ``RankMemory`` in host memory: the own pool, or one that is mapped."""

    def __init__(self, pool: KVPool | PeerPool) -> None:
        self._pool = pool
        self.num_blocks = pool.num_blocks
        self.block_bytes = pool.block_bytes

    @property
    def buffer(self) -> memoryview:
        """The bytes of all blocks."""
        return self._pool.buffer

    def checksum(self, block_ids: Sequence[int]) -> Sums:
        """Return the checksum of each named block."""
        return flowpath_native.checksum_blocks(self.buffer, block_ids, self.block_bytes)

    def pair_with(self, target: RankMemory, transfer: HeadTransfer) -> MemoryPair:
        """Return the way to another pool in host memory."""
        if not isinstance(target, MemoryRank):
            raise TransferError("ranks: the peer's pools are not in host memory, and ours are")
        return MemoryPair(transfer, self.buffer, target.buffer)

    def close(self) -> None:
        """Close or unmap the pool."""
        self._pool.close()


class RankedPool:
    """The pools of all ranks of this worker; implements ``common.kv.pool.BlockPool``.

    ``block_bytes`` is the size of a block of all ranks together.
    """

    def __init__(
        self,
        layout: KVLayout,
        ranks: Sequence[RankMemory],
        handles: Sequence[PoolHandle | CudaPoolHandle],
    ) -> None:
        """``layout`` is the whole model's, ``ranks`` are the ranks' pools in order.

        ``handles`` are what peers open them with. ValueError where the pools' blocks are not those
        of so many ranks.
        """
        if len(handles) != len(ranks):
            raise ValueError(f"{len(handles)} handles for {len(ranks)} ranks")
        self._handles = tuple(handles)
        own = rank_layout(layout, len(ranks))
        self.layout = layout
        self.ranks = tuple(ranks)
        self.num_blocks = min(rank.num_blocks for rank in ranks)
        for number, rank in enumerate(ranks):
            if rank.block_bytes != own.block_bytes:
                raise ValueError(
                    f"blocks of rank {number} have {rank.block_bytes} bytes, not {own.block_bytes}"
                )
        self.block_bytes = len(ranks) * own.block_bytes
        self.num_bytes = self.num_blocks * self.block_bytes

    def handle(self) -> RanksPoolHandle:
        """Return what a peer on this host needs to open the pools of all ranks."""
        return RanksPoolHandle(
            kind="ranks",
            ranks=self._handles,
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            num_bytes=self.num_bytes,
        )

    def checksum(self, block_ids: Sequence[int]) -> Sums:
        """Return one checksum of each named block; ValueError for one outside of the pools."""
        return combine_checksums([rank.checksum(block_ids) for rank in self.ranks])

    def close(self) -> None:
        """Let go of all ranks' memory."""
        for rank in self.ranks:
            rank.close()


class RanksLink:
    """Every pair of ranks that share heads, as one ``common.transfer.backend.PeerLink``.

    One write at a time; others wait for it.
    """

    def __init__(
        self, pairs: Sequence[RankPair], num_targets: int, opened: Sequence[RankMemory] = ()
    ) -> None:
        """``opened`` is what ends with the link: the peer's pools, mapped for it."""
        self._pairs = tuple(pairs)
        self._num_targets = num_targets
        self._opened = tuple(opened)
        self._is_closed = False
        self._lock = threading.Lock()

    @classmethod
    def between(cls, source: RankedPool, targets: Sequence[RankMemory]) -> "RanksLink":
        """Return the link to a peer of so many ranks, whose mapped pools it closes.

        TransferError where the peer's blocks are not those of so many ranks.
        """
        wanted = rank_layout(source.layout, len(targets)).block_bytes
        for rank, target in enumerate(targets):
            if target.block_bytes != wanted:
                raise TransferError(
                    f"ranks: the blocks of the peer's rank {rank} have {target.block_bytes} bytes,"
                    f" not {wanted}"
                )
        return cls(_pairs(source, targets), len(targets), targets)

    @classmethod
    def within(cls, pool: RankedPool) -> "RanksLink":
        """Return the link from a worker's own pools to themselves, which stay open."""
        return cls(_pairs(pool, pool.ranks), len(pool.ranks))

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy blocks into the pools of all the peer's ranks (see ``PeerLink``)."""
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            moved = [(pair.transfer, pair.write((pairs_src, pairs_dst))) for pair in self._pairs]
        return WriteReport(
            num_blocks=len(pairs_dst),
            num_calls=sum(heads.num_calls for _, heads in moved),
            num_bytes=sum(heads.num_bytes for _, heads in moved),
            seconds=time.perf_counter() - start,
            checksums=combine_checksums(
                [_target_checksums(rank, moved) for rank in range(self._num_targets)]
            ),
        )

    def measure(self) -> LinkRate:
        """Return the rate of the pair that is farthest below its limit."""
        with self._lock:
            self._refuse_closed()
            return min((pair.measure() for pair in self._pairs), key=lambda rate: rate.ratio)

    def close(self) -> None:
        """Close all pairs and unmap the peer's pools, after a write in progress."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for pair in self._pairs:
                pair.close()
            for rank in self._opened:
                rank.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError("ranks: the link to the peer's pools is closed")


def _pairs(source: RankedPool, targets: Sequence[RankMemory]) -> list[RankPair]:
    pairs: list[RankPair] = []
    try:
        for plan in plan_heads(source.layout, len(source.ranks), len(targets)):
            own = source.ranks[plan.source_rank]
            pairs.append(own.pair_with(targets[plan.target_rank], plan))
    except BaseException:
        for pair in pairs:
            pair.close()
        raise
    return pairs


def combine_checksums(ranks: Sequence[Sums]) -> Sums:
    """Return one checksum of each block from those of its ranks, in their order.

    A lone rank's are what they are.
    """
    combined, *others = ranks
    for number, sums in enumerate(others, start=1):
        combined = finish_checksums(combined, number) + sums
    return combined


def _target_checksums(rank: int, moved: Sequence[tuple[HeadTransfer, MovedHeads]]) -> Sums:
    parts = [(plan, heads.sums) for plan, heads in moved if plan.target_rank == rank]
    first = parts[0][0]
    if first.is_whole:
        return parts[0][1]
    return block_checksums([sums for _, sums in parts], first.target_block_bytes)
