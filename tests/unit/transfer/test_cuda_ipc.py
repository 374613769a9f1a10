from collections.abc import Iterator
from dataclasses import dataclass, replace

import flowpath_native
import numpy as np
import pytest
import torch

from common.errors import ConfigError, TransferError
from common.ids import TransferId
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.messages.fields import CudaPoolHandle
from common.transfer import cuda_movers, tcp_greeting
from common.transfer.cuda_ipc import (
    CudaIpcBackend,
    CudaIpcExport,
    gather_buffer_backend,
    layerwise_backend,
)
from common.transfer.local import LocalBackend
from common.transfer.ranks_transport import RANKS, as_ranked
from common.transfer.shm import ShmBackend
from common.transfer.tcp import TcpBackend
from common.transfer.verify import verify_blocks
from common.worker.transports import open_transports
from tests.support.fake_cuda import FakeDriver, FakeGpus

LAYOUT = KVLayout(num_layers=3, block_size=8, num_kv_heads=1, head_dim=40, dtype="float32")
BLOCK = LAYOUT.block_bytes
NUM_BLOCKS = 16


@dataclass
class Pair:
    """Two processes with a pool each: the first writes into the second's."""

    driver: FakeDriver
    source: DevicePool
    target: DevicePool

    @property
    def handle(self) -> CudaPoolHandle:
        return replace(self.target.handle(), pid=1)

    @property
    def copies(self) -> list[str]:
        return [call for call in self.driver.calls if call.startswith("copy")]


def pair_on(gpus: FakeGpus, source_device: int, target_device: int) -> Pair:
    driver = gpus.process()
    source = DevicePool(NUM_BLOCKS, BLOCK, source_device, driver=driver)
    target = DevicePool(NUM_BLOCKS, BLOCK, target_device, driver=gpus.process())
    source.tensor[:] = _random_bytes(len(source.tensor))
    target.tensor[:] = 0xEE
    driver.calls.clear()
    return Pair(driver, source, target)


def _random_bytes(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 256, count, dtype=np.uint8))


@pytest.fixture
def near() -> Iterator[Pair]:
    pair = pair_on(FakeGpus(), 0, 0)
    yield pair
    pair.source.close()
    pair.target.close()


@pytest.fixture
def far() -> Iterator[Pair]:
    pair = pair_on(FakeGpus(), 0, 1)
    yield pair
    pair.source.close()
    pair.target.close()


def blocks_of(pool: DevicePool) -> np.ndarray:
    return pool.tensor.numpy().reshape(-1, BLOCK)


def assert_moved(pair: Pair, sources: list[int], targets: list[int]) -> None:
    written = blocks_of(pair.target)
    assert (written[targets] == blocks_of(pair.source)[sources]).all()
    others = sorted(set(range(NUM_BLOCKS + 1)) - set(targets))
    assert (written[others] == 0xEE).all(), "nothing else was touched"


SCATTERED = ([0, 2, 4, 6, 8, 10], [11, 3, 7, 1, 15, 9])
TWO_RUNS = ([5, 3, 4, 9], [12, 10, 11, 0])


def test_on_one_gpu_any_blocks_move_in_one_launch_that_checksums_them_too(near: Pair) -> None:
    link = CudaIpcBackend(near.source).open_peer(near.handle)
    for sources, targets in (SCATTERED, TWO_RUNS, ([0], [0])):
        blocks_of(near.target)[:] = 0xEE
        near.driver.calls.clear()
        report = link.write(sources, targets)
        assert near.copies == [f"copy_blocks {len(sources)} ctas 0"]
        assert (report.num_blocks, report.num_calls) == (len(sources), 1)
        assert report.num_bytes == len(sources) * BLOCK
        assert report.seconds > 0
        assert_moved(near, sources, targets)
        assert verify_blocks(near.target, targets, report.checksums) is None
    link.close()


def test_few_runs_go_to_another_gpu_by_one_copy_each(far: Pair) -> None:
    link = CudaIpcBackend(far.source).open_peer(far.handle)
    sources, targets = TWO_RUNS
    report = link.write(sources, targets)
    assert set(far.copies) == {f"copy {BLOCK}", f"copy {3 * BLOCK}"}
    assert len(far.copies) == 2
    assert "checksum_blocks 4" in far.driver.calls
    assert report.num_calls == 2
    assert_moved(far, sources, targets)
    assert verify_blocks(far.target, targets, report.checksums) is None
    link.close()


def test_many_runs_go_to_another_gpu_in_one_launch_on_a_part_of_ours(far: Pair) -> None:
    link = CudaIpcBackend(far.source).open_peer(far.handle)
    sources, targets = SCATTERED
    assert len(sources) > cuda_movers.MAX_PEER_COPIES
    report = link.write(sources, targets)
    assert far.copies == [f"copy_blocks 6 ctas {cuda_movers.PEER_CTAS}"]
    assert report.num_calls == 1
    assert_moved(far, sources, targets)
    link.close()


