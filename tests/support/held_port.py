"""A port of this host that nobody else is given while a test needs it."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Name a port on which nothing listens; what reuses addresses, as servers do, may bind it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])
