"""A pool in a GPU's memory that this process can write from its own GPU."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from common.cuda.driver import BlockCopies, CudaDriver, CudaError, CudaQueue
from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.cuda_movers import BlockMover

MEASURED_BYTES = 64 * 1024 * 1024
NUM_REPEATS = 5


@dataclass(frozen=True, slots=True)
class MappedPool:
    """Blocks at an address of this process, on a GPU that it need not see.

    ``close`` undoes the mapping.
    """

    address: int
    num_blocks: int
    device_uuid: str
    close: Callable[[], None]


class CudaLink:
    """A mapped pool. One write at a time; others wait for it."""

    def __init__(self, name: str, pool: DevicePool, peer: MappedPool, mover: BlockMover) -> None:
        self._name = name
        self._pool = pool
        self._peer = peer
        self._mover = mover
        self._is_closed = False
        self._lock = threading.Lock()

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy blocks into the mapped pool (see ``PeerLink``). The peer's death does not show.

        The source blocks must be whole: the copies wait for no other stream. On return, also with
        TransferError, the GPU neither reads nor writes any of these blocks any more.
        """
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            pool, peer = self._pool, self._peer
            runs = align_checked(
                self._name, (pairs_src, pool.num_blocks), (pairs_dst, peer.num_blocks)
            )
            if not len(runs):
                return WriteReport(0, 0, 0, 0.0, np.empty(0, dtype=np.uint64))
            sources = np.asarray(pairs_src, dtype=np.int32)
            targets = np.asarray(pairs_dst, dtype=np.int32)
            size = pool.block_bytes
            copies = BlockCopies(pool.address, peer.address, sources, targets, size)
            try:
                moved = self._mover.move(copies, runs)
            except CudaError as error:
                raise TransferError(
                    f"{self._name}: writing {len(targets) * size} bytes failed: {error}"
                ) from error
        return WriteReport(
            num_blocks=len(targets),
            num_calls=moved.num_calls,
            num_bytes=len(targets) * size,
            seconds=time.perf_counter() - start,
            checksums=moved.checksums,
        )

    def measure(self) -> LinkRate:
        """Compare reading the mapped pool with what the hardware should give.

        That is a copy inside of the own GPU where the pool is on it as well, else the link between
        the two. A read finds a missing peer access as a write would, and unlike a write it is safe
        whoever owns the blocks at this moment.
        """
        pool, peer = self._pool, self._peer
        with self._lock:
            self._refuse_closed()
            num_bytes = min(pool.num_bytes, peer.num_blocks * pool.block_bytes)
            own = (pool.device_index, pool.address)
            return measure_memory(pool.driver, own, (peer.device_uuid, peer.address), num_bytes)

    def close(self) -> None:
        """Undo the mapping, after a write in progress."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._mover.close()
                self._peer.close()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError(f"{self._name}: the link is closed")


def measure_memory(
    driver: CudaDriver, own: tuple[int, int], peer: tuple[str, int], num_bytes: int
) -> LinkRate:
    """Compare reading ``num_bytes`` or fewer at two addresses, both reached by the own GPU.

    ``own`` is a GPU and an address in its memory, ``peer`` the UUID of a GPU and one in its.
    """
    device, address = own
    num_bytes = min(MEASURED_BYTES, num_bytes)
    queue = driver.queue(device)
    try:
        room = driver.allocate(device, num_bytes)
        try:
            seconds = _best_seconds(queue, (room, peer[1], num_bytes))
            own_seconds = _best_seconds(queue, (room, address, num_bytes))
        finally:
            driver.free(device, room)
    finally:
        queue.close()
    if peer[0] == driver.device_uuid(device):
        limit = num_bytes / own_seconds / 1e9
    else:
        limit = driver.peer_gigabytes_per_second(device, peer[0])
    return LinkRate(num_bytes, num_bytes / seconds / 1e9, limit)


def _best_seconds(queue: CudaQueue, copy: tuple[int, int, int]) -> float:
    return min(queue.copy_seconds([copy]) for _ in range(NUM_REPEATS))
