import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RemoteProtocolError
from common.transfer.rdma_agent import MemoryKind, SourcePool
from common.transfer.rdma_reader import MAX_REQUEST_PIECES, REQUEST_BYTES, to_requests
from common.transfer.rdma_wire import (
    ANSWER_BYTES,
    DONE,
    HEADER_BYTES,
    JOIN,
    MAX_METADATA_BYTES,
    MAX_RUNS,
    MOVED,
    REFUSED,
    RUN_BYTES,
    WRITE,
    pack_answer,
    pack_frame,
    pack_runs,
    pack_source,
    parse_answer,
    parse_header,
    parse_runs,
    parse_source,
    payload_bytes,
)
from common.transfer.tcp_wire import GRANT_ID_BYTES, is_proven

GRANT = b"g" * GRANT_ID_BYTES
KEY = b"k" * 32
SESSION = b"s" * 32


@pytest.mark.parametrize("kind", MemoryKind)
@pytest.mark.parametrize("length", [1, MAX_METADATA_BYTES])
def test_a_join_carries_the_source_whole(kind: MemoryKind, length: int) -> None:
    source = SourcePool(kind, 3, 2**47, 2**31 - 1, b"m" * length)
    payload = pack_source(source)
    frame = pack_frame(JOIN, 0, payload, (GRANT, KEY), SESSION)
    header = parse_header(memoryview(frame), 0)
    assert payload_bytes(header) == len(payload)
    assert frame[HEADER_BYTES:] == payload
    assert is_proven(header.proof, KEY, SESSION, header.signed, payload)
    assert parse_source(payload) == source


def test_metadata_is_for_no_log() -> None:
    assert "secretive" not in repr(SourcePool(MemoryKind.GPU, 0, 1, 1, b"secretive"))


def test_runs_travel_as_they_are() -> None:
    runs = np.array([(0, 5, 2), (7, 1, 3)], dtype=np.int32)
    payload = pack_runs(runs)
    header = parse_header(memoryview(pack_frame(WRITE, 9, payload, (GRANT, KEY), SESSION)), 9)
    assert (payload_bytes(header), header.grant_id) == (2 * RUN_BYTES, GRANT)
    assert parse_runs(payload, 10, 7).tolist() == runs.tolist()


@pytest.mark.parametrize("run", [(0, 0, 0), (9, 0, 2), (0, 6, 2), (2**32 - 1, 0, 1), (0, 0, 2**31)])
def test_a_run_outside_of_either_pool_is_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="outside of the"):
        parse_runs(struct.pack("<III", *run), 10, 7)


@pytest.mark.parametrize(
    ("kind", "count", "sequence"),
    [(WRITE, 0, 0), (WRITE, MAX_RUNS + 1, 0), (JOIN, 16, 0), (JOIN, 2**16 - 1, 0), (7, 1, 0),
     (WRITE, 1, 4)],
)  # fmt: skip
def test_a_header_that_no_peer_of_ours_would_send_is_refused(
    kind: int, count: int, sequence: int
) -> None:
    head = struct.pack(f"<4sHHQ{GRANT_ID_BYTES}s", b"FPRD", kind, count, sequence, GRANT)
    with pytest.raises(RemoteProtocolError):
        parse_header(memoryview(head + bytes(16)), 0)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_no_bytes_break_the_parsing_of_a_header(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_header(memoryview(data), 0)


def test_memory_of_an_unknown_kind_is_refused() -> None:
    payload = pack_source(SourcePool(MemoryKind.HOST, 0, 1, 1, b"m"))
    with pytest.raises(RemoteProtocolError, match="kind 9"):
        parse_source(b"\x09" + payload[1:])


def test_an_answer_is_of_its_frame() -> None:
    for code in (DONE, MOVED, REFUSED):
        assert len(pack_answer(code, 3)) == ANSWER_BYTES
        assert parse_answer(pack_answer(code, 3), 3) == code
    for wrong in (pack_answer(DONE, 4), pack_answer(7, 3), bytes(ANSWER_BYTES)):
        with pytest.raises(RemoteProtocolError, match="no answer to frame 3"):
            parse_answer(wrong, 3)


@given(
    st.lists(
        st.one_of(st.integers(1, 2**20), st.integers(REQUEST_BYTES - 2, 3 * REQUEST_BYTES)),
        max_size=40,
    )
)
def test_requests_move_every_byte_once_and_none_is_too_long(lengths: list[int]) -> None:
    starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    pieces = [(at, at + 10**12, length) for at, length in zip(starts, lengths, strict=False)]
    requests = to_requests(pieces)
    assert all(sum(num for _, _, num in few) <= REQUEST_BYTES for few in requests)
    covered = 0
    for to, at, num_bytes in (piece for few in requests for piece in few):
        assert (to, at, num_bytes > 0) == (covered, covered + 10**12, True)
        covered += num_bytes
    assert covered == sum(lengths)


def test_a_request_has_not_too_many_pieces() -> None:
    pieces = [(at, at, 1) for at in range(2 * MAX_REQUEST_PIECES + 1)]
    assert [len(few) for few in to_requests(pieces)] == [MAX_REQUEST_PIECES] * 2 + [1]
