"""The stream between rank 0 and another rank."""

import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from common.engine.batch import flatten
from common.engine.parallel.messages import (
    ComputeStep,
    Join,
    MakePool,
    Order,
    RankFailed,
    Report,
    StepDone,
)
from common.engine.parallel.wire import Ended, Wire, pack_arrays, unpack_arrays
from common.errors import RemoteProtocolError
from common.messages.codec import Codec
from tests.support.engine_runs import row

Lead = Wire[Order, Report]
Rank = Wire[Report, Order]


@pytest.fixture
def wires() -> Iterator[tuple[Lead, Rank, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        theirs.settimeout(5)
        lead: Lead = Wire(ours, Codec(Order), Codec(Report), "rank-0")
        rank: Rank = Wire(theirs, Codec(Report), Codec(Order), "rank")
        yield lead, rank, ours


def test_orders_and_reports_arrive_in_order(wires: tuple[Lead, Rank, socket.socket]) -> None:
    lead, rank, _ = wires
    lead.send(MakePool(num_blocks=7))
    lead.send(Join())
    assert [rank.receive()[0] for _ in range(2)] == [MakePool(num_blocks=7), Join()]
    rank.send(StepDone(number=3))
    rank.send(RankFailed(reason="no room"))
    assert [lead.receive()[0] for _ in range(2)] == [
        StepDone(number=3),
        RankFailed(reason="no room"),
    ]


def test_a_batch_arrives_whole(wires: tuple[Lead, Rank, socket.socket]) -> None:
    lead, rank, _ = wires
    rows = [
        row([5], 30, [3, 1]),
        row(list(range(3, 23)), 0, [2, 9]),
        row([7, 8], 0, [4], params=None),
    ]
    batch = flatten(rows, 16, 97)
    specs, payload = pack_arrays(batch.arrays())
    lead.send(ComputeStep(number=0, arrays=specs), payload)
    order, received = rank.receive()
    assert isinstance(order, ComputeStep)
    arrays = [array for array in unpack_arrays(order.arrays, received) if array is not None]
    again = type(batch).of_arrays(arrays)
    for mine, theirs in zip(batch.arrays(), again.arrays(), strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert again.sampled_rows == batch.sampled_rows
    again.token_ids[0] = 1  # it may be written


def test_missing_and_empty_arrays_stay_so() -> None:
    arrays = [np.arange(3, dtype=np.int32), None, np.empty((0, 3), np.int32), np.arange(2)]
    found = unpack_arrays(pack_arrays(arrays)[0], memoryview(bytearray(pack_arrays(arrays)[1])))
    assert found[1] is None
    for index in (0, 2, 3):
        mine, theirs = arrays[index], found[index]
        assert mine is not None
        assert theirs is not None
        assert mine.shape == theirs.shape
        np.testing.assert_array_equal(mine, theirs)


def test_a_payload_that_is_too_short_is_refused() -> None:
    specs, payload = pack_arrays([np.arange(9)])
    with pytest.raises(RemoteProtocolError, match="fewer than a step's arrays"):
        unpack_arrays(specs, memoryview(bytearray(payload[:-1])))


def test_an_end_is_told_even_within_a_message(wires: tuple[Lead, Rank, socket.socket]) -> None:
    _, rank, stream = wires
    stream.sendall(struct.pack("<IQ", 1, 100) + b"half")
    stream.close()
    with pytest.raises(Ended):
        rank.receive()


@pytest.mark.parametrize("head", [struct.pack("<I", 0), struct.pack("<I", 2**31)])
def test_what_is_no_message_is_refused(
    wires: tuple[Lead, Rank, socket.socket], head: bytes
) -> None:
    _, rank, stream = wires
    stream.sendall(head)
    with pytest.raises(RemoteProtocolError, match="frames; 1 to"):
        rank.receive()
    stream.sendall(struct.pack("<IQ", 1, 2**40))
    with pytest.raises(RemoteProtocolError, match="at most"):
        rank.receive()
