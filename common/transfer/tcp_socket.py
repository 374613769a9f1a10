"""A connected data socket whose every wait ends: blocking calls with the kernel's timeouts.

A call hands the kernel whole lists of memory and comes back when all is done, so that the
interpreter's lock is taken once a frame and not once a packet. What bounds a wait is progress: a
slow link may take long, a link on which no byte moves for ``stall_seconds`` is given up.
"""

import fcntl
import select
import socket
import struct
import termios
import threading
from collections.abc import Sequence
from contextlib import suppress

from common.errors import TransferError

KEEPALIVE_PROBES = 3
MAX_VIEWS = 1024
"""Pieces of memory in one system call (IOV_MAX)."""
MAX_UNSENT_BYTES = 512 * 1024
"""Bytes in a stream's queue that are not under way yet."""


class DataSocket:
    """Owns ``sock``. One thread at a time may send and one receive; ``cut`` may come from any."""

    def __init__(self, sock: socket.socket, stall_seconds: float) -> None:
        self._sock = sock
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()
        self._is_cut = False
        self._is_closed = False
        _configure(sock, stall_seconds)

    @property
    def is_cut(self) -> bool:
        """Whether ``cut`` was called."""
        return self._is_cut

    def send(self, views: Sequence[memoryview]) -> None:
        """Hand all bytes to the kernel; TransferError when none is taken for too long."""
        left = list(views)
        while left:
            try:
                num_bytes = self._sock.sendmsg(left[:MAX_VIEWS], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                raise TransferError(self._stalled("took")) from None
            except OSError as error:
                raise TransferError(f"sending failed: {error.strerror}") from error
            left = _after(left, num_bytes)

    def receive(self, views: Sequence[memoryview]) -> None:
        """Fill all of the memory; TransferError when the peer ends or is silent for too long."""
        left = list(views)
        while left:
            num_bytes = self._receive_some(left)
            if num_bytes is None:
                raise TransferError(self._stalled("sent"))
            if num_bytes == 0 or self._is_cut:
                raise TransferError("the stream was cut" if self._is_cut else "the peer closed it")
            left = _after(left, num_bytes)

    def receive_next(self, view: memoryview) -> bool:
        """Fill ``view``, however long it takes until a first byte comes; False at a clean end."""
        while not self._is_cut:
            num_bytes = self._receive_some([view])
            if num_bytes is None:
                continue
            if num_bytes == 0:
                return False
            if num_bytes < len(view):
                self.receive([view[num_bytes:]])
            return True
        return False

    def receive_answer(self, view: memoryview) -> None:
        """Fill ``view``, as long as the peer takes bytes that were sent before; see ``receive``."""
        unsent = -1
        left = [view]
        while left:
            num_bytes = self._receive_some(left)
            if num_bytes is None:
                before, unsent = unsent, self._num_unsent()
                if unsent == before:
                    raise TransferError(self._stalled("took or sent"))
            elif num_bytes == 0:
                raise TransferError("the peer closed it")
            else:
                left = _after(left, num_bytes)

    def is_quiet(self) -> bool:
        """Whether nothing has come that is not received yet; TransferError at the end."""
        if self._is_cut:
            raise TransferError("the stream was cut")
        try:
            data = self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError as error:
            raise TransferError(f"receiving failed: {error.strerror}") from error
        if not data:
            raise TransferError("the peer closed it")
        return False

    def has_word(self, wait_seconds: float) -> bool:
        """Wait, not for long, until something has come, also the end; return whether it has."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(wait_seconds * 1e3))

    def cut(self) -> None:
        """End every wait of the socket at once, in any thread."""
        with self._lock:
            self._is_cut = True
            # The descriptor may be the kernel's next one only after close, which waits for us.
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._sock.close()

    def _receive_some(self, views: list[memoryview]) -> int | None:
        """Return how many bytes came, 0 at the end, None when none came for too long."""
        try:
            return self._sock.recvmsg_into(views[:MAX_VIEWS], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransferError(f"receiving failed: {error.strerror}") from error

    def _num_unsent(self) -> int:
        """Bytes that the peer's kernel has not acknowledged."""
        answer = fcntl.ioctl(self._sock, termios.TIOCOUTQ, bytes(4))
        return int(struct.unpack("i", answer)[0])

    def _stalled(self, what: str) -> str:
        return f"the peer {what} no byte for {self._stall_seconds:.1f} s"


def _configure(sock: socket.socket, stall_seconds: float) -> None:
    """Set timeouts and options; buffers stay the kernel's to size, which it does by the path.

    Only what is not under way yet is bounded: a longer queue would leave the processor's cache
    before the kernel comes to send it.
    """
    sock.settimeout(None)
    interval = struct.pack("@ll", int(stall_seconds), int(stall_seconds % 1 * 1_000_000))
    seconds = max(1, round(stall_seconds))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval),
        (socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000)),
    ):
        sock.setsockopt(level, option, value)


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``num_bytes`` bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
