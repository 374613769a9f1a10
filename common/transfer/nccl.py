"""Transport ``nccl``: blocks travel from GPU to GPU, on any host, over what NCCL finds there.

NCCL is two-sided: both sides name what they send and receive. So the prefill side says on a stream
to the decode side's listener what it will send, which receives that much into granted blocks, and
confirms. Each direction of a pair of workers has a communicator of its own, joined when it is
first needed. After a failure it is gone, and the next write joins another.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.messages.fields import ExportedPool, NcclPoolHandle
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.nccl_connection import FrameRefusedError, NcclConnection, NotStartedError
from common.transfer.nccl_driver import AddressedPool, NcclDriver, Piece
from common.transfer.nccl_limit import CommunicatorLimit
from common.transfer.nccl_wire import MAX_EXTENTS, MAX_PROBE_BYTES
from common.transfer.tcp_wire import TOKEN_BYTES, Extents
from common.transfer.verify import checksum_blocks

NUM_PROBES = 8
NUM_MEASURED = 3
_NO_CHECKSUMS = np.empty(0, dtype=np.uint64)

_T = TypeVar("_T")


class NcclLink:
    """The way into a peer's pool. One write at a time; others wait for it."""

    def __init__(
        self,
        pool: AddressedPool,
        handle: NcclPoolHandle,
        driver: NcclDriver,
        limit: CommunicatorLimit,
        stall_seconds: float,
    ) -> None:
        self._pool = pool
        self._handle = handle
        self._driver = driver
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._where = f"nccl {handle.host}:{handle.port}"
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: NcclConnection | None = None

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Send blocks into the peer's pool (see ``PeerLink``).

        TransferError as well when nothing moves for ``stall_seconds``, or the peer does not know
        the token: it may have revoked it.
        """
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            rows = self._aligned(pairs_src, pairs_dst, token)
            checksums = _NO_CHECKSUMS
            for at in range(0, len(rows), MAX_EXTENTS):
                is_last = at + MAX_EXTENTS >= len(rows)
                checksums = self._write_rows(
                    rows[at : at + MAX_EXTENTS],
                    token,
                    partial(checksum_blocks, self._pool, pairs_src)
                    if is_last
                    else lambda: _NO_CHECKSUMS,
                )
        return WriteReport(
            num_blocks=len(pairs_dst),
            num_calls=len(rows),
            num_bytes=len(pairs_dst) * self._pool.block_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

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

    def close(self) -> None:
        """End the communicator, after a write in progress; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._drop()

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

    # ---- sending ---------------------------------------------------------------------------------

    def _write_rows(
        self,
        rows: NDArray[np.int32],
        token: bytes,
        meanwhile: Callable[[], NDArray[np.uint64]],
    ) -> NDArray[np.uint64]:
        block_bytes = self._pool.block_bytes
        pieces: list[Piece] = []
        targets: list[tuple[int, int, int]] = []
        for source, target, length in rows.tolist():
            num_bytes = length * block_bytes
            pieces.append((self._pool.address + source * block_bytes, num_bytes))
            targets.append((target, 0, num_bytes // PAGE_BYTES))
        extents: Extents = np.array(targets, dtype=np.uint32)
        return self._connected(lambda c: c.write(pieces, extents, token, meanwhile))

    def _connected(self, use: Callable[[NcclConnection], _T]) -> _T:
        """Use the connection, or a new one where the peer has ended the old one meanwhile."""
        try:
            kept = self._connection
            if kept is not None and not kept.is_stale():
                try:
                    return self._use(kept, use)
                except NotStartedError:
                    if not kept.is_stale():
                        raise
                    self._drop()
            return self._use(self._connect(), use)
        except FrameRefusedError as error:
            raise TransferError(f"{self._where}: {error}") from error
        except (RemoteProtocolError, TransferError) as error:
            self._drop()
            raise TransferError(f"{self._where}: {error}") from error
        except BaseException:
            self._drop()
            raise
        finally:
            self._limit.used(self)

    def _use(self, connection: NcclConnection, use: Callable[[NcclConnection], _T]) -> _T:
        with self._limit.moving(self._stall_seconds):
            return use(connection)

    def _connect(self) -> NcclConnection:
        self._drop()
        self._limit.admit(self, self._stall_seconds)
        try:
            self._connection = NcclConnection(self._driver, self._handle, self._stall_seconds)
        except BaseException as error:
            self._limit.remove(self)
            if isinstance(error, (OSError, RemoteProtocolError, TransferError)):
                raise TransferError(
                    f"cannot join the peer: {error}; check that the address can be reached from"
                    " here, no firewall is between, and each worker has a GPU of its own"
                ) from error
            raise
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            self._limit.remove(self)

    # ---- checks ----------------------------------------------------------------------------------

    def _aligned(
        self, sources: Sequence[int], targets: Sequence[int], token: bytes
    ) -> NDArray[np.int32]:
        """Return the fewest runs, rows (source, target, length), after every check."""
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"{self._where}: a write without a token")
        return align_checked(
            self._where,
            (sources, self._pool.num_blocks),
            (targets, self._handle.num_blocks),
        )

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError(f"{self._where}: the link is closed")


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
