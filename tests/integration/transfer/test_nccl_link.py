"""Workers of one process, joined by real streams and a fabric that behaves as NCCL does."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import flowpath_native
import pytest

from common.errors import TransferError
from common.ids import TransferId
from common.kv.pool import KVPool
from common.transfer import nccl
from common.transfer.nccl import NUM_PROBES, NcclLink
from common.transfer.tcp_wire import new_token
from common.transfer.verify import verify_blocks
from tests.support.data_stream import wait_until
from tests.support.fake_nccl import LIMIT_RATE, FakeFabric
from tests.support.nccl_workers import NcclWorker, nccl_worker
from tests.support.pool_side import EMPTY

BLOCK = 20 * 4096
NUM_BLOCKS = 120
A = TransferId("tr-a")


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    fabric = FakeFabric()
    yield fabric
    assert fabric.num_open == 0, "a communicator was not ended"


@pytest.fixture
def source(fabric: FakeFabric) -> Iterator[NcclWorker]:
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as worker:
        worker.fill(1)
        yield worker


@pytest.fixture
def target(fabric: FakeFabric) -> Iterator[NcclWorker]:
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as worker:
        yield worker


@pytest.fixture
def link(source: NcclWorker, target: NcclWorker) -> Iterator[NcclLink]:
    link = source.link_to(target)
    yield link
    link.close()


@pytest.mark.parametrize("count", [1, 7, 60, 119])
@pytest.mark.parametrize("is_scattered", [False, True])
def test_every_block_arrives_and_nothing_else_changes(
    link: NcclLink, source: NcclWorker, target: NcclWorker, count: int, is_scattered: bool
) -> None:
    random = Random(count)
    sources = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(count))
    targets = random.sample(range(NUM_BLOCKS), count) if is_scattered else list(range(1, count + 1))
    token = target.export.grant(A, targets)
    report = link.write(sources, targets, token)
    assert (report.num_blocks, report.num_bytes) == (count, count * BLOCK)
    for src, dst in zip(sources, targets, strict=True):
        assert target.block(dst) == source.block(src)
    for untouched in set(range(NUM_BLOCKS)) - set(targets):
        assert target.block(untouched) == bytes([EMPTY]) * BLOCK
    assert report.checksums.tolist() == [
        flowpath_native.checksum(source.block(number)) for number in sources
    ]
    assert verify_blocks(target.pool, targets, report.checksums) is None


def test_one_run_is_one_piece_and_small_runs_go_in_one_group(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    token = target.export.grant(A, range(NUM_BLOCKS))
    assert link.write(range(110), range(10, 120), token).num_calls == 1
    assert fabric.groups == [1]
    assert link.write(range(0, 40, 2), range(0, 40, 2), token).num_calls == 20
    assert fabric.groups == [1, 20]


def test_more_runs_than_one_frame_holds(
    link: NcclLink, source: NcclWorker, target: NcclWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "MAX_EXTENTS", 16)
    order = Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    report = link.write(range(NUM_BLOCKS), order, target.export.grant(A, order))
    assert report.num_calls > 100
    assert verify_blocks(target.pool, order, report.checksums) is None


def test_workers_join_when_they_are_first_needed_and_stay_joined(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    assert (fabric.num_joined, target.export.num_streams) == (0, 0)
    link.measure()
    token = target.export.grant(A, range(NUM_BLOCKS))
    for _ in range(3):
        link.write(range(100), range(100), token)
    assert (fabric.num_joined, target.export.num_streams) == (1, 1)
    link.close()
    wait_until(lambda: target.export.num_streams == 0)
    assert fabric.num_open == 0


def test_writing_nothing_joins_nobody(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    report = link.write([], [], target.export.grant(A, [1]))
    assert (report.num_blocks, report.num_calls, len(report.checksums)) == (0, 0, 0)
    assert fabric.num_joined == 0


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([0, 1], [3, NUM_BLOCKS]),
        ([0, NUM_BLOCKS], [3, 4]),
        ([0, -1], [3, 4]),
        ([0, 1], [3, 3]),
        ([0], [3, 4]),
        ([0], [2**40]),
    ],
)
def test_a_write_that_cannot_be_right_is_refused_before_anything_is_said(
    link: NcclLink, target: NcclWorker, sources: list[int], targets: list[int]
) -> None:
    token = target.export.grant(A, range(NUM_BLOCKS))
    with pytest.raises(TransferError, match="cannot write"):
        link.write(sources, targets, token)
    with pytest.raises(TransferError, match="without a token"):
        link.write([0], [0], b"")
    assert target.is_empty()
    assert target.export.num_streams == 0


def test_what_is_not_granted_is_refused_and_the_workers_stay_joined(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    token = target.export.grant(A, range(8, 16))
    for targets, given in ((range(2), new_token()), (range(7, 9), token), (range(15, 17), token)):
        with pytest.raises(TransferError, match="does not grant it"):
            link.write(range(2), targets, given)
    target.export.revoke(A)
    with pytest.raises(TransferError, match="does not grant it"):
        link.write([0], [8], token)
    assert target.is_empty()
    assert fabric.num_joined == 1
    assert fabric.groups == []
    assert target.export.grant(A, [8], token) == token
    link.write([0], [8], token)
    assert fabric.num_joined == 1


def test_measuring_writes_into_no_block(link: NcclLink, target: NcclWorker) -> None:
    rate = link.measure()
    assert rate.num_bytes == NUM_PROBES * target.pool.num_bytes
    assert rate.gigabytes_per_second > 0
    assert rate.limit_gigabytes_per_second == LIMIT_RATE
    assert target.is_empty()
    assert target.driver.scratches
    assert all(scratch.is_freed for scratch in target.driver.scratches)


def test_a_device_without_memory_cannot_be_measured_but_written(
    link: NcclLink, target: NcclWorker, fabric: FakeFabric
) -> None:
    target.driver.has_memory = False
    with pytest.raises(TransferError, match="does not grant it"):
        link.measure()
    link.write([0], [8], target.export.grant(A, [8]))
    assert fabric.num_joined == 1


def test_a_closed_link_writes_no_more(link: NcclLink, target: NcclWorker) -> None:
    token = target.export.grant(A, [0])
    link.write([0], [0], token)
    link.close()
    link.close()
    with pytest.raises(TransferError, match="the link is closed"):
        link.write([0], [0], token)
    with pytest.raises(TransferError, match="the link is closed"):
        link.measure()
    assert not link.try_release()


def test_a_pool_of_another_kind_or_shape_is_not_opened(
    source: NcclWorker, fabric: FakeFabric
) -> None:
    memory = KVPool(1, BLOCK)
    with pytest.raises(TransferError, match="offered as memfd"):
        source.backend.open_peer(memory.handle())
    memory.close()
    with (
        nccl_worker(fabric, 4, 2 * BLOCK) as other,
        pytest.raises(TransferError, match=f"blocks have {2 * BLOCK} bytes, ours {BLOCK}"),
    ):
        source.link_to(other)


def test_nobody_at_the_address_is_an_error_that_says_what_to_check(
    source: NcclWorker, fabric: FakeFabric
) -> None:
    with nccl_worker(fabric, NUM_BLOCKS, BLOCK) as gone:
        link = source.link_to(gone)
    with pytest.raises(TransferError, match=r"cannot join the peer.*check that the address"):
        link.write([0], [0], new_token())
    link.close()


# ---- many workers --------------------------------------------------------------------------------


def test_two_workers_that_start_writing_to_each_other_at_once(fabric: FakeFabric) -> None:
    for turn in range(20):
        with (
            nccl_worker(fabric, 16, 4096, max_communicators=1, max_moving=1) as one,
            nccl_worker(fabric, 16, 4096, max_communicators=1, max_moving=1) as other,
        ):
            one.fill(turn)
            start = threading.Barrier(2)
            links = [one.link_to(other), other.link_to(one)]
            tokens = [peer.export.grant(A, range(8, 16)) for peer in (other, one)]

            def write(number: int) -> None:
                start.wait(20)  # noqa: B023 - within this turn
                links[number].write(range(8), range(8, 16), tokens[number])  # noqa: B023

            with ThreadPoolExecutor(2) as threads:
                list(threads.map(write, range(2)))
            assert [other.block(n + 8) for n in range(8)] == [one.block(n) for n in range(8)]
            for link in links:
                link.close()
    assert fabric.num_joined == 40


def test_many_pairs_at_once_write_what_they_were_told(fabric: FakeFabric) -> None:
    with (
        nccl_worker(fabric, 60, 4096) as target,
        nccl_worker(fabric, 20, 4096) as first,
        nccl_worker(fabric, 20, 4096) as second,
        nccl_worker(fabric, 20, 4096) as third,
    ):
        sources = (first, second, third)
        links = [worker.link_to(target) for worker in sources]

        def write(number: int) -> None:
            random = Random(number)
            sources[number].fill(number)
            for turn in range(10):
                targets = random.sample(range(20 * number, 20 * number + 20), 15)
                transfer = TransferId(f"tr-{number}-{turn}")
                token = target.export.grant(transfer, targets)
                report = links[number].write(range(15), targets, token)
                assert verify_blocks(target.pool, targets, report.checksums) is None
                target.export.revoke(transfer)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(write, range(3)))
        for link in links:
            link.close()
    assert fabric.num_joined == 3


def test_the_sender_ends_the_communicator_unused_for_longest(fabric: FakeFabric) -> None:
    with (
        nccl_worker(fabric, 8, 4096, max_communicators=2) as source,
        nccl_worker(fabric, 8, 4096) as first,
        nccl_worker(fabric, 8, 4096) as second,
        nccl_worker(fabric, 8, 4096) as third,
    ):
        peers = (first, second, third)
        links = [source.link_to(peer) for peer in peers]
        tokens = [peer.export.grant(A, range(8)) for peer in peers]
        source.fill(2)
        for number in (0, 1, 0, 2, 0, 1):
            links[number].write(range(8), range(8), tokens[number])
            wait_until(lambda: sum(peer.export.num_streams for peer in peers) <= 2)
        assert fabric.num_joined == 4, "the second made room for the third and came back"
        assert all(peer.block(7) == source.block(7) for peer in peers)
        for link in links:
            link.close()


def test_the_receiver_ends_the_communicator_unused_for_longest(fabric: FakeFabric) -> None:
    with (
        nccl_worker(fabric, 16, 4096, max_communicators=1) as target,
        nccl_worker(fabric, 8, 4096) as first,
        nccl_worker(fabric, 8, 4096) as second,
    ):
        links = [source.link_to(target) for source in (first, second)]
        token = target.export.grant(A, range(16))
        for turn in range(6):
            links[turn % 2].write(range(8), range(8), token)
        assert fabric.num_joined == 6
        for link in links:
            link.close()


def test_a_worker_receives_from_no_more_peers_at_once_than_its_device_has_room_for(
    fabric: FakeFabric,
) -> None:
    with (
        nccl_worker(fabric, 16, 4096, max_moving=1, stall_seconds=0.5) as target,
        nccl_worker(fabric, 8, 4096) as first,
        nccl_worker(fabric, 8, 4096) as second,
        ThreadPoolExecutor(1) as thread,
    ):
        links = [source.link_to(target) for source in (first, second)]
        token = target.export.grant(A, range(16))
        for link in links:
            link.write([0], [0], token)
        fabric.hold()
        held = thread.submit(links[0].write, range(4), range(4), token)
        fabric.wait_until_waiting()
        with pytest.raises(TransferError, match="does not grant it"):
            links[1].write([0], [8], token)
        fabric.resume()
        assert held.result().num_blocks == 4
        links[1].write([0], [8], token)
        for link in links:
            link.close()
    assert fabric.num_joined == 2
