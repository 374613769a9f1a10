"""Transport ``tcp`` for pools in GPU memory: through a window of page-locked host memory.

::

    blocks on the GPU --copies--> window ==== streams ====> window --copies--> blocks on the GPU

Each side is by itself: the other one's pool may be in host memory. The window is small, and full
use of it costs a fraction of what the network takes.
"""

import time
from collections.abc import Sequence

import flowpath_native
import numpy as np

from common.cuda.driver import CudaDriver, CudaError, draining
from common.errors import ConfigError, TransferError
from common.kv.device_pool import DevicePool
from common.kv.layout import PAGE_BYTES
from common.kv.pool import KVPool
from common.messages.fields import ExportedPool, TcpPoolHandle
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.block_sink import Receive
from common.transfer.tcp import TcpBackend, TcpLink
from common.transfer.tcp_wire import Extents

SENT_BYTES = 64 * 1024 * 1024
"""Window of a sender; at least one block."""
RECEIVED_BYTES = 8 * 1024 * 1024
"""Window of each stream that receives."""


class PinnedWindow:
    """Host memory that a GPU copies from and to at full speed. Shaped as a pool."""

    def __init__(self, driver: CudaDriver, device: int, num_blocks: int, block_bytes: int) -> None:
        self._driver = driver
        try:
            self.pool = KVPool(num_blocks, block_bytes)
        except ConfigError as error:
            raise TransferError(f"no host memory to copy through: {error}") from error
        view = np.frombuffer(self.pool.buffer, dtype=np.uint8)
        self.address = int(view.__array_interface__["data"][0])
        del view  # or the memory could not be unmapped
        try:
            self._driver.pin(device, self.address, self.pool.num_bytes)
        except CudaError:
            self.pool.close()
            raise

    def close(self) -> None:
        """Let go of the memory; nothing may use it any more."""
        self._driver.unpin(self.address)
        self.pool.close()


class StagedTcpLink:
    """Streams to a peer's pool from a pool on a GPU. One write at a time; others wait for it."""

    def __init__(self, pool: DevicePool, window: PinnedWindow, link: TcpLink, bound: int) -> None:
        self._pool = pool
        self._window = window
        self._link = link
        self._num_target_blocks = bound
        self._queue = pool.driver.queue(pool.device_index)
        self._is_closed = False

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Send blocks into the peer's pool, a window at a time (see ``PeerLink``)."""
        start = time.perf_counter()
        sides = (pairs_src, self._pool.num_blocks), (pairs_dst, self._num_target_blocks)
        align_checked("tcp", *sides)
        reports: list[WriteReport] = []
        num_copies, turn = 0, self._window.pool.num_blocks
        for first in range(0, len(pairs_src), turn):
            sources = pairs_src[first : first + turn]
            num_copies += self._download(sources)
            targets = pairs_dst[first : first + turn]
            reports.append(self._link.write(range(len(sources)), targets, token))
        none = [np.empty(0, dtype=np.uint64)]
        return WriteReport(
            num_blocks=len(pairs_src),
            num_calls=num_copies + sum(report.num_calls for report in reports),
            num_bytes=len(pairs_src) * self._pool.block_bytes,
            seconds=time.perf_counter() - start,
            checksums=np.concatenate([report.checksums for report in reports] or none),
        )

    def measure(self) -> LinkRate:
        """Compare sending bytes that the peer drops with a bare stream on this host."""
        return self._link.measure()

    def close(self) -> None:
        """Close the streams, after a write in progress; a second call does nothing."""
        self._link.close()
        if not self._is_closed:
            self._is_closed = True
            self._queue.close()
            self._window.close()

    def _download(self, sources: Sequence[int]) -> int:
        """Copy blocks to the window's first; return how many copies it took."""
        size = self._pool.block_bytes
        slots = np.arange(len(sources), dtype=np.int32)
        runs = flowpath_native.align(np.asarray(sources, dtype=np.int32), slots).tolist()
        window, pool = self._window.address, self._pool.address
        with draining(self._queue):
            self._queue.copy(
                [
                    (window + slot * size, pool + source * size, length * size)
                    for source, slot, length in runs
                ]
            )
            self._queue.wait(is_long=True)
        return len(runs)


class StagedTcpBackend:
    """Peers that export their pool with ``TcpExport``, on any host; our pool is on a GPU."""

    name = "tcp"
    is_networked = True

    def __init__(self, pool: DevicePool, stall_seconds: float) -> None:
        self._pool = pool
        self._stall_seconds = stall_seconds

    def open_peer(self, handle: ExportedPool) -> StagedTcpLink:
        """Open and warm the streams; TransferError says what to check. Waits for the network."""
        if not isinstance(handle, TcpPoolHandle):
            raise TransferError("tcp: the peer's pool is not offered over tcp")
        size = self._pool.block_bytes
        window = PinnedWindow(
            self._pool.driver, self._pool.device_index, max(1, SENT_BYTES // size), size
        )
        try:
            link = TcpBackend(window.pool, self._stall_seconds).open_peer(handle)
        except BaseException:
            window.close()
            raise
        return StagedTcpLink(self._pool, window, link, handle.num_blocks)


class StagedSink:
    """Receives into a window, and copies on from there into a pool on a GPU."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._window = PinnedWindow(pool.driver, pool.device_index, 1, RECEIVED_BYTES)
        self._queue = pool.driver.queue(pool.device_index)

    def take(self, extents: Extents, receive: Receive) -> None:
        """Bring a frame's bytes into the pool's blocks (see ``BlockSink``)."""
        pieces: list[tuple[int, int, int]] = []
        used = 0
        for block, first_page, num_pages in extents.tolist():
            target = self._pool.address + block * self._pool.block_bytes + first_page * PAGE_BYTES
            left = num_pages * PAGE_BYTES
            while left:
                taken = min(left, RECEIVED_BYTES - used)
                pieces.append((target, used, taken))
                target, used, left = target + taken, used + taken, left - taken
                if used == RECEIVED_BYTES:
                    self._pass_on(pieces, receive)
                    pieces, used = [], 0
        if pieces:
            self._pass_on(pieces, receive)

    def close(self) -> None:
        """Let go of window and stream."""
        self._queue.close()
        self._window.close()

    def _pass_on(self, pieces: list[tuple[int, int, int]], receive: Receive) -> None:
        memory = self._window.pool.buffer
        receive([memory[used : used + taken] for _, used, taken in pieces])
        with draining(self._queue):
            window = self._window.address
            self._queue.copy([(target, window + used, taken) for target, used, taken in pieces])
            self._queue.wait(is_long=False)
