"""The decode side of transport ``tcp``: a pool that paired peers may write over the network.

One thread greets; each stream that has proven itself has a thread of its own, which reads bytes
straight into the granted blocks, without the interpreter's lock. Anything that is not a frame of a
live grant ends its stream with a line in the log.
"""

import socket
import threading
from collections.abc import Sequence
from ipaddress import ip_address

import structlog

from common.errors import ConfigError, RemoteProtocolError, TransferError
from common.ids import TransferId
from common.kv.layout import PAGE_BYTES
from common.kv.pool import KVPool
from common.messages.fields import TcpPoolHandle
from common.transfer.tcp_grants import Session, WriteGrants
from common.transfer.tcp_greeting import Greeter
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
BACKLOG = 64
SCRATCH_BYTES = 256 * 1024
"""Where probes are read to; one for each stream."""
LEAVE_SECONDS = 10.0


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
        pool: KVPool,
        stall_seconds: float,
        *,
        host: str = "127.0.0.1",
        advertised_host: str = "",
    ) -> None:
        self._pool = pool
        self._stall_seconds = stall_seconds
        self._secret = new_secret()
        self._grants = WriteGrants(pool.num_blocks, pool.block_bytes)
        self._lock = threading.Lock()
        self._streams: dict[DataSocket, threading.Thread] = {}
        self._is_closed = False
        self._host = advertised_host or host
        listener = _listen(host, advertised_host)
        self.port: int = listener.getsockname()[1]
        self._greeter = Greeter(listener, self._secret, self._admit)
        self._thread = threading.Thread(target=self._greeter.run, name="tcp-greeter", daemon=True)
        self._thread.start()
        log.info("data_listener", host=host, port=self.port)

    def handle(self) -> TcpPoolHandle:
        """Return what a peer needs to write; it holds a secret: for the handoff channel alone."""
        return TcpPoolHandle(
            kind="tcp",
            host=self._host,
            port=self.port,
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
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """End every stream and the listener; on return no byte reaches the pool any more."""
        with self._lock:
            self._is_closed = True
            streams = dict(self._streams)
        self._greeter.stop()
        for stream in streams:
            stream.cut()
        for thread in (self._thread, *streams.values()):
            thread.join(LEAVE_SECONDS)
            if thread.is_alive():
                raise TransferError(f"tcp: {thread.name} does not end")

    # ---- streams ---------------------------------------------------------------------------------

    def _admit(self, sock: socket.socket, address: str, nonces: bytes) -> None:
        stream = DataSocket(sock, self._stall_seconds)
        thread = threading.Thread(
            target=self._serve, args=(stream, address, nonces), name="tcp-stream", daemon=True
        )
        with self._lock:
            is_refused = self._is_closed or len(self._streams) >= MAX_STREAMS
            if not is_refused:
                self._streams[stream] = thread
                thread.start()
        if is_refused:
            log.error("data_stream_refused", peer=address, reason=f"{MAX_STREAMS} streams are open")
            stream.close()

    def _serve(self, stream: DataSocket, address: str, nonces: bytes) -> None:
        frames = _FrameReader(stream, self._pool, self._grants, self._secret, nonces)
        try:
            while frames.serve_next():
                pass
        except RemoteProtocolError as error:
            log.warning("data_frame_refused", peer=address, reason=str(error))
        except TransferError as error:
            log.warning("data_stream_ended", peer=address, reason=str(error))
        finally:
            with self._lock:
                del self._streams[stream]
            stream.close()


class _FrameReader:
    """Reads the frames of one stream. Its memory is fixed from the start."""

    def __init__(
        self,
        stream: DataSocket,
        pool: KVPool,
        grants: WriteGrants,
        secret: bytes,
        nonces: bytes,
    ) -> None:
        self._stream = stream
        self._pool = pool
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
            block_bytes = self._pool.block_bytes
            targets: list[memoryview] = []
            for block, first_page, num_pages in extents.tolist():
                start = block * block_bytes + first_page * PAGE_BYTES
                targets.append(self._pool.buffer[start : start + num_pages * PAGE_BYTES])
            self._stream.receive(targets)
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


def _listen(host: str, advertised_host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"cannot listen for KV data on {host}: {error.strerror}") from error
    if ip_address(address[0]).is_unspecified and not advertised_host:
        raise ConfigError(f"peers cannot connect to {host}: say which address they should use")
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for KV data on {host}: {error.strerror}") from error
    return listener
