"""Copies between the pools of a worker's tensor-parallel ranks and whole blocks in host memory.

In host memory a block has all KV heads, in the model's layout, as a worker of one rank has it: so
workers of any numbers of ranks read what any of them has stored. The plan of heads is that of a
handoff between a worker of so many ranks and one of a lone rank (``common.transfer.heads``).

On GPUs rank 0's does it all, since a copy engine moves no heads and host memory is far::

    host memory, page-locked --copy engine--> staged blocks --kernel, heads--> every rank's pool
                                              on rank 0's GPU, bounded
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import numpy as np

from common.cuda.driver import Copy, CudaError, draining
from common.errors import TransferError
from common.transfer.cuda_heads import HeadMover
from common.transfer.cuda_movers import PEER_CTAS
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.head_copies import write_heads
from common.transfer.heads import plan_heads
from common.transfer.ranks import MemoryRank, RankedPool
from common.worker.host_memory import HostMemory, refuse_outside, runs_of

STAGED_BYTES = 32 * 2**20
"""Of rank 0's GPU, for each direction of a path; at least one block."""


class RankMemoryCopies:
    """Implements ``PoolCopies`` of ranks in host memory: copied at once, without the GIL."""

    def __init__(self, pool: RankedPool, ranks: Sequence[MemoryRank]) -> None:
        """``ranks`` are the pool's."""
        self._pool = pool
        self._ranks = tuple(ranks)
        self._gathers = plan_heads(pool.layout, len(ranks), 1)
        self._scatters = plan_heads(pool.layout, 1, len(ranks))

    def upload(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy each slot's heads to the blocks of the ranks that have them."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        for plan in self._scatters:
            target = self._ranks[plan.target_rank].buffer
            write_heads(target, memory.buffer, plan, (slots, block_ids))

    def download(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Bring the heads of all ranks together in slots."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        for plan in self._gathers:
            source = self._ranks[plan.source_rank].buffer
            write_heads(memory.buffer, source, plan, (block_ids, slots))

    def wait(self) -> None:
        """Have nothing to wait for."""

    def settle(self) -> None:
        """Have nothing to wait for."""

    def close(self) -> None:
        """Have nothing to let go of."""


class RankDeviceCopies:
    """Implements ``PoolCopies`` of ranks on GPUs, by rank 0's; copies are made when calls return.

    TransferError where it does not reach another rank's memory, or there is no room to stage in.
    """

    def __init__(
        self, pool: RankedPool, ranks: Sequence[DeviceRank], *, staged_bytes: int = STAGED_BYTES
    ) -> None:
        """``ranks`` are the pool's."""
        self._num_blocks = pool.num_blocks
        self._size = pool.layout.block_bytes
        self._num_staged = max(1, staged_bytes // self._size)
        self._gathers = plan_heads(pool.layout, len(ranks), 1)
        self._scatters = plan_heads(pool.layout, 1, len(ranks))
        driver, device = ranks[0].driver, ranks[0].device
        with ExitStack() as undo:
            self._pools: list[int] = []
            for rank in ranks:
                address, unmap = rank.map_for(device)
                undo.callback(unmap)
                self._pools.append(address)
            self._staged = driver.allocate(device, self._num_staged * self._size)
            undo.callback(driver.free, device, self._staged)
            self._queue = driver.queue(device)
            undo.callback(_quietly, self._queue.close)
            self._heads = HeadMover(driver, device, num_ctas=PEER_CTAS)
            undo.callback(self._heads.close)
            self._undo = undo.pop_all()

    def upload(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to the GPU and their heads on to the ranks that have them."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._num_blocks))
        size = self._size
        for sources, targets in self._turns(slots, block_ids):
            staged = range(len(sources))
            self._copy(
                [
                    (self._staged + to * size, memory.address + at * size, length * size)
                    for at, to, length in runs_of(sources, staged).tolist()
                ]
            )
            for plan in self._scatters:
                self._heads.move(
                    plan,
                    (self._staged, self._pools[plan.target_rank]),
                    np.arange(len(sources), dtype=np.int32),
                    np.asarray(targets, dtype=np.int32),
                )

    def download(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Bring the heads of all ranks together on the GPU and copy the blocks to slots."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._num_blocks))
        size = self._size
        for sources, targets in self._turns(block_ids, slots):
            staged = range(len(sources))
            for plan in self._gathers:
                self._heads.move(
                    plan,
                    (self._pools[plan.source_rank], self._staged),
                    np.asarray(sources, dtype=np.int32),
                    np.arange(len(sources), dtype=np.int32),
                )
            self._copy(
                [
                    (memory.address + to * size, self._staged + at * size, length * size)
                    for at, to, length in runs_of(staged, targets).tolist()
                ]
            )

    def wait(self) -> None:
        """Have nothing to wait for: a copy that failed has raised where it was begun."""

    def settle(self) -> None:
        """Have nothing to wait for: what failed has been drained."""

    def close(self) -> None:
        """Let go of streams, staged blocks and mappings; a second call does nothing."""
        self._undo.close()

    def _turns(
        self, sources: Sequence[int], targets: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Give as many pairs at a time as find room to be staged."""
        for first in range(0, len(sources), self._num_staged):
            end = first + self._num_staged
            yield sources[first:end], targets[first:end]

    def _copy(self, copies: Sequence[Copy]) -> None:
        with draining(self._queue):
            self._queue.copy(copies)
            self._queue.wait(is_long=True)


def open_rank_copies(pool: RankedPool) -> RankMemoryCopies | RankDeviceCopies:
    """Return the copies of the kind of memory that the ranks' pools are in."""
    on_gpus = [rank for rank in pool.ranks if isinstance(rank, DeviceRank)]
    in_memory = [rank for rank in pool.ranks if isinstance(rank, MemoryRank)]
    if len(on_gpus) == len(pool.ranks):
        return RankDeviceCopies(pool, on_gpus)
    if len(in_memory) == len(pool.ranks):
        return RankMemoryCopies(pool, in_memory)
    raise TransferError("ranks: the pools of one worker are in memory of different kinds")


def _quietly(close: Callable[[], None]) -> None:
    with suppress(CudaError):  # a broken device has nothing to wait for
        close()
