"""The prefill side of one data stream."""

import socket
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from common.errors import RemoteProtocolError, TransferError
from common.kv.layout import PAGE_BYTES
from common.messages.fields import TcpPoolHandle
from common.transfer.tcp_socket import DataSocket
from common.transfer.tcp_wire import (
    CHALLENGE_BYTES,
    GRANT_ID_BYTES,
    MAX_EXTENTS,
    MAX_PROBE_PAGES,
    NO_GRANT,
    PROBE,
    RECEIPT_BYTES,
    WELCOME_BYTES,
    WRITE,
    Extents,
    check_receipt,
    new_nonce,
    pack_frame,
    pack_hello,
    pack_welcome,
    parse_challenge,
)


@dataclass(slots=True)
class Share:
    """What one stream sends: where each piece begins in the own pool, and its target extent."""

    starts: list[int] = field(default_factory=list)
    targets: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, start: int, target: tuple[int, int, int]) -> None:
        """Add a piece: the byte where it begins, and (block, first page, number of pages)."""
        self.starts.append(start)
        self.targets.append(target)

    @property
    def num_bytes(self) -> int:
        """Length of all pieces."""
        return sum(num_pages for _, _, num_pages in self.targets) * PAGE_BYTES


class SendStream:
    """An open, proven stream to a peer's pool. For one thread at a time; ``cut`` for any."""

    def __init__(self, sock: DataSocket, session: bytes) -> None:
        self._sock = sock
        self._session = session
        self._sequence = 0

    @classmethod
    def connect(cls, handle: TcpPoolHandle, stall_seconds: float) -> "SendStream":
        """Connect and prove ourselves within ``stall_seconds`` each.

        OSError, TransferError or RemoteProtocolError says why not.
        """
        return cls(*open_stream(handle.host, handle.port, handle.secret, stall_seconds))

    def send(self, share: Share, source: memoryview, token: bytes) -> range:
        """Send a share from the own pool's bytes; return the frames to await."""
        first = self._sequence
        for at in range(0, len(share.targets), MAX_EXTENTS):
            targets = share.targets[at : at + MAX_EXTENTS]
            starts = share.starts[at : at + MAX_EXTENTS]
            pieces = [
                source[start : start + num_pages * PAGE_BYTES]
                for start, (_, _, num_pages) in zip(starts, targets, strict=True)
            ]
            extents = np.array(targets, dtype=np.uint32)
            key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
            self._send_frame(WRITE, extents, key, pieces)
        return range(first, self._sequence)

    def probe(self, source: memoryview, num_bytes: int, secret: bytes) -> range:
        """Send bytes that the peer drops; return the frames to await."""
        num_pages = min(max(1, num_bytes // PAGE_BYTES), MAX_PROBE_PAGES)
        pieces: list[memoryview] = []
        left = num_pages * PAGE_BYTES
        while left:
            pieces.append(source[:left])
            left -= len(pieces[-1])
        first = self._sequence
        extents = np.array([(0, 0, num_pages)], dtype=np.uint32)
        self._send_frame(PROBE, extents, (NO_GRANT, secret), pieces)
        return range(first, self._sequence)

    def await_receipts(self, sequences: range) -> None:
        """Wait until the peer has every byte of these frames."""
        receipt = memoryview(bytearray(RECEIPT_BYTES))
        for sequence in sequences:
            self._sock.receive_answer(receipt)
            check_receipt(bytes(receipt), sequence)

    def cut(self) -> None:
        """End the stream at once, from any thread."""
        self._sock.cut()

    def close(self) -> None:
        """Close the stream."""
        self._sock.close()

    def _send_frame(
        self, kind: int, extents: Extents, key: tuple[bytes, bytes], pieces: list[memoryview]
    ) -> None:
        frame = pack_frame(kind, self._sequence, extents, key, self._session)
        self._sequence += 1
        self._sock.send([memoryview(frame), *pieces])


def open_stream(
    host: str, port: int, secret: bytes, stall_seconds: float
) -> tuple[DataSocket, bytes]:
    """Connect and greet within ``stall_seconds`` each; return the stream and both nonces.

    OSError, TransferError or RemoteProtocolError says why not.
    """
    deadline = monotonic() + stall_seconds
    sock = socket.create_connection((host, port), timeout=stall_seconds)
    try:
        nonces = _greet(sock, secret, deadline)
    except BaseException:
        sock.close()
        raise
    return DataSocket(sock, stall_seconds), nonces


def _greet(sock: socket.socket, secret: bytes, deadline: float) -> bytes:
    """Prove ourselves and have the peer prove itself; return both nonces."""
    server_nonce = parse_challenge(_receive_by(sock, CHALLENGE_BYTES, deadline))
    nonce = new_nonce()
    sock.sendall(pack_hello(secret, server_nonce, nonce))
    welcome = _receive_by(sock, WELCOME_BYTES, deadline)
    if welcome != pack_welcome(secret, server_nonce, nonce):
        raise RemoteProtocolError("whoever listens there does not know the pool's secret")
    return server_nonce + nonce


def _receive_by(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        left = deadline - monotonic()
        if left <= 0:
            raise TimeoutError("the peer does not answer")
        sock.settimeout(left)
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            raise TransferError("the peer closed the stream before its welcome")
        data += piece
    return data
