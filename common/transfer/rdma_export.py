"""The decode side of transport ``rdma``: a pool into which its owner reads what peers name.

Each peer's stream has a thread. Nothing is read but into blocks that a grant covers, and the own
pool's description is never given to a peer on this side: nobody else can reach its blocks.
"""

from collections.abc import Sequence

from common.errors import ConfigError, TransferError
from common.ids import TransferId
from common.kv.pool import BlockPool
from common.messages.fields import RdmaPoolHandle
from common.transfer.rdma import RDMA, RdmaBackend
from common.transfer.rdma_agent import RdmaLibrary
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_reader import RdmaReader, ReadingSide
from common.transfer.rdma_shared import SharedAgent
from common.transfer.stream_server import StreamServer
from common.transfer.tcp_grants import WriteGrants
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import new_secret

MAX_STREAMS = 256
"""Streams of all peers together."""


class RdmaExport:
    """Serves ``pool`` until closed; see ``StreamServer`` for the address.

    ``reading`` is the agent of this side, and ``sources`` that of the prefill side, which ends with
    it. A peer that moves nothing for ``stall_seconds`` is given up.
    """

    name = RDMA
    is_fencing = True

    def __init__(
        self,
        pool: BlockPool,
        side: ReadingSide,
        sources: SharedAgent,
        *,
        host: str = "127.0.0.1",
        advertised_host: str = "",
    ) -> None:
        self._pool = pool
        self._side = side
        self._sources = sources
        self._server = StreamServer(
            self.name,
            self._serve,
            side.secret,
            side.stall_seconds,
            MAX_STREAMS,
            host=host,
            advertised_host=advertised_host,
        )

    def handle(self) -> RdmaPoolHandle:
        """Return what a peer needs to write; it holds a secret: for the handoff channel alone."""
        return RdmaPoolHandle(
            kind="rdma",
            host=self._server.host,
            port=self._server.port,
            secret=self._side.secret,
            num_blocks=self._pool.num_blocks,
            block_bytes=self._pool.block_bytes,
            num_bytes=self._pool.num_bytes,
        )

    def grant(
        self, transfer_id: TransferId, block_ids: Sequence[int], token: bytes | None = None
    ) -> bytes:
        """Have what the token's holder names read into these blocks (see ``PoolExport``)."""
        return self._side.grants.grant(transfer_id, block_ids, token)

    def revoke(self, transfer_id: TransferId) -> None:
        """End all reading for a transfer (see ``PoolExport``).

        What is under way ends by itself, in a moment; where it does not, with the agent.
        """
        self._side.grants.revoke(transfer_id)

    @property
    def num_streams(self) -> int:
        """Streams that have proven themselves and live."""
        return self._server.num_streams

    def close(self) -> None:
        """End every stream and both agents; on return no byte reaches the pool any more."""
        try:
            self._server.close()
        finally:
            self._side.agent.close()
            self._sources.close()

    def _serve(self, stream: DataSocket, address: str, nonces: bytes) -> None:
        RdmaReader(self._side, stream, address, nonces).serve()


def open_rdma(
    pool: BlockPool, library: RdmaLibrary, memory: RdmaMemory, stall_seconds: float, *, host: str
) -> tuple[RdmaExport, RdmaBackend]:
    """Return both sides of the transport for a worker with this pool; ``host`` is for peers.

    The pool is registered at once, so that no request waits for it, and once more when the worker
    first writes to a peer. ConfigError where that fails or the address cannot be used.
    """
    reading, sources = SharedAgent(library.new_agent), SharedAgent(library.new_agent)
    try:
        reading.open()
    except TransferError as error:
        raise ConfigError(f"transport {RDMA} cannot be opened: {error}") from error
    side = ReadingSide(
        memory=memory,
        agent=reading,
        grants=WriteGrants(pool.num_blocks, pool.block_bytes),
        secret=new_secret(),
        stall_seconds=stall_seconds,
        is_offloaded=library.port_rate > 0,
    )
    try:
        export = RdmaExport(pool, side, sources, host=host)
    except BaseException:
        reading.close()
        raise
    return export, RdmaBackend(pool, memory, sources, library, stall_seconds)
