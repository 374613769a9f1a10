"""Transport ``rdma``: adapters move blocks between pools of any two hosts, on GPUs or not.

The bytes are read, not written: the prefill side says on a stream to the decode side what may be
read, and the decode side reads it from the prefill side's registered pool straight into granted
blocks, and confirms. So nobody but the owner of a pool writes into it, and a grant that was taken
back is over once the owner's own reads have ended (see decision 0010).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.errors import RemoteProtocolError, TransferError
from common.kv.pool import BlockPool
from common.messages.fields import ExportedPool, RdmaPoolHandle
from common.transfer.backend import LinkRate
from common.transfer.joined_link import JoinedLink, Meanwhile, Sums
from common.transfer.rdma_agent import RdmaLibrary
from common.transfer.rdma_connection import RdmaConnection
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_shared import SharedAgent
from common.transfer.rdma_wire import MAX_RUNS
from common.transfer.tcp_rates import measure_limit

RDMA = "rdma"
MEASURED_BYTES = 64 * 1024 * 1024
LIMIT_BYTES = 32 * 1024 * 1024
NUM_MEASURED = 3


class RdmaLink(JoinedLink[RdmaConnection]):
    """The way into a peer's pool, whose owner reads what is written."""

    def __init__(
        self,
        pool: BlockPool,
        handle: RdmaPoolHandle,
        open_connection: Callable[[RdmaPoolHandle], RdmaConnection],
        port_rate: float,
    ) -> None:
        super().__init__(f"{RDMA} {handle.host}:{handle.port}", pool, handle.num_blocks, MAX_RUNS)
        self._handle = handle
        self._open_connection = open_connection
        self._port_rate = port_rate

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

    def _write_frame(self, runs: NDArray[np.int32], token: bytes, meanwhile: Meanwhile) -> Sums:
        return self._connected(lambda c: c.write(runs, token, meanwhile))

    def _join(self) -> RdmaConnection:
        try:
            return self._open_connection(self._handle)
        except (OSError, RemoteProtocolError, TransferError) as error:
            raise TransferError(
                f"cannot join the peer: {error}; check that the address can be reached from here,"
                " no firewall is between, and adapters of both hosts are on one fabric"
            ) from error


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
