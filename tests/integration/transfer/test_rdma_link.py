"""Workers of one process, joined by real streams and either a fake fabric or NIXL itself."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from random import Random

import flowpath_native
import pytest

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.transfer import rdma, rdma_reader
from common.transfer.nixl_packages import HOW_TO_INSTALL, is_nixl_installed
from common.transfer.rdma import RdmaLink
from common.transfer.rdma_memory import RdmaMemory
from common.transfer.rdma_nixl import NixlLibrary
from common.transfer.tcp_wire import new_token
from common.transfer.verify import verify_blocks
from tests.support.data_stream import wait_until
from tests.support.fake_rdma import (
    PORT_RATE,
    FakeFabric,
    RdmaWorker,
    fake_worker,
    rdma_worker,
)
from tests.support.pool_side import EMPTY

BLOCK = 5 * 4096
NUM_BLOCKS = 120
A, B = TransferId("tr-a"), TransferId("tr-b")
NewWorker = Callable[[], AbstractContextManager[RdmaWorker]]
WITH_NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(not is_nixl_installed(), reason=f"no NIXL here; {HOW_TO_INSTALL}"),
)


@contextmanager
def nixl_worker() -> Iterator[RdmaWorker]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    memory = RdmaMemory.of_pool(pool)
    with rdma_worker(pool, NixlLibrary(memory), memory) as worker:
        yield worker


@contextmanager
def two_workers(fabric: FakeFabric) -> Iterator[tuple[RdmaWorker, RdmaWorker]]:
    workers = (fake_worker(fabric, NUM_BLOCKS, BLOCK) for _ in range(2))
    with next(workers) as own, next(workers) as other:
        yield own, other


@pytest.fixture
def fabric() -> FakeFabric:
    return FakeFabric()


@pytest.fixture(params=["adapters", "no adapters", WITH_NIXL])
def new_worker(request: pytest.FixtureRequest, fabric: FakeFabric) -> NewWorker:
    if request.param == "nixl":
        return nixl_worker
    fabric.needs_progress = request.param == "no adapters"
    port_rate = 0.0 if fabric.needs_progress else PORT_RATE
    return lambda: fake_worker(fabric, NUM_BLOCKS, BLOCK, port_rate=port_rate)


@pytest.fixture
def source(new_worker: NewWorker) -> Iterator[RdmaWorker]:
    with new_worker() as worker:
        worker.fill(1)
        yield worker


@pytest.fixture
def target(new_worker: NewWorker) -> Iterator[RdmaWorker]:
    with new_worker() as worker:
        yield worker


@pytest.fixture
def link(source: RdmaWorker, target: RdmaWorker) -> Iterator[RdmaLink]:
    link = source.link_to(target)
    yield link
    link.close()


@pytest.mark.parametrize(("count", "is_scattered"), [(1, False), (60, True), (119, False)])
def test_every_block_arrives_and_nothing_else_changes(
    link: RdmaLink, source: RdmaWorker, target: RdmaWorker, count: int, is_scattered: bool
) -> None:
    random = Random(count)
    sources = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(count))
    targets = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(1, count + 1))
    token = target.export.grant(A, targets)
    report = link.write(sources, targets, token)
    target.export.revoke(A)
    assert (report.num_blocks, report.num_bytes) == (count, count * BLOCK)
    for src, dst in zip(sources, targets, strict=True):
        assert target.block(dst) == source.block(src)
    for untouched in set(range(NUM_BLOCKS)) - set(targets):
        assert target.block(untouched) == bytes([EMPTY]) * BLOCK
    assert report.checksums.tolist() == [
        flowpath_native.checksum(source.block(number)) for number in sources
    ]
    assert verify_blocks(target.pool, targets, report.checksums) is None


def test_more_runs_than_a_frame_and_more_pieces_than_a_request_hold(
    link: RdmaLink, target: RdmaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "MAX_RUNS", 50)
    monkeypatch.setattr(rdma_reader, "MAX_REQUEST_PIECES", 7)
    order = Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    report = link.write(range(NUM_BLOCKS), order, target.export.grant(A, order))
    assert report.num_calls > 100
    assert verify_blocks(target.pool, order, report.checksums) is None


def test_a_link_is_measured_without_touching_a_block(
    link: RdmaLink, target: RdmaWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdma, "MEASURED_BYTES", 1024 * 1024)
    rate = link.measure()
    assert rate.num_bytes == 1024 * 1024
    assert rate.gigabytes_per_second > 0
    assert rate.limit_gigabytes_per_second > 0
    assert target.is_empty()


def test_what_is_not_granted_is_refused_and_the_workers_stay_joined(
    link: RdmaLink, target: RdmaWorker
) -> None:
    token = target.export.grant(A, range(8, 16))
    for targets, given in ((range(2), new_token()), (range(7, 9), token), (range(15, 17), token)):
        with pytest.raises(TransferError, match="does not grant it"):
            link.write(range(2), targets, given)
    target.export.revoke(A)
    with pytest.raises(TransferError, match="does not grant it"):
        link.write([0], [8], token)
    assert target.is_empty()
    again = target.export.grant(B, [8])
    assert link.write([0], [8], again).num_blocks == 1
    assert target.export.num_streams == 1


def test_both_workers_write_to_each_other_and_to_two_peers(
    new_worker: NewWorker, source: RdmaWorker, target: RdmaWorker
) -> None:
    with new_worker() as third:
        target.fill(2)
        links = [source.link_to(target), target.link_to(source), source.link_to(third)]
        for to, link in zip((target, source, third), links, strict=True):
            report = link.write([5, 6], [70, 71], to.export.grant(A, [70, 71]))
            assert verify_blocks(to.pool, [70, 71], report.checksums) is None
            link.close()
        for worker in (source, target, third):
            wait_until(lambda: worker.export.num_streams == 0)  # noqa: B023 - called at once


@pytest.mark.parametrize(
    ("sources", "targets"),
    [([0, 1], [3, NUM_BLOCKS]), ([0, -1], [3, 4]), ([0, 1], [3, 3]), ([0], [3, 4])],
)
def test_a_write_that_cannot_be_right_is_refused_before_anything_is_said(
    fabric: FakeFabric, sources: list[int], targets: list[int]
) -> None:
    with (
        fake_worker(fabric, NUM_BLOCKS, BLOCK) as own,
        fake_worker(fabric, NUM_BLOCKS, BLOCK) as to,
    ):
        link = own.link_to(to)
        token = to.export.grant(A, range(NUM_BLOCKS))
        with pytest.raises(TransferError, match="cannot write"):
            link.write(sources, targets, token)
        with pytest.raises(TransferError, match="without a token"):
            link.write([0], [0], b"")
        assert link.write([], [], token).num_calls == 0
        link.close()
        with pytest.raises(TransferError, match="closed"):
            link.write([0], [0], token)
        assert to.export.num_streams == 0
        assert to.is_empty()


def test_one_run_is_one_piece_and_the_limit_is_the_adapters(fabric: FakeFabric) -> None:
    with (
        fake_worker(fabric, NUM_BLOCKS, BLOCK) as own,
        fake_worker(fabric, NUM_BLOCKS, BLOCK) as to,
    ):
        link = own.link_to(to)
        token = to.export.grant(A, range(NUM_BLOCKS))
        assert link.write(range(110), range(10, 120), token).num_calls == 1
        assert link.write(range(0, 40, 2), range(0, 40, 2), token).num_calls == 20
        assert fabric.requests == [1, 20]
        assert fabric.num_agents == 3, "one for each side that was used"
        assert link.measure().limit_gigabytes_per_second == PORT_RATE
        link.close()


def test_another_kind_of_pool_or_size_of_block_is_refused(fabric: FakeFabric) -> None:
    with fake_worker(fabric, NUM_BLOCKS, BLOCK) as own, fake_worker(fabric, 2, 4096) as other:
        with pytest.raises(TransferError, match="offered as memfd"):
            own.backend.open_peer(own.pool.handle())
        with pytest.raises(TransferError, match="blocks have 4096 bytes"):
            own.link_to(other)
