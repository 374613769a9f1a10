"""Transport ``tcp`` where one pool or both are on a GPU, through windows of host memory."""

from collections.abc import Iterator

import flowpath_native
import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.pool import BlockPool, KVPool
from common.transfer import host_staged
from common.transfer.host_staged import StagedTcpBackend
from common.transfer.tcp import TcpBackend
from common.transfer.tcp_export import TcpExport
from common.transfer.verify import verify_blocks
from tests.support.fake_cuda import FakeDriver, FakeGpus

BLOCK = 12288
NUM_BLOCKS = 24
STALL_SECONDS = 10.0
TRANSFER = TransferId("tr-1")
PAIRS = ([3, 4, 5, 9, 1, 22, 0, 11, 12], [7, 8, 9, 2, 20, 5, 23, 14, 15])


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks at the sender; at the receiver a size that cuts blocks and runs."""
    monkeypatch.setattr(host_staged, "SENT_BYTES", 4 * BLOCK)
    monkeypatch.setattr(host_staged, "RECEIVED_BYTES", 5 * 4096)


def memory_of(pool: BlockPool) -> NDArray[np.uint8]:
    if isinstance(pool, DevicePool):
        blocks: NDArray[np.uint8] = pool.tensor.numpy()
    else:
        assert isinstance(pool, KVPool)
        blocks = np.frombuffer(pool.buffer, dtype=np.uint8)
    return blocks[: NUM_BLOCKS * BLOCK].reshape(NUM_BLOCKS, BLOCK)


def make_pool(kind: str) -> BlockPool:
    if kind == "host":
        return KVPool(NUM_BLOCKS, BLOCK)
    return DevicePool(NUM_BLOCKS, BLOCK, 0, driver=FakeGpus().process())


def driver_of(pool: BlockPool) -> FakeDriver:
    assert isinstance(pool, DevicePool)
    assert isinstance(pool.driver, FakeDriver)
    return pool.driver


@pytest.fixture
def source(request: pytest.FixtureRequest) -> Iterator[BlockPool]:
    pool = make_pool(getattr(request, "param", "gpu"))
    memory_of(pool)[:] = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS, BLOCK), np.uint8)
    yield pool
    pool.close()


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[BlockPool]:
    pool = make_pool(getattr(request, "param", "gpu"))
    memory_of(pool)[:] = 0xEE
    yield pool
    pool.close()


def backend(pool: BlockPool) -> StagedTcpBackend | TcpBackend:
    if isinstance(pool, DevicePool):
        return StagedTcpBackend(pool, STALL_SECONDS)
    assert isinstance(pool, KVPool)
    return TcpBackend(pool, STALL_SECONDS)


@pytest.mark.parametrize(
    ("source", "target"), [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")], indirect=True
)
def test_blocks_arrive_whole_whatever_memory_they_come_from_and_go_to(
    source: BlockPool, target: BlockPool
) -> None:
    export = TcpExport(target, STALL_SECONDS)
    sources, targets = PAIRS
    token = export.grant(TRANSFER, targets)
    link = backend(source).open_peer(export.handle())
    report = link.write(sources, targets, token)
    assert (report.num_blocks, report.num_bytes) == (len(sources), len(sources) * BLOCK)
    assert report.num_calls >= 5
    assert (memory_of(target)[targets] == memory_of(source)[sources]).all()
    others = sorted(set(range(NUM_BLOCKS)) - set(targets))
    assert (memory_of(target)[others] == 0xEE).all(), "nothing else was touched"
    expected = flowpath_native.checksum_blocks(memory_of(source).reshape(-1), sources, BLOCK)
    assert report.checksums.tolist() == expected.tolist()
    assert verify_blocks(target, targets, report.checksums) is None
    assert link.write([], [], token).num_calls == 0
    assert link.measure().gigabytes_per_second > 0
    link.close()
    link.close()
    export.close()


def test_windows_are_given_back(source: BlockPool, target: BlockPool) -> None:
    before = [driver_of(pool).num_mappings for pool in (source, target)]
    export = TcpExport(target, STALL_SECONDS)
    link = backend(source).open_peer(export.handle())
    assert driver_of(source).num_mappings == before[0] + 1
    link.close()
    export.close()
    assert [driver_of(pool).num_mappings for pool in (source, target)] == before


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [3, NUM_BLOCKS], "a target block is outside"),
        ([NUM_BLOCKS], [3], "a source block is outside"),
        ([0, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 9], "given twice"),
        ([0], [3, 4], "cannot write 1 blocks"),
    ],
)
def test_a_write_that_cannot_be_right_sends_nothing(
    source: BlockPool, target: BlockPool, sources: list[int], targets: list[int], message: str
) -> None:
    export = TcpExport(target, STALL_SECONDS)
    token = export.grant(TRANSFER, range(NUM_BLOCKS))
    link = backend(source).open_peer(export.handle())
    with pytest.raises(TransferError, match=message):
        link.write(sources, targets, token)
    assert (memory_of(target) == 0xEE).all()
    link.close()
    export.close()


def test_a_copy_that_fails_at_either_side_fails_the_write_and_the_next_one_works(
    source: BlockPool, target: BlockPool
) -> None:
    export = TcpExport(target, STALL_SECONDS)
    sources, targets = PAIRS
    token = export.grant(TRANSFER, targets)
    link = backend(source).open_peer(export.handle())
    for pool in (source, target):
        driver_of(pool).failing.add("copy")
        with pytest.raises(TransferError):
            link.write(sources, targets, token)
        driver_of(pool).failing.clear()
        report = link.write(sources, targets, token)
        assert verify_blocks(target, targets, report.checksums) is None
    link.close()
    export.close()


def test_a_revoked_transfer_writes_nothing_to_the_gpu(source: BlockPool, target: BlockPool) -> None:
    export = TcpExport(target, STALL_SECONDS)
    token = export.grant(TRANSFER, [4])
    link = backend(source).open_peer(export.handle())
    export.revoke(TRANSFER)
    with pytest.raises(TransferError):
        link.write([1], [4], token)
    assert (memory_of(target) == 0xEE).all()
    link.close()
    export.close()


def test_host_memory_that_cannot_be_locked_is_a_failed_pairing(
    source: BlockPool, target: BlockPool
) -> None:
    export = TcpExport(target, STALL_SECONDS)
    driver_of(source).failing.add("pin")
    with pytest.raises(TransferError, match="pin 0"):
        backend(source).open_peer(export.handle())
    driver_of(source).failing.clear()
    driver_of(target).failing.add("pin")
    with pytest.raises(TransferError, match="tcp 127"):
        backend(source).open_peer(export.handle())
    export.close()
