"""A prefill side of transport ``tcp`` that can be made to misbehave, byte by byte."""

import os
import socket
from collections.abc import Callable, Sequence
from time import monotonic

import numpy as np

from common.messages.fields import TcpPoolHandle
from common.transfer.tcp_wire import (
    CHALLENGE_BYTES,
    GRANT_ID_BYTES,
    WELCOME_BYTES,
    WRITE,
    new_nonce,
    pack_frame,
    pack_hello,
    parse_challenge,
)

DEADLINE_SECONDS = 20.0


def connect(handle: TcpPoolHandle) -> socket.socket:
    """Open a connection and say nothing."""
    return socket.create_connection((handle.host, handle.port), timeout=DEADLINE_SECONDS)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes, or what came before the end."""
    data = b""
    while len(data) < num_bytes:
        piece = sock.recv(num_bytes - len(data))
        if not piece:
            break
        data += piece
    return data


def is_ended(sock: socket.socket) -> bool:
    """Wait until the other side has ended the connection; what it still says is dropped."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def greet(sock: socket.socket, secret: bytes) -> bytes:
    """Prove that the secret is known; return the session's nonces."""
    server_nonce = parse_challenge(receive(sock, CHALLENGE_BYTES))
    nonce = new_nonce()
    sock.sendall(pack_hello(secret, server_nonce, nonce))
    assert len(receive(sock, WELCOME_BYTES)) == WELCOME_BYTES, "not welcome"
    return server_nonce + nonce


def write_frame(
    session: bytes, token: bytes, extents: Sequence[tuple[int, int, int]], sequence: int = 0
) -> bytes:
    """Return header and extents of a write."""
    key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
    return pack_frame(WRITE, sequence, np.array(extents, dtype=np.uint32), key, session)


def wait_until(is_true: Callable[[], bool]) -> None:
    """Give other threads the processor until something is true."""
    deadline = monotonic() + DEADLINE_SECONDS
    while not is_true():
        assert monotonic() < deadline, "it did not become true"
        os.sched_yield()