def test_peer_access_is_enabled_for_the_own_gpu_and_only_towards_another(
    near: Pair, far: Pair
) -> None:
    CudaIpcBackend(near.source).open_peer(near.handle).close()
    assert near.driver.peers_enabled == set()
    CudaIpcBackend(far.source).open_peer(far.handle).close()
    assert far.driver.peers_enabled == {(0, 1)}


def test_a_pool_is_mapped_once_however_many_links_there_are(near: Pair) -> None:
    first = CudaIpcBackend(near.source).open_peer(near.handle)
    second = gather_buffer_backend(near.source).open_peer(near.handle)
    assert near.driver.calls.count("map 0") == 1
    first.close()
    first.close()
    assert "unmap 0" not in near.driver.calls
    assert second.write([1], [2]).num_blocks == 1
    second.close()
    assert near.driver.calls.count("unmap 0") == 1
    again = CudaIpcBackend(near.source).open_peer(near.handle)
    assert near.driver.calls.count("map 0") == 2
    again.close()


def test_writing_nothing_is_no_call(near: Pair) -> None:
    link = CudaIpcBackend(near.source).open_peer(near.handle)
    near.driver.calls.clear()
    report = link.write([], [])
    assert (report.num_blocks, report.num_calls, len(report.checksums)) == (0, 0, 0)
    assert near.driver.calls == []
    link.close()


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [3, NUM_BLOCKS], "a target block is outside of the 16 blocks"),
        ([0, NUM_BLOCKS], [3, 4], "a source block is outside"),
        ([0, 1], [3, -1], "out of range"),
        ([0, 1], [3, 3], "given twice"),
        ([0], [3, 4], "cannot write 1 blocks"),
        ([0], [2**40], "cannot write 1 blocks"),
    ],
)
def test_a_write_that_cannot_be_right_reaches_no_gpu(
    near: Pair, sources: list[int], targets: list[int], message: str
) -> None:
    link = CudaIpcBackend(near.source).open_peer(near.handle)
    near.driver.calls.clear()
    with pytest.raises(TransferError, match=message):
        link.write(sources, targets)
    assert near.driver.calls == []
    link.close()


def test_a_failed_launch_names_the_transport_and_leaves_nothing_running(near: Pair) -> None:
    link = CudaIpcBackend(near.source).open_peer(near.handle)
    near.driver.failing.add("copy_blocks")
    near.driver.calls.clear()
    with pytest.raises(TransferError, match=f"cuda_ipc: writing {6 * BLOCK} bytes failed: copy_bl"):
        link.write(*SCATTERED)
    assert near.driver.calls[-2:] == ["wait", "wait"], "both streams ran empty"
    near.driver.failing.clear()
    assert link.write(*SCATTERED).num_blocks == 6, "the link goes on"
    link.close()


def test_a_failed_copy_among_several_waits_for_those_already_on_their_way(far: Pair) -> None:
    link = CudaIpcBackend(far.source).open_peer(far.handle)
    far.driver.failing.add("checksum_blocks")
    with pytest.raises(TransferError, match="checksum_blocks"):
        link.write(*TWO_RUNS)
    assert far.driver.calls[-2:] == ["wait", "wait"]
    link.close()


def test_a_closed_link_refuses_everything(near: Pair) -> None:
    link = CudaIpcBackend(near.source).open_peer(near.handle)
    link.close()
    for use in (lambda: link.write([0], [1]), link.measure):
        with pytest.raises(TransferError, match="the link is closed"):
            use()


def test_measuring_reads_only_and_compares_with_what_the_hardware_gives(
    near: Pair, far: Pair
) -> None:
    for pair, limit in ((near, near.target.num_bytes / 1e9), (far, 1e-9)):
        before = (pair.source.tensor.clone(), pair.target.tensor.clone())
        link = CudaIpcBackend(pair.source).open_peer(pair.handle)
        mappings = pair.driver.num_mappings
        rate = link.measure()
        assert rate.num_bytes == NUM_BLOCKS * BLOCK
        assert rate.gigabytes_per_second == pytest.approx(NUM_BLOCKS * BLOCK / 1e9)
        assert rate.limit_gigabytes_per_second == pytest.approx(limit)
        assert pair.driver.num_mappings == mappings, "what it measured with is given back"
        assert (pair.source.tensor == before[0]).all()
        assert (pair.target.tensor == before[1]).all()
        link.close()


