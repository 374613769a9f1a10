"""Revoked, stuck, failing, silent and hostile peers: every wait ends, late bytes find nobody."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import structlog

from common.errors import ConfigError, TransferError
from common.ids import TransferId
from common.transfer import rdma_reader, rdma_shared, tcp_grants
from common.transfer.backend import WriteReport
from common.transfer.rdma import RdmaLink
from common.transfer.rdma_agent import MemoryKind, SourcePool
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_wire import (
    ANSWER_BYTES,
    DONE,
    JOIN,
    MOVED,
    PROBE,
    REFUSED,
    WRITE,
    pack_answer,
    pack_frame,
    pack_runs,
    pack_source,
)
from common.transfer.tcp_wire import GRANT_ID_BYTES, NO_GRANT, new_secret
from tests.support.data_stream import greet, is_ended, receive, wait_until
from tests.support.fake_rdma import FakeFabric, RdmaWorker, fake_worker

BLOCK = 4 * 4096
NUM_BLOCKS = 64
STALL = 1.0
"""Seconds: longer than a busy machine leaves a process alone."""
A, B, C = TransferId("tr-a"), TransferId("tr-b"), TransferId("tr-c")
TARGETS = list(range(8, 24, 2))
"""Eight runs, so that a write can stop within."""


@pytest.fixture(autouse=True)
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run for each request, and little patience with those that are stuck."""
    monkeypatch.setattr(rdma_reader, "MAX_REQUEST_PIECES", 1)
    monkeypatch.setattr(rdma_reader, "SETTLE_SECONDS", 0.1)
    monkeypatch.setattr(rdma_shared, "SPARE_SECONDS", 0.1)


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture
def target(fabric: FakeFabric) -> Iterator[RdmaWorker]:
    with fake_worker(fabric, NUM_BLOCKS, BLOCK) as worker:
        yield worker


@pytest.fixture
def source(fabric: FakeFabric) -> Iterator[RdmaWorker]:
    with fake_worker(fabric, NUM_BLOCKS, BLOCK) as worker:
        worker.fill(1)
        yield worker


@pytest.fixture
def stream(target: RdmaWorker) -> Iterator[tuple[socket.socket, bytes]]:
    """A stream that has greeted, and its session."""
    handle = target.export.handle()
    with socket.create_connection((handle.host, handle.port), timeout=20) as sock:
        yield sock, greet(sock, handle.secret)


@pytest.fixture
def link(source: RdmaWorker, target: RdmaWorker) -> Iterator[RdmaLink]:
    link = source.link_to(target)
    yield link
    link.close()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as thread:
        yield thread


def begin_write(
    thread: ThreadPoolExecutor, link: RdmaLink, target: RdmaWorker
) -> Future[WriteReport]:
    token = target.export.grant(A, TARGETS)
    return thread.submit(link.write, range(8), TARGETS, token)


def assert_writes_again(link: RdmaLink, target: RdmaWorker) -> None:
    """The next write is as good as any."""
    token = target.export.grant(B, [40, 41])
    assert link.write([3, 4], [40, 41], token).num_bytes == 2 * BLOCK
    target.export.revoke(B)


# ---- revoking ------------------------------------------------------------------------------------


