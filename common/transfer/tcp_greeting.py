"""The decode side's door: connections that have not yet proven that they know the pool's secret.

All of them are served by one thread, with a fixed number of bytes for each, a bounded number at a
time and a deadline. When there are too many, the oldest goes: a peer of ours answers at once.
"""

import select
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

import structlog

from common.errors import RemoteProtocolError
from common.transfer.tcp_wire import (
    HELLO_BYTES,
    new_nonce,
    pack_challenge,
    pack_welcome,
    parse_hello,
)

log = structlog.get_logger()

HELLO_SECONDS = 10.0
"""How long a connection may take to say its hello: a busy host may keep a peer waiting."""
MAX_GREETED = 64
QUIET_SECONDS = 1.0
"""Refused strangers are told of in the log this often, with their number."""
ACCEPT_PAUSE_SECONDS = 0.1
"""After the process ran out of descriptors."""


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: socket.socket
    address: str
    nonce: bytes
    deadline: float
    hello: bytearray = field(default_factory=lambda: bytearray(HELLO_BYTES))
    num_bytes: int = 0


OnAdmitted = Callable[[socket.socket, str, bytes], None]
"""Takes a socket over, with the peer's address and both nonces."""


class Greeter:
    """Accepts on ``listener`` and greets, in the thread that calls ``run``."""

    def __init__(self, listener: socket.socket, secret: bytes, on_admitted: OnAdmitted) -> None:
        self._listener = listener
        self._secret = secret
        self._on_admitted = on_admitted
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._is_stopped = False
        self._num_refused = 0
        self._told_at = -QUIET_SECONDS
        listener.setblocking(False)  # noqa: FBT003  # the socket module's own signature

    def run(self) -> None:
        """Greet until stopped; closes the listener and every connection that is still greeted."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        try:
            while not self._is_stopped:
                self._step()
        finally:
            for stranger in list(self._strangers.values()):
                self._forget(stranger).close()
            self._selector.close()
            for sock in (self._listener, self._wake_reader, self._wake_writer):
                sock.close()

    def stop(self) -> None:
        """End ``run``; from any thread."""
        self._is_stopped = True
        with suppress(OSError):  # it has ended
            self._wake_writer.send(b"\0")

    def _step(self) -> None:
        # Every deadline is equally far from its connect, so the first is the earliest.
        earliest = next((s.deadline for s in self._strangers.values()), None)
        timeout = None if earliest is None else max(0.0, earliest - monotonic())
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is not self._wake_reader:
                assert isinstance(key.fileobj, socket.socket), "nothing else is registered"
                stranger = self._strangers.get(key.fileobj)
                if stranger is not None:
                    self._listen(stranger)
        now = monotonic()
        for stranger in list(self._strangers.values()):
            if stranger.deadline > now:
                break
            self._refuse(stranger, f"no hello within {HELLO_SECONDS:g} s")

    def _accept(self) -> None:
        try:
            sock, address = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            log.error("data_accept_failed", reason=error.strerror)
            select.select([self._wake_reader], [], [], ACCEPT_PAUSE_SECONDS)
            return
        sock.setblocking(False)  # noqa: FBT003  # the socket module's own signature
        if len(self._strangers) >= MAX_GREETED:
            self._refuse(next(iter(self._strangers.values())), "too many connections say no hello")
        stranger = _Stranger(sock, address[0], new_nonce(), monotonic() + HELLO_SECONDS)
        self._strangers[sock] = stranger
        self._selector.register(sock, selectors.EVENT_READ)
        try:
            sock.send(pack_challenge(stranger.nonce))
        except OSError as error:
            self._refuse(stranger, error.strerror or "it is gone")

    def _listen(self, stranger: _Stranger) -> None:
        try:
            rest = memoryview(stranger.hello)[stranger.num_bytes :]
            num_bytes = stranger.sock.recv_into(rest)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(stranger, error.strerror or "it is gone")
            return
        if num_bytes == 0:
            self._refuse(stranger, "it left before its hello")
            return
        stranger.num_bytes += num_bytes
        if stranger.num_bytes == HELLO_BYTES:
            self._admit(stranger)

    def _admit(self, stranger: _Stranger) -> None:
        try:
            nonce = parse_hello(self._secret, stranger.nonce, bytes(stranger.hello))
            stranger.sock.send(pack_welcome(self._secret, stranger.nonce, nonce))
        except RemoteProtocolError as error:
            self._refuse(stranger, str(error))
        except OSError as error:
            self._refuse(stranger, error.strerror or "it is gone")
        else:
            sock = self._forget(stranger)
            self._on_admitted(sock, stranger.address, stranger.nonce + nonce)

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        self._forget(stranger).close()
        self._num_refused += 1
        now = monotonic()
        if now - self._told_at < QUIET_SECONDS:
            return
        log.warning(
            "data_connection_refused",
            peer=stranger.address,
            reason=reason,
            num_refused=self._num_refused,
        )
        self._told_at = now
        self._num_refused = 0

    def _forget(self, stranger: _Stranger) -> socket.socket:
        self._selector.unregister(stranger.sock)
        del self._strangers[stranger.sock]
        return stranger.sock
