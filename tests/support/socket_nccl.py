"""NCCL between processes of one host, over memory of the host and sockets.

As with NCCL, a rank is told nothing of a peer that has died: its work just does not go on.
"""

import ctypes
import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from common.transfer.nccl_driver import SENDER, UNIQUE_ID_BYTES, Piece
from tests.support.fake_nccl import LIMIT_RATE, FakeScratch

_Piece = tuple[bool, memoryview]
"""``(is sent, memory)``."""


class _SocketMark:
    def __init__(self, communicator: "SocketCommunicator", goal: int) -> None:
        self._communicator = communicator
        self._goal = goal

    def is_done(self) -> bool:
        return self._communicator.has_come_to(self._goal)


class SocketCommunicator:
    """One rank, whose thread does what was handed over."""

    def __init__(self, endpoint: socket.socket, rank: int, port: int) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._port = port
        self._peer: socket.socket | None = None
        self._is_aborted = False
        self._lock = threading.Lock()
        self._waiting: queue.Queue[_Piece | None] = queue.Queue()
        self._num_handed_over = 0
        self._num_moved = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_ready(self) -> bool:
        return self._peer is not None

    def send(self, pieces: Sequence[Piece]) -> None:
        self._hand_over(pieces, is_sent=True)

    def receive(self, pieces: Sequence[Piece]) -> None:
        self._hand_over(pieces, is_sent=False)

    def mark(self) -> _SocketMark:
        return _SocketMark(self, self._num_handed_over)

    def abort(self) -> _SocketMark:
        with self._lock:
            self._is_aborted = True
            for sock in (self._endpoint, self._peer):
                if sock is not None:
                    with suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
        self._waiting.put(None)
        return _SocketMark(self, self._num_handed_over)

    def has_come_to(self, goal: int) -> bool:
        if self._is_aborted:
            return not self._thread.is_alive()
        return self._num_moved >= goal

    def _hand_over(self, pieces: Sequence[Piece], *, is_sent: bool) -> None:
        for address, num_bytes in pieces:
            memory = (ctypes.c_char * num_bytes).from_address(address)
            self._waiting.put((is_sent, memoryview(memory).cast("B")))
        self._num_handed_over += len(pieces)

    def _run(self) -> None:
        try:
            self._meet()
            while (piece := self._waiting.get()) is not None and self._move(*piece):
                self._num_moved += 1
            while not self._is_aborted:
                self._waiting.get()
        except OSError:
            while not self._is_aborted:
                self._waiting.get()
        finally:
            for sock in (self._endpoint, self._peer):
                if sock is not None:
                    sock.close()

    def _meet(self) -> None:
        if self._rank == SENDER:
            peer = self._endpoint.accept()[0]
        else:
            self._endpoint.connect(("127.0.0.1", self._port))
            peer = self._endpoint
        with self._lock:
            self._peer = peer

    def _move(self, is_sent: bool, memory: memoryview) -> bool:
        assert self._peer is not None
        if is_sent:
            self._peer.sendall(memory)
            return True
        left = memory
        while left and not self._is_aborted:
            num_bytes = self._peer.recv_into(left)
            if not num_bytes:
                return False
            left = left[num_bytes:]
        return not left


class SocketNcclDriver:
    """One process's way to the others. A unique id is the port of the first rank."""

    def __init__(self) -> None:
        self.device_uuid = "GPU-host"
        self._listeners: dict[int, socket.socket] = {}

    def new_unique_id(self) -> bytes:
        listener = socket.create_server(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
        self._listeners[port] = listener
        return port.to_bytes(UNIQUE_ID_BYTES, "little")

    def join(self, unique_id: bytes, rank: int) -> SocketCommunicator:
        port = int.from_bytes(unique_id, "little")
        endpoint = self._listeners.pop(port) if rank == SENDER else socket.socket()
        return SocketCommunicator(endpoint, rank, port)

    def allocate(self, num_bytes: int) -> FakeScratch:
        return FakeScratch(num_bytes)

    def limit_rate(self, peer_uuid: str) -> float:
        assert peer_uuid.startswith("GPU-")
        return LIMIT_RATE
