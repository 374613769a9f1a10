"""Revoked, stalled, dying and hostile peers: every wait ends and nothing is written afterwards."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic

import pytest
import structlog

from common.errors import TransferError
from common.ids import TransferId
from common.transfer import nccl_pace, nccl_receiver, tcp_grants
from common.transfer.backend import WriteReport
from common.transfer.nccl import NcclLink
from common.transfer.nccl_driver import SENDER, UNIQUE_ID_BYTES, Communicator
from common.transfer.nccl_wire import (
    ANSWER_BYTES,
    DONE,
    GO,
    JOIN,
    PROBE,
    WRITE,
    pack_answer,
    pack_frame,
)
from common.transfer.tcp_wire import GRANT_ID_BYTES, NO_GRANT, new_secret
from tests.support.data_stream import greet, is_ended, receive, wait_until
from tests.support.fake_nccl import FakeFabric
from tests.support.nccl_workers import NcclWorker, nccl_worker

BLOCK = 4 * 4096
NUM_BLOCKS = 64
STALL = 1.0
"""Seconds: longer than a busy machine leaves a process alone."""
A, B = TransferId("tr-a"), TransferId("tr-b")
GRANTED = range(8, 24)


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    fabric = FakeFabric()
    yield fabric
    assert fabric.num_open == 0, "a communicator was not ended"


@pytest.fixture
def target(fabric: FakeFabric) -> Iterator[NcclWorker]:
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as worker:
        yield worker


@pytest.fixture
def link(fabric: FakeFabric, target: NcclWorker) -> Iterator[NcclLink]:
    """A link that gives up soon, already joined."""
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK, stall_seconds=STALL) as source:
        source.fill(1)
        link = source.link_to(target)
        token = target.export.grant(B, [63])
        link.write([0], [63], token)
        target.export.revoke(B)
        target.empty()
        yield link
        link.close()


@pytest.fixture
def patient_link(fabric: FakeFabric, target: NcclWorker) -> Iterator[NcclLink]:
    """A link that would wait for longer than a test may take."""
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as source:
        source.fill(1)
        link = source.link_to(target)
        yield link
        link.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as thread:
        yield thread


SCATTERED = list(range(8, 24, 2))
"""Eight runs, so that a write can stop within."""


def begin_write(
    thread: ThreadPoolExecutor, link: NcclLink, target: NcclWorker
) -> Future[WriteReport]:
    token = target.export.grant(A, GRANTED)
    return thread.submit(link.write, range(8), SCATTERED, token)


def assert_writes_again(link: NcclLink, target: NcclWorker) -> None:
    """The next write is as good as any."""
    token = target.export.grant(B, [40, 41])
    assert link.write([3, 4], [40, 41], token).num_bytes == 2 * BLOCK
    target.export.revoke(B)


# ---- revoking ------------------------------------------------------------------------------------


def test_nothing_is_received_any_more_once_a_transfer_is_revoked(
    patient_link: NcclLink, target: NcclWorker, fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    fabric.hold(3)
    writing = begin_write(thread, patient_link, target)
    fabric.wait_until_moved(3)
    target.export.revoke(A)
    target.empty()
    fabric.resume()
    with pytest.raises(TransferError, match="the peer closed it"):
        writing.result(20)
    assert target.is_empty()
    assert_writes_again(patient_link, target)
    assert fabric.num_joined == 2


def test_a_transfer_that_ends_while_it_is_revoked_leaves_the_workers_joined(
    patient_link: NcclLink,
    target: NcclWorker,
    fabric: FakeFabric,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_receiver, "GRACE_SECONDS", 20.0)
    fabric.hold(3)
    writing = begin_write(thread, patient_link, target)
    fabric.wait_until_moved(3)
    revoking = thread.submit(target.export.revoke, A)
    wait_until(lambda: target.export._grants.num_open == 0)
    assert not revoking.done()
    fabric.resume()
    revoking.result(20)
    assert writing.result(20).num_blocks == 8
    target.empty()
    assert_writes_again(patient_link, target)
    assert fabric.num_joined == 1


def test_a_device_that_goes_on_after_an_abort_keeps_its_blocks_fenced_off(
    link: NcclLink,
    target: NcclWorker,
    fabric: FakeFabric,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_pace, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(nccl_receiver, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(tcp_grants, "FENCE_SECONDS", 0.2)
    fabric.hold(3)
    fabric.can_settle = False
    writing = begin_write(thread, link, target)
    fabric.wait_until_moved(3)
    with pytest.raises(TransferError, match="still write for transfer tr-a"):
        target.export.revoke(A)
    with pytest.raises(TransferError):
        writing.result(20)
    with pytest.raises(TransferError, match="still write for transfer tr-a"):
        target.export.revoke(A)


# ---- stalls and deaths ---------------------------------------------------------------------------


def test_a_transfer_that_does_not_move_is_given_up_by_the_sender(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    fabric.hold(3)
    start = monotonic()
    with pytest.raises(TransferError, match=f"nothing moved for {STALL:.1f} s"):
        begin_write(thread, link, target).result(20)
    assert monotonic() - start < 10
    target.export.revoke(A)
    fabric.resume()
    target.empty()
    assert_writes_again(link, target)


def test_a_transfer_that_does_not_move_is_given_up_by_the_receiver(
    fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    with (
        nccl_worker(fabric, NUM_BLOCKS, BLOCK, stall_seconds=STALL) as target,
        nccl_worker(fabric, NUM_BLOCKS, BLOCK) as source,
    ):
        link = source.link_to(target)
        fabric.hold(3)
        with structlog.testing.capture_logs() as lines:
            with pytest.raises(TransferError, match="the peer closed it"):
                begin_write(thread, link, target).result(20)
            wait_until(lambda: target.export.num_streams == 0)
        reasons = [line["reason"] for line in lines if line["event"] == "data_stream_ended"]
        assert reasons == [f"transfer tr-a: nothing moved for {STALL:.1f} s"]
        link.close()


def test_a_peer_that_is_never_seen_to_join_is_given_up(
    fabric: FakeFabric, target: NcclWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.transfer.nccl_connection.JOIN_SECONDS", 0.1)
    fabric.can_join = False
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as source:
        link = source.link_to(target)
        with pytest.raises(TransferError, match=r"cannot join the peer: nothing moved for 0\.1 s"):
            link.write([0], [8], target.export.grant(A, GRANTED))
        wait_until(lambda: fabric.num_open == 0)
        fabric.can_join = True
        assert_writes_again(link, target)
        link.close()


def test_the_end_of_the_receiver_is_noticed_at_once(
    patient_link: NcclLink, target: NcclWorker, fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    fabric.hold(3)
    writing = begin_write(thread, patient_link, target)
    fabric.wait_until_moved(3)
    start = monotonic()
    target.export.close()
    with pytest.raises(TransferError, match="the peer closed it"):
        writing.result(20)
    assert monotonic() - start < 10


@pytest.mark.parametrize("call", ["join", "send", "receive"])
def test_a_failure_of_nccl_is_an_error_on_both_sides_and_no_more(
    patient_link: NcclLink, target: NcclWorker, fabric: FakeFabric, call: str
) -> None:
    token = target.export.grant(A, GRANTED)
    fabric.failing = call
    with pytest.raises(TransferError, match=r"NCCL: unhandled system error|the peer closed it"):
        patient_link.write(range(8), range(8, 16), token)
    wait_until(lambda: fabric.num_open == 0)
    target.export.revoke(A)
    assert_writes_again(patient_link, target)


def test_a_write_finds_out_that_the_peer_has_ended_the_connection_meanwhile(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    for stream in list(target.export._server._streams):
        stream.cut()
    wait_until(lambda: target.export.num_streams == 0)
    assert_writes_again(link, target)
    assert fabric.num_joined == 2


# ---- hostile and dying senders -------------------------------------------------------------------


class RawSender:
    """A prefill side that says what it is told to."""

    def __init__(self, target: NcclWorker, fabric: FakeFabric) -> None:
        handle = target.export.handle()
        self.secret = handle.secret
        self._driver = target.driver
        self._fabric = fabric
        self._sequence = 0
        self.sock = socket.create_connection((handle.host, handle.port), timeout=20)
        self._session = greet(self.sock, handle.secret)

    def say(self, kind: int, payload: bytes, key: tuple[bytes, bytes]) -> int:
        frame = pack_frame(kind, self._sequence, payload, key, self._session)
        self._sequence += 1
        self.sock.sendall(frame)
        return self._sequence - 1

    def hears(self, code: int, sequence: int) -> bool:
        return receive(self.sock, ANSWER_BYTES) == pack_answer(code, sequence)

    def join(self) -> Communicator:
        unique_id = self._fabric.new_unique_id()
        sequence = self.say(JOIN, unique_id, (NO_GRANT, self.secret))
        assert self.hears(GO, sequence)
        communicator = self._driver.join(unique_id, SENDER)
        wait_until(communicator.is_ready)
        assert self.hears(DONE, sequence)
        return communicator

    def write(self, token: bytes, *extents: tuple[int, int, int]) -> int:
        key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
        return self.say(WRITE, pack(*extents), key)


def pack(*extents: tuple[int, int, int]) -> bytes:
    return b"".join(number.to_bytes(4, "little") for extent in extents for number in extent)


@pytest.fixture
def sender(target: NcclWorker, fabric: FakeFabric) -> Iterator[RawSender]:
    sender = RawSender(target, fabric)
    yield sender
    sender.sock.close()


def test_a_sender_that_dies_within_a_transfer_leaves_nothing_behind(
    sender: RawSender, target: NcclWorker, fabric: FakeFabric
) -> None:
    communicator = sender.join()
    token = target.export.grant(A, GRANTED)
    sequence = sender.write(token, (8, 0, 4))
    assert sender.hears(GO, sequence)
    sender.sock.close()
    wait_until(lambda: target.export.num_streams == 0)
    communicator.abort()
    target.export.revoke(A)
    assert target.is_empty()


def test_a_sender_that_speaks_within_a_transfer_is_dropped(
    sender: RawSender, target: NcclWorker
) -> None:
    communicator = sender.join()
    token = target.export.grant(A, GRANTED)
    sequence = sender.write(token, (8, 0, 4))
    assert sender.hears(GO, sequence)
    sender.write(token, (9, 0, 4))
    assert is_ended(sender.sock)
    communicator.abort()
    assert target.is_empty()


def test_who_has_not_joined_cannot_write_or_probe(
    target: NcclWorker, fabric: FakeFabric, sender: RawSender
) -> None:
    sender.write(target.export.grant(A, GRANTED), (8, 0, 4))
    assert is_ended(sender.sock)
    other = RawSender(target, fabric)
    other.say(PROBE, pack((0, 0, 4)), (NO_GRANT, other.secret))
    assert is_ended(other.sock)
    other.sock.close()
    target.export.revoke(A)
    assert all(scratch.is_freed for scratch in target.driver.scratches)


def test_nobody_joins_twice_on_a_stream(sender: RawSender, target: NcclWorker) -> None:
    communicator = sender.join()
    sender.say(JOIN, bytes(UNIQUE_ID_BYTES), (NO_GRANT, sender.secret))
    assert is_ended(sender.sock)
    communicator.abort()


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        (JOIN, bytes(UNIQUE_ID_BYTES), "without proof"),
        (PROBE, pack((0, 0, 4)), "without proof"),
    ],
)
def test_a_frame_whose_proof_is_wrong_ends_the_stream(
    sender: RawSender, target: NcclWorker, kind: int, payload: bytes, reason: str
) -> None:
    with structlog.testing.capture_logs() as lines:
        sender.say(kind, payload, (NO_GRANT, new_secret()))
        assert is_ended(sender.sock)
        wait_until(lambda: target.export.num_streams == 0)
    refused = [line for line in lines if line["event"] == "data_frame_refused"]
    assert len(refused) == 1
    assert reason in refused[0]["reason"]


def test_a_probe_of_too_many_bytes_ends_the_stream(sender: RawSender, target: NcclWorker) -> None:
    communicator = sender.join()
    sender.say(PROBE, pack((0, 0, 4), (0, 0, 2**31)), (NO_GRANT, sender.secret))
    assert is_ended(sender.sock)
    communicator.abort()
    assert target.driver.scratches == []


def test_random_bytes_end_the_stream_alone(
    sender: RawSender, link: NcclLink, target: NcclWorker
) -> None:
    sender.sock.sendall(b"\x55" * 4096)
    assert is_ended(sender.sock)
    assert_writes_again(link, target)
