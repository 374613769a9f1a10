import threading
from collections.abc import Sequence

import numpy as np
import pytest

from common.errors import LocalProtocolError, RemoteProtocolError, TransferError
from common.ids import TransferId
from common.transfer import tcp_grants
from common.transfer.tcp_grants import Session, WriteGrants
from common.transfer.tcp_wire import (
    GRANT_ID_BYTES,
    HEADER_BYTES,
    WRITE,
    new_token,
    pack_frame,
    parse_extents,
    parse_header,
)

NONCES = b"n" * 32
PAGES = 4
BLOCK = PAGES * 4096
A, B = TransferId("tr-a"), TransferId("tr-b")
DEADLINE = 10.0


class Stream:
    """A writer that notes that it was cut."""

    def __init__(self) -> None:
        self.is_cut = threading.Event()

    def cut(self) -> None:
        self.is_cut.set()


def enter(
    grants: WriteGrants, token: bytes, extents: Sequence[tuple[int, int, int]], stream: Stream
) -> TransferId:
    array = np.array(extents, dtype=np.uint32)
    key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
    frame = memoryview(pack_frame(WRITE, 0, array, key, NONCES))
    header = parse_header(frame[:HEADER_BYTES], 0)
    rows = bytes(frame[HEADER_BYTES:])
    return grants.enter(header, rows, parse_extents(memoryview(rows)), Session(stream, NONCES))


@pytest.fixture
def grants() -> WriteGrants:
    return WriteGrants(32, BLOCK)


@pytest.mark.parametrize(
    "extent", [(4, 0, 1), (4, 3, 1), (4, 0, 3 * PAGES), (5, 2, PAGES), (6, 3, 1), (9, 0, PAGES)]
)
def test_granted_blocks_may_be_written_in_part_and_across(
    grants: WriteGrants, extent: tuple[int, int, int]
) -> None:
    token = grants.grant(A, [9, 4, 6, 5])
    assert enter(grants, token, [(4, 0, 1), extent], Stream()) == A


@pytest.mark.parametrize(
    "extent",
    [
        (3, 0, 1),
        (3, 3, 2),
        (6, 3, 2),
        (4, 0, 3 * PAGES + 1),
        (9, 0, PAGES + 1),
        (10, 0, 1),
        (4, PAGES, 1),
        (4, 0, 0),
        (4, 0, 2**32 - 1),
        (2**32 - 1, 2**32 - 1, 2**32 - 1),
    ],
)
def test_a_page_outside_of_the_grant_is_refused_and_nobody_enters(
    grants: WriteGrants, extent: tuple[int, int, int]
) -> None:
    token = grants.grant(A, [9, 4, 6, 5])
    stream = Stream()
    with pytest.raises(RemoteProtocolError, match="outside of transfer tr-a"):
        enter(grants, token, [(4, 0, 1), extent], stream)
    grants.revoke(A)
    assert not stream.is_cut.is_set()


def test_one_transfers_token_opens_no_other_transfers_blocks(grants: WriteGrants) -> None:
    token, other = grants.grant(A, [1]), grants.grant(B, [2])
    with pytest.raises(RemoteProtocolError, match="outside of transfer tr-a"):
        enter(grants, token, [(2, 0, 1)], Stream())
    mixed = other[:GRANT_ID_BYTES] + token[GRANT_ID_BYTES:]
    with pytest.raises(RemoteProtocolError, match="token is wrong"):
        enter(grants, mixed, [(2, 0, 1)], Stream())


def test_a_made_up_or_revoked_token_opens_nothing(grants: WriteGrants) -> None:
    token = grants.grant(A, [1])
    grants.revoke(A)
    for useless in (token, new_token()):
        with pytest.raises(RemoteProtocolError, match="without a grant"):
            enter(grants, useless, [(1, 0, 1)], Stream())
    assert grants.num_open == 0


def test_revoking_cuts_the_streams_inside_and_waits_until_they_left(grants: WriteGrants) -> None:
    token = grants.grant(A, [1, 2])
    inside, outside = Stream(), Stream()
    enter(grants, token, [(1, 0, 1)], inside)
    enter(grants, token, [(2, 0, 1)], outside)
    grants.leave(A, outside)
    left: list[bool] = []

    def leave_when_cut() -> None:
        left.append(inside.is_cut.wait(DEADLINE))
        grants.leave(A, inside)

    thread = threading.Thread(target=leave_when_cut)
    thread.start()
    grants.revoke(A)
    assert left == [True], "revoke returned while a stream was inside"
    assert not outside.is_cut.is_set()
    thread.join()


def test_a_stream_that_does_not_leave_makes_revoking_fail_until_it_does(
    grants: WriteGrants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_grants, "FENCE_SECONDS", 0.01)
    token = grants.grant(A, [1])
    stuck = Stream()
    enter(grants, token, [(1, 0, 1)], stuck)
    with pytest.raises(TransferError, match="1 streams still write for transfer tr-a"):
        grants.revoke(A)
    with pytest.raises(RemoteProtocolError, match="without a grant"):
        enter(grants, token, [(1, 0, 1)], Stream())
    grants.leave(A, stuck)
    grants.revoke(A)
    assert grants.grant(A, [1]) != token


def test_a_revoked_transfer_can_be_granted_again_to_the_same_holder(grants: WriteGrants) -> None:
    token = grants.grant(A, [1])
    grants.revoke(A)
    assert grants.grant(A, [1], token) == token
    assert enter(grants, token, [(1, 0, 1)], Stream()) == A


def test_revoking_what_was_never_granted_does_nothing(grants: WriteGrants) -> None:
    grants.revoke(A)


@pytest.mark.parametrize("blocks", [[0, 32], [-1, 3], [2**40]])
def test_blocks_that_are_not_the_pools_cannot_be_granted(
    grants: WriteGrants, blocks: list[int]
) -> None:
    with pytest.raises(LocalProtocolError, match="of 32"):
        grants.grant(A, blocks)
    assert grants.num_open == 0


def test_granting_twice_or_with_half_a_token_is_our_own_fault(grants: WriteGrants) -> None:
    grants.grant(A, [])
    with pytest.raises(LocalProtocolError, match="has a grant already"):
        grants.grant(A, [1])
    with pytest.raises(LocalProtocolError, match="a token of 3 bytes"):
        grants.grant(B, [1], b"abc")
