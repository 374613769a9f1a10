"""Transport ``shm``: the peer's pool is mapped and written directly, one copy per aligned run."""

import threading
from collections.abc import Sequence

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool, PeerPool
from common.messages.fields import ExportedPool, PoolHandle
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.rates import measure_mapping
from common.transfer.runs import write_blocks


class ShmLink:
    """A peer's mapped pool. One write at a time; others wait for it."""

    def __init__(self, pool: KVPool, peer: PeerPool) -> None:
        self._pool = pool
        self._peer: PeerPool | None = peer
        self._lock = threading.Lock()

    def write(
        self, pairs_src: Sequence[int], pairs_dst: Sequence[int], token: bytes = b""
    ) -> WriteReport:
        """Copy blocks into the peer's pool (see ``PeerLink``). The peer's death does not show."""
        with self._lock:
            peer = self._opened()
            return write_blocks(
                peer.buffer, self._pool.buffer, (pairs_src, pairs_dst), self._pool.block_bytes
            )

    def measure(self) -> LinkRate:
        """Compare reading the peer's pool with a plain memcpy."""
        with self._lock:
            return measure_mapping(self._opened().buffer)

    def close(self) -> None:
        """Unmap the peer's pool."""
        with self._lock:
            if self._peer is not None:
                self._peer.close()
                self._peer = None

    def _opened(self) -> PeerPool:
        if self._peer is None:
            raise TransferError("shm: the link to the peer's pool is closed")
        return self._peer


class ShmBackend:
    """Peers on the same host, in one pid namespace and of one user, with pools in host memory."""

    name = "shm"
    is_networked = False

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def open_peer(self, handle: ExportedPool) -> ShmLink:
        """Map the peer's pool; TransferError when it is gone or its blocks differ from ours."""
        if not isinstance(handle, PoolHandle):
            raise TransferError("shm: the peer's pool is not offered as shared memory")
        if handle.block_bytes != self._pool.block_bytes:
            raise TransferError(
                f"shm: the peer's blocks have {handle.block_bytes} bytes, ours"
                f" {self._pool.block_bytes}"
            )
        return ShmLink(self._pool, PeerPool.open(handle))


class MemoryExport:
    """The decode side of ``shm`` and ``local``: whoever maps the pool's file can write all of it.

    Writing cannot be fenced: it has ended when the peer says so, or is dead.
    """

    name = "shm"
    is_fencing = False

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def handle(self) -> PoolHandle:
        """Return what a peer on this host needs to map the pool."""
        return self._pool.handle()

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Return no token: the mapping is the right to write."""
        return b""

    def revoke(self, transfer_id: TransferId) -> None:
        """Do nothing: the mapping cannot be taken back."""

    def close(self) -> None:
        """Do nothing: the pool closes its file."""
