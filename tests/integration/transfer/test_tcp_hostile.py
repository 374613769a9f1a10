"""A listener among strangers, broken peers and cut links stays whole and writes nothing wrong."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from time import monotonic

import pytest
import structlog

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.transfer import tcp_greeting
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport
from common.transfer.tcp_wire import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAGIC,
    RECEIPT_BYTES,
    new_token,
    pack_hello,
    pack_receipt,
    parse_challenge,
)
from tests.support.data_stream import connect, greet, is_ended, receive, wait_until, write_frame

PAGE = 4096
BLOCK = 16 * PAGE
NUM_BLOCKS = 64
EMPTY = b"\xee"
STALL = 1.0
"""Seconds: longer than a busy machine leaves a process alone."""
A = TransferId("tr-a")
GRANTED = range(8, 24)


@pytest.fixture
def target() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    pool.buffer[:] = EMPTY * pool.num_bytes
    yield pool
    pool.close()


@pytest.fixture
def export(target: KVPool) -> Iterator[TcpExport]:
    export = TcpExport(target, STALL)
    yield export
    export.close()


@pytest.fixture
def source() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    pool.buffer[:] = b"\x11" * pool.num_bytes
    yield pool
    pool.close()


@pytest.fixture
def opened() -> Iterator[Callable[[TcpExport], socket.socket]]:
    sockets: list[socket.socket] = []

    def open_one(export: TcpExport) -> socket.socket:
        sockets.append(connect(export.handle()))
        return sockets[-1]

    yield open_one
    for sock in sockets:
        sock.close()


Opened = Callable[[TcpExport], socket.socket]


def is_untouched(pool: KVPool) -> bool:
    return pool.buffer.tobytes() == EMPTY * pool.num_bytes


def assert_works(export: TcpExport, source: KVPool) -> None:
    """A well-behaved peer pairs and writes."""
    transfer = TransferId("tr-works")
    token = export.grant(transfer, [0])
    link = TcpBackend(source, 20.0, num_streams=2).open_peer(export.handle())
    assert link.write([0], [0], token).num_bytes == BLOCK
    link.close()
    export.revoke(transfer)


def test_random_bytes_and_half_hellos_end_their_connection_alone(
    export: TcpExport, target: KVPool, source: KVPool, opened: Opened
) -> None:
    random = Random(5)
    right = pack_hello(export.handle().secret, bytes(16), bytes(16))
    for number in range(60):
        sock = opened(export)
        kind = number % 4
        if kind == 0:
            data = random.randbytes(random.randrange(1, 4 * HELLO_BYTES))
        elif kind == 1:
            data = right[: random.randrange(len(right))]
        elif kind == 2:
            hello = pack_hello(export.handle().secret, read_nonce(sock), bytes(16))
            data = flipped(hello, random)
        else:
            data = right
        say_last(sock, data)
        assert is_ended(sock)
    wait_until(lambda: export.num_streams == 0)
    assert is_untouched(target)
    assert_works(export, source)


def say_last(sock: socket.socket, data: bytes) -> None:
    """Send what the other side may refuse before it has all of it, and then the end."""
    with suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)


def read_nonce(sock: socket.socket) -> bytes:
    return parse_challenge(receive(sock, CHALLENGE_BYTES))


def test_random_frames_behind_a_right_hello_write_nothing(
    export: TcpExport, target: KVPool, source: KVPool, opened: Opened
) -> None:
    random = Random(6)
    token = export.grant(A, GRANTED)
    for number in range(60):
        sock = opened(export)
        session = greet(sock, export.handle().secret)
        good = write_frame(session, token, [(8, 0, 16)])
        data = [
            random.randbytes(random.randrange(1, 300)),
            good[: random.randrange(1, len(good))],
            flipped(good, random),
            MAGIC + random.randbytes(60),
        ][number % 4]
        say_last(sock, data)
        assert is_ended(sock)
    wait_until(lambda: export.num_streams == 0)
    assert is_untouched(target)
    assert_works(export, source)


def flipped(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize(
    ("extents", "reason"),
    [
        ([(7, 0, 16)], "outside of transfer tr-a"),
        ([(8, 0, 16), (24, 0, 1)], "outside of transfer tr-a"),
        ([(8, 0, 16 * 17)], "outside of transfer tr-a"),
        ([(2**32 - 1, 2**32 - 1, 2**32 - 1)], "outside of transfer tr-a"),
    ],
)
def test_blocks_outside_of_the_grant_are_refused_by_name_in_the_log(
    export: TcpExport,
    target: KVPool,
    opened: Opened,
    extents: list[tuple[int, int, int]],
    reason: str,
) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    with structlog.testing.capture_logs() as lines:
        sock.sendall(write_frame(greet(sock, export.handle().secret), token, extents))
        assert is_ended(sock)
        wait_until(lambda: export.num_streams == 0)
    refused = [line for line in lines if line["event"] == "data_frame_refused"]
    assert len(refused) == 1
    assert reason in refused[0]["reason"]
    assert is_untouched(target)


def test_a_recorded_frame_is_worth_nothing_on_another_stream_or_a_second_time(
    export: TcpExport, target: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    first = opened(export)
    frame = write_frame(greet(first, export.handle().secret), token, [(8, 0, 1)])
    first.sendall(frame + b"\x22" * PAGE)
    assert receive(first, RECEIPT_BYTES) == pack_receipt(0)
    target.buffer[:] = EMPTY * target.num_bytes
    first.sendall(frame + b"\x33" * PAGE)
    assert is_ended(first)
    second = opened(export)
    greet(second, export.handle().secret)
    second.sendall(frame + b"\x44" * PAGE)
    assert is_ended(second)
    assert is_untouched(target)


def test_a_token_is_worth_nothing_after_it_was_revoked(
    export: TcpExport, target: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    session = greet(sock, export.handle().secret)
    export.revoke(A)
    sock.sendall(write_frame(session, token, [(8, 0, 1)]) + b"\x22" * PAGE)
    assert is_ended(sock)
    assert is_untouched(target)


def test_whoever_does_not_know_the_pools_secret_is_not_heard(
    export: TcpExport, target: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    nonce = read_nonce(sock)
    sock.sendall(pack_hello(new_token()[:32], nonce, bytes(16)))
    sock.sendall(write_frame(nonce + bytes(16), token, [(8, 0, 1)]) + b"\x22" * PAGE)
    assert is_ended(sock)
    assert is_untouched(target)


def test_revoking_while_half_of_a_write_is_in_keeps_the_other_half_out(
    export: TcpExport, target: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    session = greet(sock, export.handle().secret)
    sock.sendall(write_frame(session, token, [(8, 0, 16 * 16)]) + b"\x22" * (8 * BLOCK))
    wait_until(lambda: target.buffer[8 * BLOCK] == 0x22)
    export.revoke(A)
    target.buffer[:] = EMPTY * target.num_bytes
    with suppress(ConnectionError):
        sock.sendall(b"\x22" * (8 * BLOCK))
    assert is_ended(sock)
    wait_until(lambda: export.num_streams == 0)
    assert is_untouched(target)


def test_a_peer_that_says_no_hello_is_dropped_and_disturbs_nobody(
    export: TcpExport, source: KVPool, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_greeting, "HELLO_SECONDS", 0.2)
    silent = [opened(export) for _ in range(10)]
    for sock in silent:
        sock.sendall(MAGIC)
    assert_works(export, source)
    assert all(is_ended(sock) for sock in silent)


def test_more_silent_peers_than_there_is_room_for_push_out_the_oldest(
    export: TcpExport, source: KVPool, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_greeting, "MAX_GREETED", 5)
    silent = [opened(export) for _ in range(12)]
    assert all(is_ended(sock) for sock in silent[:7])
    assert_works(export, source)


def test_a_peer_that_stops_within_a_frame_is_dropped_after_the_stall(
    export: TcpExport, target: KVPool, source: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    frame_lengths = (10, 60, 2000)
    for length in frame_lengths:
        sock = opened(export)
        session = greet(sock, export.handle().secret)
        sock.sendall((write_frame(session, token, [(8, 0, 1)]) + b"\x22" * PAGE)[:length])
        start = monotonic()
        assert is_ended(sock)
        assert monotonic() - start < 10
    export.revoke(A)
    assert_works(export, source)


def test_a_peer_that_is_quiet_between_frames_stays(export: TcpExport, opened: Opened) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    session = greet(sock, export.handle().secret)
    sock.settimeout(3 * STALL)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.settimeout(20)
    sock.sendall(write_frame(session, token, [(8, 0, 1)]) + b"\x22" * PAGE)
    assert receive(sock, RECEIPT_BYTES) == pack_receipt(0)


def test_a_peer_that_resets_within_a_frame_ends_its_stream_alone(
    export: TcpExport, source: KVPool, opened: Opened
) -> None:
    token = export.grant(A, GRANTED)
    sock = opened(export)
    session = greet(sock, export.handle().secret)
    sock.sendall(write_frame(session, token, [(8, 0, 16)]) + b"\x22" * PAGE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    wait_until(lambda: export.num_streams == 0)
    export.revoke(A)
    assert_works(export, source)


def test_closing_the_export_ends_streams_in_the_middle_of_a_frame(
    target: KVPool, opened: Opened
) -> None:
    export = TcpExport(target, 20.0)
    token = export.grant(A, GRANTED)
    sock = opened(export)
    session = greet(sock, export.handle().secret)
    sock.sendall(write_frame(session, token, [(8, 0, 16)]) + b"\x22" * PAGE)
    export.close()
    assert is_ended(sock)
    assert export.num_streams == 0


class Relay:
    """Passes bytes between peers until the link is cut: then it is silent, not closed."""

    def __init__(self, port: int, num_bytes: int) -> None:
        self._port = port
        self._left = num_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.port: int = self._listener.getsockname()[1]

    def _accept(self) -> None:
        try:
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass, args=pair))
                    self._threads[-1].start()
        except OSError:
            return

    def _pass(self, taken_from: socket.socket, given_to: socket.socket) -> None:
        try:
            while self._left > 0 and (data := taken_from.recv(16384)):
                self._left -= len(data)
                given_to.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._sockets:
            with suppress(OSError):  # the peer was first
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for sock in self._sockets:
            sock.close()


@pytest.mark.parametrize("num_streams", [1, 3])
def test_a_cut_link_is_an_error_on_both_sides_in_time(num_streams: int) -> None:
    large = [KVPool(16, 1024 * PAGE) for _ in range(2)]
    export = TcpExport(large[1], STALL)
    warm_bytes = num_streams * (1 << 20) + 100_000
    relay = Relay(export.port, warm_bytes + (8 << 20))
    handle = export.handle()
    link = TcpBackend(large[0], STALL, num_streams=num_streams).open_peer(
        replace(handle, port=relay.port)
    )
    token = export.grant(A, range(16))
    start = monotonic()
    with pytest.raises(TransferError, match=r"writing 67108864 bytes failed"):
        link.write(range(16), range(16), token)
    assert monotonic() - start < 20
    export.revoke(A)
    wait_until(lambda: export.num_streams == 0)
    link.close()
    relay.close()
    export.close()
    for pool in large:
        pool.close()