def test_no_late_byte_reaches_the_blocks_of_a_revoked_transfer(
    link: RdmaLink, target: RdmaWorker, fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    fabric.hold(3)
    writing = begin_write(thread, link, target)
    fabric.wait_until_moved(3)
    target.export.revoke(A)
    target.empty()
    fabric.resume()
    with pytest.raises(TransferError, match="the peer closed it"):
        writing.result(20)
    assert target.is_empty()
    assert_writes_again(link, target)
    assert fabric.num_agents == 4, "a stuck read takes the agent with it"


def test_what_ends_by_itself_while_it_is_revoked_leaves_the_agent(
    link: RdmaLink,
    target: RdmaWorker,
    fabric: FakeFabric,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdma_reader, "SETTLE_SECONDS", 20.0)
    fabric.hold(3)
    writing = begin_write(thread, link, target)
    fabric.wait_until_moved(3)
    revoking = thread.submit(target.export.revoke, A)
    wait_until(lambda: target.export._side.grants.num_open == 0)
    fabric.resume()
    revoking.result(20)
    with pytest.raises(TransferError, match="the peer closed it"):
        writing.result(20)
    assert fabric.num_moved < 8, "nothing was begun after the revocation"
    assert fabric.num_under_way == 0
    assert_writes_again(link, target)
    assert fabric.num_agents == 3


def test_a_stuck_peer_costs_no_other_peer_its_transfer(
    link: RdmaLink,
    target: RdmaWorker,
    fabric: FakeFabric,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdma_shared, "SPARE_SECONDS", 20.0)
    with fake_worker(fabric, NUM_BLOCKS, BLOCK) as other:
        other_link = other.link_to(target)
        assert_writes_again(other_link, target)
        fabric.hold(1)
        writing = begin_write(thread, link, target)
        fabric.wait_until_moved(2)
        slow = thread.submit(other_link.write, [0], [50], target.export.grant(C, [50]))
        wait_until(lambda: fabric.num_under_way == 5)
        with ThreadPoolExecutor(1) as revoker, structlog.testing.capture_logs() as logs:
            revoking = revoker.submit(target.export.revoke, A)
            wait_until(lambda: any(line["event"] == "rdma_agent_ended" for line in logs))
            assert not revoking.done()
            fabric.hold(1)
            assert slow.result(20).num_blocks == 1
            revoking.result(20)
        with pytest.raises(TransferError, match="the peer closed it"):
            writing.result(20)
        fabric.resume()
        assert_writes_again(other_link, target)
        assert target.export.num_streams == 1, "the other peer's stream is the same"
        other_link.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_blocks_stay_fenced_off_while_an_agent_does_not_end(
    link: RdmaLink,
    target: RdmaWorker,
    fabric: FakeFabric,
    thread: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp_grants, "FENCE_SECONDS", 0.5)
    fabric.hold(0)
    fabric.can_close = False
    writing = begin_write(thread, link, target)
    wait_until(lambda: fabric.num_under_way == 4)
    for _ in range(2):
        with pytest.raises(TransferError, match="still write for transfer tr-a"):
            target.export.revoke(A)
    with pytest.raises(TransferError, match="the peer closed it"):
        writing.result(20)
    fabric.can_close = True


# ---- peers that fail -----------------------------------------------------------------------------


def test_a_read_that_fails_fails_the_write_and_its_agent_ends(
    link: RdmaLink, target: RdmaWorker, fabric: FakeFabric
) -> None:
    assert_writes_again(link, target)
    fabric.is_failing = True
    token = target.export.grant(A, TARGETS)
    with pytest.raises(TransferError, match="the peer closed it"):
        link.write(range(8), TARGETS, token)
    target.export.revoke(A)
    assert_writes_again(link, target)
    assert fabric.num_agents == 4


def test_a_peer_that_dies_is_noticed_at_once(
    link: RdmaLink, target: RdmaWorker, fabric: FakeFabric, thread: ThreadPoolExecutor
) -> None:
    fabric.hold(1)
    writing = begin_write(thread, link, target)
    fabric.wait_until_moved(1)
    connection = link._connection
    assert connection is not None
    connection._sock.cut()
    with pytest.raises(TransferError):
        writing.result(20)
    wait_until(lambda: target.export.num_streams == 0)
    target.export.revoke(A)
    target.empty()
    fabric.resume()
    assert target.is_empty()


def test_a_peer_that_is_silent_is_given_up(fabric: FakeFabric, target: RdmaWorker) -> None:
    with fake_worker(fabric, NUM_BLOCKS, BLOCK, stall_seconds=STALL) as source:
        link = source.link_to(target)
        assert_writes_again(link, target)
        fabric.hold(0)
        token = target.export.grant(A, TARGETS)
        with pytest.raises(TransferError, match=f"nothing moved for {STALL:.1f} s"):
            link.write(range(8), TARGETS, token)
        fabric.resume()
        target.export.revoke(A)
        assert_writes_again(link, target)
        link.close()


def test_a_peer_is_told_while_bytes_move(
    stream: tuple[socket.socket, bytes],
    source: RdmaWorker,
    target: RdmaWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rdma_reader, "TOLD_PER_STALL", 1e12)
    monkeypatch.setattr(rdma_reader, "NUM_LOOKS", 1)
    sock, session = stream
    secret = target.export.handle().secret
    sock.sendall(pack_frame(JOIN, 0, source_of(source, b"agent-2"), (NO_GRANT, secret), session))
    assert receive(sock, ANSWER_BYTES) == pack_answer(DONE, 0)
    token = target.export.grant(A, TARGETS)
    key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
    runs = np.array([(block, block, 1) for block in TARGETS], dtype=np.int32)
    sock.sendall(pack_frame(WRITE, 1, pack_runs(runs), key, session))
    answers = [receive(sock, ANSWER_BYTES)]
    while answers[-1] == pack_answer(MOVED, 1):
        answers.append(receive(sock, ANSWER_BYTES))
    assert len(answers) > 1
    assert answers[-1] == pack_answer(DONE, 1)
    link = source.link_to(target)
    assert_writes_again(link, target)
    link.close()


def test_a_worker_whose_pool_cannot_be_registered_does_not_start(fabric: FakeFabric) -> None:
    fabric.why_no_agent = "no memory can be locked"
    worker = fake_worker(fabric, NUM_BLOCKS, BLOCK)
    with pytest.raises(ConfigError, match="rdma cannot be opened: no memory can be locked"):
        worker.__enter__()


# ---- hostile streams -----------------------------------------------------------------------------


def source_of(worker: RdmaWorker, metadata: bytes) -> bytes:
    memory = RdmaMemory.of_pool(worker.pool)
    return pack_source(
        SourcePool(MemoryKind.HOST, 0, memory.address, worker.pool.num_blocks, metadata)
    )


RUN = (0).to_bytes(4, "little") + (8).to_bytes(4, "little") + (1).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([(WRITE, RUN)], "it has not joined"),
        ([(PROBE, RUN)], "it has not joined"),
        ([(JOIN, b"good"), (JOIN, b"good")], "it has joined already"),
        ([(JOIN, b"unknown")], "there is no agent-99"),
        ([(JOIN, b"good"), (PROBE, bytes(12))], "a probe of 0 bytes"),
        ([(JOIN, b"good"), (WRITE, bytes(0))], "a frame of kind 2 and size 0"),
        ([(9, RUN)], "its bytes are no frame"),
    ],
)
def test_a_peer_that_breaks_the_protocol_loses_its_stream(
    stream: tuple[socket.socket, bytes],
    source: RdmaWorker,
    target: RdmaWorker,
    frames: list[tuple[int, bytes]],
    reason: str,
) -> None:
    sock, session = stream
    joins = {b"good": source_of(source, b"agent-2"), b"unknown": source_of(source, b"agent-99")}
    key = (NO_GRANT, target.export.handle().secret)
    with structlog.testing.capture_logs() as logs:
        for sequence, (kind, payload) in enumerate(frames):
            sock.sendall(pack_frame(kind, sequence, joins.get(payload, payload), key, session))
        assert is_ended(sock)
        wait_until(lambda: target.export.num_streams == 0)
    assert any(reason in line.get("reason", "") for line in logs), logs
    assert target.is_empty()


