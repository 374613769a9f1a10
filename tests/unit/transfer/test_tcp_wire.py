import numpy as np
import pytest

from common.errors import RemoteProtocolError
from common.transfer import tcp_wire as wire

SECRET = bytes(range(32))
GRANT = (b"g" * 16, b"k" * 32)
SESSION = b"s" * 32


def frame(kind: int = wire.WRITE, sequence: int = 7, rows: int = 2) -> bytes:
    extents = np.array([(i, 0, 1) for i in range(rows)], dtype=np.uint32)
    return wire.pack_frame(kind, sequence, extents, GRANT, SESSION)


def test_a_frame_is_read_as_it_was_written() -> None:
    extents = np.array([(3, 5, 9), (2**31, 0, 2**32 - 1)], dtype=np.uint32)
    data = memoryview(wire.pack_frame(wire.WRITE, 7, extents, GRANT, SESSION))
    header = wire.parse_header(data[: wire.HEADER_BYTES], 7)
    rows = data[wire.HEADER_BYTES :]
    assert (header.kind, header.num_extents, header.grant_id) == (wire.WRITE, 2, GRANT[0])
    assert header.extents_bytes == len(rows)
    assert wire.parse_extents(rows).tolist() == extents.tolist()
    assert wire.is_proven(header.proof, GRANT[1], SESSION, header.signed, bytes(rows))


def test_every_changed_byte_of_a_frame_is_noticed() -> None:
    good = frame()
    for place in range(len(good)):
        data = bytearray(good)
        data[place] ^= 1
        view = memoryview(data)
        try:
            header = wire.parse_header(view[: wire.HEADER_BYTES], 7)
        except RemoteProtocolError:
            continue
        rows = bytes(view[wire.HEADER_BYTES :])
        is_same_grant = header.grant_id == GRANT[0]
        is_proven = wire.is_proven(header.proof, GRANT[1], SESSION, header.signed, rows)
        assert not (is_same_grant and is_proven), f"byte {place} changed unnoticed"


@pytest.mark.parametrize("session", [b"t" * 32, b"s" * 31 + b"t"])
def test_a_frame_proves_nothing_in_another_session(session: bytes) -> None:
    view = memoryview(frame())
    header = wire.parse_header(view[: wire.HEADER_BYTES], 7)
    rows = bytes(view[wire.HEADER_BYTES :])
    assert not wire.is_proven(header.proof, GRANT[1], session, header.signed, rows)


@pytest.mark.parametrize(
    ("data", "sequence", "message"),
    [
        (b"\0" * 4 + frame()[4:], 7, "no frame"),
        (frame(kind=3), 7, "no frame"),
        (frame(sequence=6), 7, "frame 6 where 7 is due"),
        (frame(rows=0), 7, "a frame of 0 extents"),
        (frame(rows=wire.MAX_EXTENTS + 1), 7, "a frame of 513 extents"),
        (frame(kind=wire.PROBE, rows=2), 7, "a frame of 2 extents"),
    ],
)
def test_a_header_that_no_peer_sends_is_refused(data: bytes, sequence: int, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        wire.parse_header(memoryview(data)[: wire.HEADER_BYTES], sequence)


def test_both_sides_prove_themselves_and_neither_shows_the_secret() -> None:
    challenge = wire.pack_challenge(b"a" * 16)
    hello = wire.pack_hello(SECRET, wire.parse_challenge(challenge), b"b" * 16)
    assert (len(challenge), len(hello)) == (wire.CHALLENGE_BYTES, wire.HELLO_BYTES)
    assert wire.parse_hello(SECRET, b"a" * 16, hello) == b"b" * 16
    welcome = wire.pack_welcome(SECRET, b"a" * 16, b"b" * 16)
    assert len(welcome) == wire.WELCOME_BYTES
    assert SECRET[:8] not in challenge + hello + welcome


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (wire.pack_hello(SECRET[::-1], b"a" * 16, b"b" * 16), "does not know the pool's secret"),
        (wire.pack_hello(SECRET, b"c" * 16, b"b" * 16), "does not know the pool's secret"),
        (b"HTTP" + bytes(wire.HELLO_BYTES - 4), "does not speak the data protocol"),
        (b"FPKV\x63\0" + bytes(wire.HELLO_BYTES - 6), "version 99 .*, not 1"),
    ],
)
def test_a_wrong_hello_is_refused(hello: bytes, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        wire.parse_hello(SECRET, b"a" * 16, hello)


def test_only_the_receipt_that_is_due_counts() -> None:
    wire.check_receipt(wire.pack_receipt(4), 4)
    with pytest.raises(RemoteProtocolError, match="no receipt for frame 5"):
        wire.check_receipt(wire.pack_receipt(4), 5)