def test_a_link_far_below_the_hardware_is_flagged() -> None:
    pair = pair_on(FakeGpus(link_gigabytes_per_second=450.0), 0, 1)
    link = CudaIpcBackend(pair.source).open_peer(pair.handle)
    assert link.measure().is_flagged, "the silent way through the host"
    link.close()


def test_a_gpu_that_this_process_does_not_see_is_written_as_one_that_it_sees() -> None:
    gpus = FakeGpus(link_gigabytes_per_second=450.0)
    driver = gpus.process([0])
    source = DevicePool(NUM_BLOCKS, BLOCK, 0, driver=driver)
    target = DevicePool(NUM_BLOCKS, BLOCK, 0, driver=gpus.process([1]))
    source.tensor[:] = _random_bytes(len(source.tensor))
    target.tensor[:] = 0xEE
    pair = Pair(driver, source, target)
    link = CudaIpcBackend(source).open_peer(pair.handle)
    report = link.write(*SCATTERED)
    assert pair.copies == [f"copy_blocks 6 ctas {cuda_movers.PEER_CTAS}"], "it is another GPU"
    assert_moved(pair, *SCATTERED)
    assert verify_blocks(target, SCATTERED[1], report.checksums) is None
    rate = link.measure()
    assert rate.limit_gigabytes_per_second == 450.0
    assert rate.is_flagged, "the silent way through the host shows here too"
    link.close()


def test_a_gpu_that_is_not_seen_and_not_reached_is_named_with_what_to_do() -> None:
    gpus = FakeGpus(peers=False)
    source = DevicePool(2, BLOCK, 0, driver=gpus.process([0]))
    target = DevicePool(2, BLOCK, 0, driver=gpus.process([1]))
    handle = replace(target.handle(), pid=1)
    with pytest.raises(TransferError, match=rf"{handle.device_uuid}.*CUDA_VISIBLE_DEVICES"):
        CudaIpcBackend(source).open_peer(handle)


def test_gpus_are_found_by_uuid_however_each_process_counts_them() -> None:
    gpus = FakeGpus()
    driver = gpus.process([1, 0])
    source = DevicePool(2, BLOCK, 0, driver=driver)
    target = DevicePool(2, BLOCK, 0, driver=gpus.process([0, 1]))
    CudaIpcBackend(source).open_peer(replace(target.handle(), pid=1)).close()
    assert driver.peers_enabled == {(0, 1)}


def test_gpus_that_cannot_reach_each_other_are_refused() -> None:
    pair = pair_on(FakeGpus(peers=False), 0, 1)
    with pytest.raises(TransferError, match="GPU 0 cannot reach the memory of GPU 1"):
        CudaIpcBackend(pair.source).open_peer(pair.handle)


def test_pools_that_do_not_fit_are_refused_by_name(near: Pair) -> None:
    backend = CudaIpcBackend(near.source)
    host = KVPool(1, BLOCK)
    for handle, message in (
        (host.handle(), "not offered by CUDA IPC"),
        (replace(near.handle, block_bytes=2 * BLOCK), f"have {2 * BLOCK} bytes, ours {BLOCK}"),
        (replace(near.handle, num_bytes=1), "are not the 1 bytes named"),
        (near.source.handle(), "is this one, which needs no mapping"),
        (replace(near.handle, ipc_handle=bytes(64)), "invalid handle"),
    ):
        with pytest.raises(TransferError, match=message):
            backend.open_peer(handle)
    for other in (ShmBackend(host), TcpBackend(host, 1.0)):
        with pytest.raises(TransferError, match="not offered"):
            other.open_peer(near.handle)
    host.close()


def test_a_link_that_cannot_be_made_whole_leaves_no_mapping(near: Pair) -> None:
    near.driver.failing.add("queue")
    with pytest.raises(TransferError, match="queue 0"):
        CudaIpcBackend(near.source).open_peer(near.handle)
    assert near.driver.calls.count("map 0") == near.driver.calls.count("unmap 0") == 1


def test_layerwise_copies_every_plane_of_every_layer_by_itself(near: Pair) -> None:
    assert LAYOUT.payload_bytes < BLOCK, "the padding counts as well"
    link = layerwise_backend(near.source, LAYOUT).open_peer(near.handle)
    report = link.write([3, 4], [8, 9])
    assert report.num_calls == len(near.copies) == 2 * 3 * 2
    assert_moved(near, [3, 4], [8, 9])
    assert verify_blocks(near.target, [8, 9], report.checksums) is None
    link.close()