def test_a_join_without_the_secret_is_refused(
    stream: tuple[socket.socket, bytes], source: RdmaWorker
) -> None:
    sock, session = stream
    payload = source_of(source, b"agent-2")
    sock.sendall(pack_frame(JOIN, 0, payload, (NO_GRANT, new_secret()), session))
    assert is_ended(sock)


@pytest.mark.parametrize("run", [(NUM_BLOCKS, 8, 1), (0, NUM_BLOCKS, 1), (0, 8, 2**32 - 1)])
def test_runs_outside_of_either_pool_are_refused(
    stream: tuple[socket.socket, bytes],
    source: RdmaWorker,
    target: RdmaWorker,
    run: tuple[int, int, int],
) -> None:
    sock, session = stream
    token = target.export.grant(A, range(8, 16))
    secret = target.export.handle().secret
    sock.sendall(pack_frame(JOIN, 0, source_of(source, b"agent-2"), (NO_GRANT, secret), session))
    assert receive(sock, ANSWER_BYTES) == pack_answer(DONE, 0)
    payload = b"".join(number.to_bytes(4, "little") for number in run)
    key = (token[:GRANT_ID_BYTES], token[GRANT_ID_BYTES:])
    sock.sendall(pack_frame(WRITE, 1, payload, key, session))
    assert receive(sock, ANSWER_BYTES) == pack_answer(REFUSED, 1)
    sock.sendall(pack_frame(WRITE, 2, RUN, key, session))
    assert receive(sock, ANSWER_BYTES) == pack_answer(DONE, 2)
    assert target.block(8) == source.block(0)


def test_metadata_that_is_too_long_is_never_sent(
    fabric: FakeFabric, target: RdmaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.transfer.rdma_connection.MAX_METADATA_BYTES", 3)
    token = target.export.grant(A, [8])
    with fake_worker(fabric, NUM_BLOCKS, BLOCK) as source:
        link = source.link_to(target)
        with pytest.raises(TransferError, match="metadata has 7 bytes"):
            link.write([0], [8], token)
    assert target.export.num_streams == 0
    assert "metadata" not in repr(SourcePool(MemoryKind.HOST, 0, 0, 1, b"agent-1"))
