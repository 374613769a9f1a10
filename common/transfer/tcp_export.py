"""The decode side of transport ``tcp``: a pool that paired peers may write over the network.

One thread greets; each stream that has proven itself has a thread of its own, which reads bytes
straight into the granted blocks, without the interpreter's lock; into those of a GPU by way of a
window of host memory. Anything that is not a frame of a live grant ends its stream with a line in
the log.
"""

from collections.abc import Sequence

import structlog

from common.errors import ConfigError, RemoteProtocolError, TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.layout import PAGE_BYTES
from common.kv.pool import BlockPool, KVPool
from common.messages.fields import TcpPoolHandle
from common.transfer.block_sink import BlockSink, HostSink
from common.transfer.host_staged import StagedSink
from common.transfer.stream_server import StreamServer
from common.transfer.tcp_grants import Session, WriteGrants
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import (
    EXTENT_BYTES,
    HEADER_BYTES,
    MAX_EXTENTS,
    MAX_PROBE_PAGES,
    PROBE,
    Extents,
    FrameHeader,
    is_proven,
    new_secret,
    pack_receipt,
    parse_extents,
    parse_header,
)

log = structlog.get_logger()

MAX_STREAMS = 256
"""Streams of all peers together."""
SCRATCH_BYTES = 256 * 1024
"""Where probes are read to; one for each stream."""


class TcpExport:
    """Serves ``pool`` on ``host``, any free port, until closed.

    ``advertised_host`` is what peers connect to, by default ``host``; it must be given where
    ``host`` is a wildcard. ConfigError when the address cannot be bound. A stream on which no byte
    moves for ``stall_seconds`` in the middle of a frame is ended.
    """

    name = "tcp"
    is_fencing = True

    def __init__(
        self,
        pool: BlockPool,
        stall_seconds: float,
        *,
        host: str = "127.0.0.1",
        advertised_host: str = "",
    ) -> None:
        self._pool = pool
        self._secret = new_secret()
        self._grants = WriteGrants(pool.num_blocks, pool.block_bytes)
        self._server = StreamServer(
            self.name,
            self._serve,
            self._secret,
            stall_seconds,
            MAX_STREAMS,
            host=host,
            advertised_host=advertised_host,
        )

    @property
    def port(self) -> int:
        """Where peers connect to."""
        return self._server.port

    def handle(self) -> TcpPoolHandle:
        """Return what a peer needs to write; it holds a secret: for the handoff channel alone."""
        return TcpPoolHandle(
            kind="tcp",
            host=self._server.host,
            port=self._server.port,
            secret=self._secret,
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
        """End all writing for a transfer (see ``PoolExport``)."""
        self._grants.revoke(transfer_id)

    @property
    def num_streams(self) -> int:
        """Streams that have proven themselves and live."""
        return self._server.num_streams

    def close(self) -> None:
        """End every stream and the listener; on return no byte reaches the pool any more."""
        self._server.close()

    def _serve(self, stream: DataSocket, address: str, nonces: bytes) -> None:
        sink: BlockSink | None = None
        try:
            sink = _sink_into(self._pool)
            frames = _FrameReader(stream, sink, self._grants, self._secret, nonces)
            while frames.serve_next():
                pass
        except RemoteProtocolError as error:
            log.warning("data_frame_refused", peer=address, reason=str(error))
        except TransferError as error:
            log.warning("data_stream_ended", peer=address, reason=str(error))
        finally:
            if sink is not None:
                sink.close()


def _sink_into(pool: BlockPool) -> BlockSink:
    if isinstance(pool, DevicePool):
        return StagedSink(pool)
    if isinstance(pool, KVPool):
        return HostSink(pool)
    raise ConfigError(f"tcp does not write a {type(pool).__name__}")


class _FrameReader:
    """Reads the frames of one stream. Its memory is fixed from the start."""

    def __init__(
        self,
        stream: DataSocket,
        sink: BlockSink,
        grants: WriteGrants,
        secret: bytes,
        nonces: bytes,
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._grants = grants
        self._secret = secret
        self._session = Session(stream, nonces)
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._rows = memoryview(bytearray(MAX_EXTENTS * EXTENT_BYTES))
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._sequence = 0

    def serve_next(self) -> bool:
        """Serve one frame; False when the peer has ended the stream between two."""
        if not self._stream.receive_next(self._header):
            return False
        header = parse_header(self._header, self._sequence)
        rows = self._rows[: header.extents_bytes]
        self._stream.receive([rows])
        extents = parse_extents(rows)
        if header.kind == PROBE:
            self._drop(header, bytes(rows), extents)
        else:
            self._write(header, bytes(rows), extents)
        self._stream.send([memoryview(pack_receipt(self._sequence))])
        self._sequence += 1
        return True

    def _write(self, header: FrameHeader, rows: bytes, extents: Extents) -> None:
        transfer_id = self._grants.enter(header, rows, extents, self._session)
        try:
            self._sink.take(extents, self._stream.receive)
        except TransferError as error:
            raise TransferError(f"transfer {transfer_id}: {error}") from error
        finally:
            self._grants.leave(transfer_id, self._stream)

    def _drop(self, header: FrameHeader, rows: bytes, extents: Extents) -> None:
        if not is_proven(header.proof, self._secret, self._session.nonces, header.signed, rows):
            raise RemoteProtocolError("a probe without proof")
        num_pages = int(extents[0, 2])
        if num_pages > MAX_PROBE_PAGES:
            raise RemoteProtocolError(f"a probe of {num_pages} pages")
        left = num_pages * PAGE_BYTES
        while left:
            piece = self._scratch[: min(left, SCRATCH_BYTES)]
            self._stream.receive([piece])
            left -= len(piece)