def test_gather_buffer_takes_two_launches_and_memory_of_its_own(near: Pair) -> None:
    link = gather_buffer_backend(near.source).open_peer(near.handle)
    before = near.driver.num_mappings
    sources, targets = SCATTERED
    report = link.write(sources, targets)
    assert near.copies == ["copy_blocks 6 ctas 0"] * 2
    assert report.num_calls == 2
    assert near.driver.num_mappings == before + 1
    assert_moved(near, sources, targets)
    assert verify_blocks(near.target, targets, report.checksums) is None
    link.close()
    assert near.driver.num_mappings == before - 1, "buffer and mapping are gone"


def test_a_transfer_larger_than_the_buffer_goes_in_turns(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_movers, "MAX_STAGED_BYTES", 4 * BLOCK)
    link = gather_buffer_backend(near.source).open_peer(near.handle)
    sources, targets = SCATTERED
    report = link.write(sources, targets)
    assert report.num_calls == 4
    assert_moved(near, sources, targets)
    assert verify_blocks(near.target, targets, report.checksums) is None
    link.close()


def test_forks_inside_of_a_gpu_pool_are_one_launch(near: Pair) -> None:
    pool = near.source
    link = LocalBackend(pool).open_peer(pool.handle())
    near.driver.calls.clear()
    report = link.write([1, 2, 3], [1, 9, 12])
    assert near.copies == ["copy_blocks 2 ctas 0"]
    assert report.num_calls == 1
    assert (blocks_of(pool)[[9, 12]] == blocks_of(pool)[[2, 3]]).all()
    assert verify_blocks(pool, [1, 9, 12], report.checksums) is None
    with pytest.raises(TransferError, match="both a source and a target"):
        link.write([1, 2], [2, 3])
    assert link.measure().limit_gigabytes_per_second > 0
    link.close()
    with pytest.raises(TransferError, match="process 1 GPU memory is not this worker's own pool"):
        LocalBackend(pool).open_peer(near.handle)


def test_an_export_gives_the_handle_and_fences_nothing(near: Pair) -> None:
    export = CudaIpcExport(near.target)
    assert export.handle() == near.target.handle()
    assert not export.is_fencing
    assert export.grant(TransferId("tr-1"), [1, 2]) == b""
    export.revoke(TransferId("tr-1"))
    export.close()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ("cuda_ipc", "ranks")),
        ("ranks", ("ranks",)),
        ("cuda_ipc", ("cuda_ipc",)),
        ("layerwise", ("layerwise",)),
        ("gather_buffer", ("gather_buffer",)),
    ],
)
def test_a_worker_offers_what_fits_a_gpu_pool(
    near: Pair, choice: str, names: tuple[str, ...]
) -> None:
    transports = open_transports(near.source, 1.0, choice, "", layout=LAYOUT)
    assert transports.names == names
    as_one_of_ranks = as_ranked(near.target, LAYOUT)
    assert as_one_of_ranks is not None
    for name in names:
        assert transports.exports[name].name == transports.backends[name].name == name
        handle = as_one_of_ranks.handle() if name == RANKS else near.handle
        link = transports.backends[name].open_peer(handle)
        report = link.write([1, 2], [4, 3])
        assert_moved(near, [1, 2], [4, 3])
        assert verify_blocks(near.target, [4, 3], report.checksums) is None
        link.close()
    transports.close()


def test_a_transport_that_does_not_fit_the_pools_memory_is_refused_by_name(near: Pair) -> None:
    host = KVPool(1, BLOCK)
    assert open_transports(host, 1.0, "auto", "").names == ("shm",)
    with pytest.raises(ConfigError, match="cuda_ipc does not move a KV pool in host memory"):
        open_transports(host, 1.0, "cuda_ipc", "")
    with pytest.raises(ConfigError, match="shm does not move a KV pool in a GPU's memory"):
        open_transports(near.source, 1.0, "shm", "")
    with pytest.raises(ConfigError, match="layerwise needs the pool's layout"):
        open_transports(near.source, 1.0, "layerwise", "")
    host.close()


def test_the_checksum_of_the_fake_is_the_native_one(near: Pair) -> None:
    content = blocks_of(near.source)[2]
    assert near.source.checksum([2])[0] == flowpath_native.checksum(content)


def test_a_gpu_pool_is_offered_over_tcp_by_way_of_host_memory(
    near: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_greeting, "HELLO_SECONDS", 60.0)
    ours = open_transports(near.source, 30.0, "tcp", "")
    theirs = open_transports(near.target, 30.0, "tcp", "127.0.0.1")
    assert ours.names == theirs.names == ("tcp",)
    export = theirs.exports["tcp"]
    token = export.grant(TransferId("tr-1"), [4, 3])
    link = ours.backends["tcp"].open_peer(export.handle())
    report = link.write([1, 2], [4, 3], token)
    assert_moved(near, [1, 2], [4, 3])
    assert verify_blocks(near.target, [4, 3], report.checksums) is None
    link.close()
    ours.close()
    theirs.close()
