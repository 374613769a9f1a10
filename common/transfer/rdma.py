"""Transport ``rdma``: adapters move blocks between pools of any two hosts, on GPUs or not.

The bytes are read, not written: the prefill side says on a stream to the decode side what may be
read, and the decode side reads it from the prefill side's registered pool straight into granted
blocks, and confirms. So nobody but the owner of a pool writes into it, and a grant that was taken
back is over once the owner's own reads have ended (see decision 0010).
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.pool import BlockPool
from common.messages.fields import ExportedPool, RdmaPoolHandle
from common.transfer.aligned import align_checked
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.rdma_agent import RdmaLibrary
from common.transfer.rdma_connection import FrameRefusedError, RdmaConnection
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_shared import SharedAgent
from common.transfer.rdma_wire import MAX_RUNS
from common.transfer.tcp_rates import measure_limit
from common.transfer.tcp_wire import TOKEN_BYTES
from common.transfer.verify import checksum_blocks

RDMA = "rdma"
MEASURED_BYTES = 64 * 1024 * 1024
LIMIT_BYTES = 32 * 1024 * 1024
NUM_MEASURED = 3
_NO_CHECKSUMS = np.empty(0, dtype=np.uint64)

_T = TypeVar("_T")


class RdmaLink:
    """The way into a peer's pool. One write at a time; others wait for it."""

    def __init__(
        self,
        pool: BlockPool,
        handle: RdmaPoolHandle,
        connect: Callable[[RdmaPoolHandle], RdmaConnection],
        port_rate: float,
    ) -> None:
        self._pool = pool
        self._handle = handle
        self._open_connection = connect
        self._port_rate = port_rate
        self._where = f"{RDMA} {handle.host}:{handle.port}"
        self._lock = threading.Lock()
        self._is_closed = False
        self._connection: RdmaConnection | None = None

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Have blocks read into the peer's pool (see ``PeerLink``).

        TransferError as well when nothing moves for ``stall_seconds``, or the peer does not know
        the token: it may have revoked it.
        """
        start = time.perf_counter()
        with self._lock:
            self._refuse_closed()
            runs = self._aligned(pairs_src, pairs_dst, token)
            checksums = _NO_CHECKSUMS
            for at in range(0, len(runs), MAX_RUNS):
                is_last = at + MAX_RUNS >= len(runs)
                checksums = self._write_runs(
                    runs[at : at + MAX_RUNS],
                    token,
                    partial(checksum_blocks, self._pool, pairs_src)
                    if is_last
                    else lambda: _NO_CHECKSUMS,
                )
        return WriteReport(
            num_blocks=len(pairs_dst),
            num_calls=len(runs),
            num_bytes=len(pairs_dst) * self._pool.block_bytes,
            seconds=time.perf_counter() - start,
            checksums=checksums,
        )

    def measure(self) -> LinkRate:
        """Compare reading bytes that the peer drops with what the adapter's port could give.

        Where there is no adapter the limit is a bare stream on this host, as for ``tcp``.
        """
        with self._lock:
            self._refuse_closed()
            best = min(
                self._connected(lambda c: c.probe(MEASURED_BYTES)) for _ in range(NUM_MEASURED)
            )
        return LinkRate(
            num_bytes=MEASURED_BYTES,
            gigabytes_per_second=MEASURED_BYTES / best / 1e9,
            limit_gigabytes_per_second=self._port_rate or measure_limit(LIMIT_BYTES),
        )

    def close(self) -> None:
        """End the stream, after a write in progress; a second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._drop()

    # ---- frames ----------------------------------------------------------------------------------

    def _write_runs(
        self, runs: NDArray[np.int32], token: bytes, meanwhile: Callable[[], NDArray[np.uint64]]
    ) -> NDArray[np.uint64]:
        return self._connected(lambda c: c.write(runs, token, meanwhile))

    def _connected(self, use: Callable[[RdmaConnection], _T]) -> _T:
        """Use the connection, or a new one where the peer has ended the old one meanwhile."""
        try:
            connection = self._connection
            if connection is None or connection.is_stale():
                connection = self._connect()
            return use(connection)
        except FrameRefusedError as error:
            raise TransferError(f"{self._where}: {error}") from error
        except (RemoteProtocolError, TransferError) as error:
            self._drop()
            raise TransferError(f"{self._where}: {error}") from error
        except BaseException:
            self._drop()
            raise

    def _connect(self) -> RdmaConnection:
        self._drop()
        try:
            self._connection = self._open_connection(self._handle)
        except (OSError, RemoteProtocolError, TransferError) as error:
            raise TransferError(
                f"cannot join the peer: {error}; check that the address can be reached from here,"
                " no firewall is between, and adapters of both hosts are on one fabric"
            ) from error
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # ---- checks ----------------------------------------------------------------------------------

    def _aligned(
        self, sources: Sequence[int], targets: Sequence[int], token: bytes
    ) -> NDArray[np.int32]:
        """Return the fewest runs, rows (source, target, length), after every check."""
        if len(token) != TOKEN_BYTES:
            raise TransferError(f"{self._where}: a write without a token")
        return align_checked(
            self._where, (sources, self._pool.num_blocks), (targets, self._handle.num_blocks)
        )

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise TransferError(f"{self._where}: the link is closed")


class RdmaBackend:
    """Peers that export their pool with ``RdmaExport``, on any host, in memory of any kind.

    A link gives up when nothing moves for ``stall_seconds``: at most a third of the lease, as for
    ``tcp``.
    """

    name = RDMA
    is_networked = True

    def __init__(
        self,
        pool: BlockPool,
        memory: RdmaMemory,
        agent: SharedAgent,
        library: RdmaLibrary,
        stall_seconds: float,
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._agent = agent
        self._port_rate = library.port_rate
        self._stall_seconds = stall_seconds

    def open_peer(self, handle: ExportedPool) -> RdmaLink:
        """Return a link that joins the peer when it is first used; TransferError: not one of us."""
        if not isinstance(handle, RdmaPoolHandle):
            raise TransferError(f"{RDMA}: the peer's pool is offered as {handle.kind}")
        if handle.block_bytes != self._pool.block_bytes:
            raise TransferError(
                f"{RDMA}: the peer's blocks have {handle.block_bytes} bytes, ours"
                f" {self._pool.block_bytes}"
            )
        return RdmaLink(self._pool, handle, self._connect, self._port_rate)

    def _connect(self, handle: RdmaPoolHandle) -> RdmaConnection:
        return RdmaConnection(
            self._memory,
            self._agent,
            handle,
            self._stall_seconds,
            is_offloaded=self._port_rate > 0,
        )
