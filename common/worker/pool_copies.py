"""Copies of blocks between a pool and host memory, wherever the pool is."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import flowpath_native
import numpy as np
from numpy.typing import NDArray

from common.cuda.driver import CudaError, draining
from common.kv.device_pool import DevicePool
from common.kv.pool import KVPool
from common.transfer.ranks import RankedPool
from common.worker.host_memory import HostedPool, HostMemory, refuse_outside, runs_of
from common.worker.rank_copies import open_rank_copies


class PoolCopies(Protocol):
    """Copies blocks between one pool and host memory. One thread at a time."""

    def upload(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Begin to copy slots of host memory to blocks of the pool.

        Both stay as they are until ``wait``. IndexError for places outside of either.
        """
        ...

    def download(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Begin to copy blocks of the pool to slots of host memory (see ``upload``)."""
        ...

    def wait(self) -> None:
        """Wait until all copies that were begun are made; CudaError where one failed."""
        ...

    def settle(self) -> None:
        """Wait until no copy is under way, well or not."""
        ...

    def close(self) -> None:
        """Let go of what the copies were made with."""
        ...


class MemoryCopies:
    """Copies of a pool in host memory: each is made at once, without the GIL."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def upload(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots to blocks."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        self._copy(self._pool.buffer, memory.buffer, runs_of(slots, block_ids))

    def download(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy blocks to slots."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        self._copy(memory.buffer, self._pool.buffer, runs_of(block_ids, slots))

    def wait(self) -> None:
        """Have nothing to wait for."""

    def settle(self) -> None:
        """Have nothing to wait for."""

    def close(self) -> None:
        """Have nothing to let go of."""

    def _copy(self, target: memoryview, source: memoryview, runs: NDArray[np.int32]) -> None:
        if len(runs):
            flowpath_native.copy_runs(target, source, runs, self._pool.block_bytes)


class DeviceCopies:
    """Copies of a pool on a GPU, by its copy engines, on a stream of their own."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._queue = pool.driver.queue(pool.device_index)

    def upload(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Begin to copy slots to blocks."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        self._copy(self._pool.address, memory.address, runs_of(slots, block_ids))

    def download(self, memory: HostMemory, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Begin to copy blocks to slots."""
        refuse_outside((slots, memory.num_blocks), (block_ids, self._pool.num_blocks))
        self._copy(memory.address, self._pool.address, runs_of(block_ids, slots))

    def wait(self) -> None:
        """Wait for the stream; the thread sleeps meanwhile."""
        with draining(self._queue):
            self._queue.wait(is_long=True)

    def settle(self) -> None:
        """Wait for the stream, whatever became of it."""
        with suppress(CudaError):
            self._queue.wait(is_long=True)

    def close(self) -> None:
        """Let go of the stream."""
        with suppress(CudaError):  # a broken device has nothing to wait for
            self._queue.close()

    def _copy(self, target: int, source: int, runs: NDArray[np.int32]) -> None:
        size = self._pool.block_bytes
        with draining(self._queue):
            self._queue.copy(
                [
                    (target + to * size, source + at * size, length * size)
                    for at, to, length in runs.tolist()
                ]
            )


def open_pool_copies(pool: HostedPool) -> PoolCopies:
    """Return the copies of a kind of pool; TransferError where a rank cannot be reached."""
    if isinstance(pool, RankedPool):
        return open_rank_copies(pool)
    return DeviceCopies(pool) if isinstance(pool, DevicePool) else MemoryCopies(pool)
