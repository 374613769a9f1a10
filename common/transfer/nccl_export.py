"""The decode side of transport ``nccl``: a pool on a GPU, as paired peers may write it.

Each peer's stream has a thread and, once it has joined, a communicator. Nothing is received but
what a grant covers, by receives that this side posts: once they are done or aborted no byte can
reach the blocks, whatever the peer does. No memory is registered with NCCL, because a peer could
then write into registered memory by itself.
"""

from collections.abc import Sequence

from common.ids import TransferId
from common.messages.fields import NcclPoolHandle
from common.transfer.nccl_driver import AddressedPool, NcclDriver
from common.transfer.nccl_limit import CommunicatorLimit
from common.transfer.nccl_receiver import NcclReceiver, ReceivingSide
from common.transfer.stream_server import StreamServer
from common.transfer.tcp_grants import WriteGrants
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import new_secret

MAX_STREAMS = 64
"""Streams of all peers together; few of them hold a communicator."""


class NcclExport:
    """Serves ``pool`` until closed; see ``StreamServer`` for the address.

    ``limit`` is for all peers of this export. A peer that moves nothing for
    ``stall_seconds`` in the middle of a frame is given up.
    """

    name = "nccl"
    is_fencing = True

    def __init__(
        self,
        pool: AddressedPool,
        driver: NcclDriver,
        limit: CommunicatorLimit,
        stall_seconds: float,
        *,
        host: str = "127.0.0.1",
        advertised_host: str = "",
    ) -> None:
        self._pool = pool
        self._driver = driver
        self._secret = new_secret()
        self._grants = WriteGrants(pool.num_blocks, pool.block_bytes)
        self._side = ReceivingSide(pool, driver, self._grants, limit, self._secret, stall_seconds)
        self._server = StreamServer(
            self.name,
            self._serve,
            self._secret,
            stall_seconds,
            MAX_STREAMS,
            host=host,
            advertised_host=advertised_host,
        )

    def handle(self) -> NcclPoolHandle:
        """Return what a peer needs to write; it holds a secret: for the handoff channel alone."""
        return NcclPoolHandle(
            kind="nccl",
            host=self._server.host,
            port=self._server.port,
            secret=self._secret,
            device_uuid=self._driver.device_uuid,
            num_blocks=self._pool.num_blocks,
            block_bytes=self._pool.block_bytes,
            num_bytes=self._pool.num_bytes,
        )

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Let the holder of the returned token write these blocks (see ``PoolExport``)."""
        return self._grants.grant(transfer_id, block_ids, token)

    def revoke(self, transfer_id: TransferId) -> None:
        """End all writing for a transfer (see ``PoolExport``).

        A transfer that is under way may end by itself, for a moment; then it is aborted.
        """
        self._grants.revoke(transfer_id)

    @property
    def num_streams(self) -> int:
        """Streams that have proven themselves and live."""
        return self._server.num_streams

    def close(self) -> None:
        """End every stream; on return no byte reaches the pool any more."""
        self._server.close()

    def _serve(self, stream: DataSocket, address: str, nonces: bytes) -> None:
        NcclReceiver(self._side, stream, address, nonces).serve()
