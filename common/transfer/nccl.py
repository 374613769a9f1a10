"""Transport ``nccl``: blocks travel from GPU to GPU, on any host, over what NCCL finds there.

NCCL is two-sided: both sides name what they send and receive. So the prefill side says on a stream
to the decode side's listener what it will send, which receives that much into granted blocks, and
confirms. Each direction of a pair of workers has a communicator of its own, joined when it is
first needed. After a failure it is gone, and the next write joins another.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.messages.fields import ExportedPool, NcclPoolHandle
from common.transfer.backend import LinkRate
from common.transfer.joined_link import JoinedLink, Meanwhile, Sums
from common.transfer.nccl_connection import NcclConnection, NotStartedError
from common.transfer.nccl_driver import AddressedPool, NcclDriver, Piece
from common.transfer.nccl_limit import CommunicatorLimit
from common.transfer.nccl_wire import MAX_EXTENTS, MAX_PROBE_BYTES
from common.transfer.tcp_wire import Extents

NUM_PROBES = 8
NUM_MEASURED = 3

_T = TypeVar("_T")


class NcclLink(JoinedLink[NcclConnection]):
    """The way into a peer's pool, whose owner receives what is sent."""

    def __init__(
        self,
        pool: AddressedPool,
        handle: NcclPoolHandle,
        driver: NcclDriver,
        limit: CommunicatorLimit,
        stall_seconds: float,
    ) -> None:
        where = f"nccl {handle.host}:{handle.port}"
        super().__init__(where, pool, handle.num_blocks, MAX_EXTENTS)
        self._pool = pool
        self._handle = handle
        self._driver = driver
        self._limit = limit
        self._stall_seconds = stall_seconds

    def measure(self) -> LinkRate:
        """Compare sending bytes that the peer drops with what the way there could give."""
        piece_bytes = min(MAX_PROBE_BYTES, self._pool.num_bytes)
        pieces = [(self._pool.address, piece_bytes)] * NUM_PROBES
        with self._lock:
            self._refuse_closed()
            best = min(
                self._connected(lambda c: c.probe(pieces, piece_bytes // PAGE_BYTES))
                for _ in range(NUM_MEASURED)
            )
        num_bytes = NUM_PROBES * piece_bytes
        return LinkRate(
            num_bytes=num_bytes,
            gigabytes_per_second=num_bytes / best / 1e9,
            limit_gigabytes_per_second=self._driver.limit_rate(self._handle.device_uuid),
        )

    def try_release(self) -> bool:
        """End the communicator unless it is in use; the next write joins another."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._connection is None:
                return False
            self._drop()
            return True
        finally:
            self._lock.release()

    def _write_frame(self, runs: NDArray[np.int32], token: bytes, meanwhile: Meanwhile) -> Sums:
        block_bytes = self._pool.block_bytes
        pieces: list[Piece] = []
        targets: list[tuple[int, int, int]] = []
        for source, target, length in runs.tolist():
            num_bytes = length * block_bytes
            pieces.append((self._pool.address + source * block_bytes, num_bytes))
            targets.append((target, 0, num_bytes // PAGE_BYTES))
        extents: Extents = np.array(targets, dtype=np.uint32)
        return self._connected(lambda c: c.write(pieces, extents, token, meanwhile))

    # ---- communicators, of which there are few ---------------------------------------------------

    def _connected(self, use: Callable[[NcclConnection], _T]) -> _T:
        try:
            return super()._connected(use)
        finally:
            self._limit.used(self)

    def _used(self, use: Callable[[NcclConnection], _T]) -> _T:
        kept = self._connection
        if kept is not None and not kept.is_stale():
            try:
                return self._moved(kept, use)
            except NotStartedError:
                if not kept.is_stale():
                    raise
        return self._moved(self._connect(), use)

    def _moved(self, connection: NcclConnection, use: Callable[[NcclConnection], _T]) -> _T:
        with self._limit.moving(self._stall_seconds):
            return use(connection)

    def _join(self) -> NcclConnection:
        self._limit.admit(self, self._stall_seconds)
        try:
            return NcclConnection(self._driver, self._handle, self._stall_seconds)
        except BaseException as error:
            self._limit.remove(self)
            if isinstance(error, (OSError, RemoteProtocolError, TransferError)):
                raise TransferError(
                    f"cannot join the peer: {error}; check that the address can be reached from"
                    " here, no firewall is between, and each worker has a GPU of its own"
                ) from error
            raise

    def _drop(self) -> None:
        had_communicator = self._connection is not None
        super()._drop()
        if had_communicator:
            self._limit.remove(self)


class NcclBackend:
    """Peers that export their pool with ``NcclExport``, each with a GPU that is not this one.

    ``limit`` is for all links of this backend. A link gives up when nothing moves for
    ``stall_seconds``: at most a third of the lease, as for ``tcp``.
    """

    name = "nccl"
    is_networked = True

    def __init__(
        self,
        pool: AddressedPool,
        driver: NcclDriver,
        limit: CommunicatorLimit,
        stall_seconds: float,
    ) -> None:
        self._pool = pool
        self._driver = driver
        self._limit = limit
        self._stall_seconds = stall_seconds

    def open_peer(self, handle: ExportedPool) -> NcclLink:
        """Return a link that joins the peer when it is first used; TransferError: not one of us."""
        if not isinstance(handle, NcclPoolHandle):
            raise TransferError(f"nccl: the peer's pool is offered as {handle.kind}")
        if handle.block_bytes != self._pool.block_bytes:
            raise TransferError(
                f"nccl: the peer's blocks have {handle.block_bytes} bytes, ours"
                f" {self._pool.block_bytes}"
            )
        return NcclLink(self._pool, handle, self._driver, self._limit, self._stall_seconds)
