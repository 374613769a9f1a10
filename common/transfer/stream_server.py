"""The decode side's data listener: it greets, and gives every proven stream a thread."""

import socket
import threading
from collections.abc import Callable
from ipaddress import ip_address

import structlog

from common.errors import ConfigError, TransferError
from common.transfer.tcp_greeting import Greeter
from common.transfer.tcp_socket import DataSocket

log = structlog.get_logger()

BACKLOG = 64
LEAVE_SECONDS = 10.0


ServeStream = Callable[[DataSocket, str, bytes], None]
"""Serves a stream until it ends, given the peer's address and both nonces."""


class StreamServer:
    """Serves streams whose peers know ``secret``, on ``host``, any free port, until closed.

    ``advertised_host`` is what peers connect to, by default ``host``; it must be given where
    ``host`` is a wildcard. ConfigError when the address cannot be bound. ``name`` stands in logs.
    """

    def __init__(
        self,
        name: str,
        serve: ServeStream,
        secret: bytes,
        stall_seconds: float,
        max_streams: int,
        *,
        host: str,
        advertised_host: str,
    ) -> None:
        self._name = name
        self._serve_stream = serve
        self._stall_seconds = stall_seconds
        self._max_streams = max_streams
        self._lock = threading.Lock()
        self._streams: dict[DataSocket, threading.Thread] = {}
        self._is_closed = False
        self.host = advertised_host or host
        """What peers connect to."""
        listener = _listen(host, advertised_host)
        self.port: int = listener.getsockname()[1]
        self._greeter = Greeter(listener, secret, self._admit)
        self._thread = threading.Thread(
            target=self._greeter.run, name=f"{name}-greeter", daemon=True
        )
        self._thread.start()
        log.info("data_listener", transport=name, host=host, port=self.port)

    @property
    def num_streams(self) -> int:
        """Streams that have proven themselves and live."""
        with self._lock:
            return len(self._streams)

    def close(self) -> None:
        """End every stream and the listener; on return no stream is served any more."""
        with self._lock:
            self._is_closed = True
            streams = dict(self._streams)
        self._greeter.stop()
        for stream in streams:
            stream.cut()
        for thread in (self._thread, *streams.values()):
            thread.join(LEAVE_SECONDS)
            if thread.is_alive():
                raise TransferError(f"{self._name}: {thread.name} does not end")

    def _admit(self, sock: socket.socket, address: str, nonces: bytes) -> None:
        stream = DataSocket(sock, self._stall_seconds)
        thread = threading.Thread(
            target=self._serve,
            args=(stream, address, nonces),
            name=f"{self._name}-stream",
            daemon=True,
        )
        with self._lock:
            is_refused = self._is_closed or len(self._streams) >= self._max_streams
            if not is_refused:
                self._streams[stream] = thread
                thread.start()
        if is_refused:
            reason = f"{self._max_streams} streams are open"
            log.error("data_stream_refused", peer=address, reason=reason)
            stream.close()

    def _serve(self, stream: DataSocket, address: str, nonces: bytes) -> None:
        try:
            self._serve_stream(stream, address, nonces)
        finally:
            with self._lock:
                del self._streams[stream]
            stream.close()


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
