"""Frames, answers and groups of transport nccl."""

import numpy as np
import pytest

from common.errors import RemoteProtocolError
from common.transfer.nccl_driver import UNIQUE_ID_BYTES
from common.transfer.nccl_wire import (
    DONE,
    GO,
    GROUP_BYTES,
    HEADER_BYTES,
    JOIN,
    MAX_EXTENTS,
    MAX_GROUP_PIECES,
    MAX_PIECE_BYTES,
    MAX_PROBES,
    PROBE,
    REFUSED,
    WRITE,
    pack_answer,
    pack_frame,
    parse_answer,
    parse_header,
    payload_bytes,
    to_groups,
)
from common.transfer.tcp_wire import is_proven, parse_extents

TOKEN = (b"g" * 16, b"k" * 32)
SESSION = b"s" * 32
EXTENTS = np.array([(3, 0, 16), (9, 0, 32)], dtype=np.uint32)


def frame(kind: int = WRITE, sequence: int = 7, payload: bytes = EXTENTS.tobytes()) -> bytes:
    return pack_frame(kind, sequence, payload, TOKEN, SESSION)


def test_a_write_says_its_extents_and_proves_them() -> None:
    data = frame()
    header = parse_header(memoryview(data), 7)
    payload = data[HEADER_BYTES:]
    assert (header.kind, header.grant_id, payload_bytes(header)) == (WRITE, TOKEN[0], len(payload))
    assert parse_extents(memoryview(payload)).tolist() == EXTENTS.tolist()
    assert is_proven(header.proof, TOKEN[1], SESSION, header.signed, payload)
    assert not is_proven(header.proof, TOKEN[1], SESSION, header.signed, payload[::-1])
    assert not is_proven(header.proof, TOKEN[1], b"t" * 32, header.signed, payload)


def test_a_join_carries_a_unique_id() -> None:
    data = frame(JOIN, 0, b"u" * UNIQUE_ID_BYTES)
    header = parse_header(memoryview(data), 0)
    assert payload_bytes(header) == len(data) - HEADER_BYTES == UNIQUE_ID_BYTES


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"FPKV" + frame()[4:], "no frame"),
        (frame(kind=9), "no frame"),
        (frame(sequence=8), "frame 8 where 7 is due"),
        (frame(payload=b""), "0 extents"),
        (frame(payload=bytes(12 * (MAX_EXTENTS + 1))), f"{MAX_EXTENTS + 1} extents"),
        (frame(PROBE, payload=bytes(12 * (MAX_PROBES + 1))), f"{MAX_PROBES + 1} extents"),
    ],
)
def test_a_frame_that_no_peer_of_ours_sends_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        parse_header(memoryview(data), 7)


@pytest.mark.parametrize("code", [GO, DONE, REFUSED])
def test_an_answer_is_to_one_frame(code: int) -> None:
    assert parse_answer(pack_answer(code, 5), 5) == code
    with pytest.raises(RemoteProtocolError, match="no answer to frame 6"):
        parse_answer(pack_answer(code, 5), 6)


def test_an_answer_of_another_kind_is_none() -> None:
    for data in (pack_answer(4, 5), pack_answer(0, 5), b"FPKV" + pack_answer(GO, 5)[4:]):
        with pytest.raises(RemoteProtocolError, match="no answer to frame 5"):
            parse_answer(data, 5)


def test_large_pieces_go_alone_and_small_ones_together() -> None:
    small = GROUP_BYTES // 4
    pieces = [(0, 3 * GROUP_BYTES), (10**12, small), (2 * 10**12, small), (3 * 10**12, small)]
    assert to_groups(pieces) == [[pieces[0]], pieces[1:]]
    many = [(number * 8192, 4096) for number in range(2 * MAX_GROUP_PIECES + 1)]
    assert [len(group) for group in to_groups(many)] == [MAX_GROUP_PIECES, MAX_GROUP_PIECES, 1]
    assert to_groups([]) == []


def test_a_piece_is_never_longer_than_what_shows_progress() -> None:
    length = 2 * MAX_PIECE_BYTES + 4096
    assert to_groups([(64, length)]) == [
        [(64, MAX_PIECE_BYTES)],
        [(64 + MAX_PIECE_BYTES, MAX_PIECE_BYTES)],
        [(64 + 2 * MAX_PIECE_BYTES, 4096)],
    ]


def test_both_sides_cut_the_same_way() -> None:
    lengths = [4096 * (1 + number * number % 9000) for number in range(700)]
    here = to_groups([(number * 10**9, length) for number, length in enumerate(lengths)])
    there = to_groups([((700 - number) * 10**9, length) for number, length in enumerate(lengths)])
    assert [[n for _, n in group] for group in here] == [[n for _, n in group] for group in there]
    assert sum(n for group in here for _, n in group) == sum(lengths)
