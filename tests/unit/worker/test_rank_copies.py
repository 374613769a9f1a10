"""Whole blocks in host memory are what a worker of one rank has, whatever the ranks beside it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from common.config.settings import Settings
from common.cuda.driver import CudaError
from common.errors import TransferError
from common.kv.blocks import PublishedBlocks
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.traffic.shared_link import SharedLink
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.heads import rank_layout
from common.transfer.ranks import MemoryRank, RankedPool
from common.transfer.ranks_transport import join_ranks
from common.worker.host_blocks import open_host_blocks
from common.worker.host_memory import HostMemory
from common.worker.pool_copies import open_pool_copies
from common.worker.rank_copies import RankDeviceCopies, open_rank_copies
from common.worker.store_access import StoreAccess
from common.worker.store_setup import open_worker_store
from tests.support.fake_cuda import FakeDriver, FakeGpus

LAYOUTS = {
    # The last block of 2 and 4 ranks has other padding than that of one.
    "float32": KVLayout(2, 8, 4, 4, "float32"),
    "float16": KVLayout(3, 16, 4, 40, "float16"),
    "latent": KVLayout(3, 16, 4, 24, "bfloat16", planes=1),
    "fp8": KVLayout(
        3,
        *(8, 4, 48, "bfloat16"),
        kv_cache_dtype="float8_e4m3",
        scales=(0.5, 0.25, 2.0, 3.0, 0.125, 7.0),
    ),
}
PLAIN = LAYOUTS["float32"]
NUM_BLOCKS = 12
IDS = [9, 3, 4, 5, 0]
SLOTS = [1, 2, 6, 4, 3]
HASHES = tuple(bytes([number]) * 16 for number in range(1, 6))
SECONDS = 30.0

Bytes = NDArray[np.uint8]


class Ranks:
    """The pools of a worker's ranks, in host memory or on a GPU each."""

    def __init__(self, layout: KVLayout, num_ranks: int, *, is_on_gpus: bool) -> None:
        self.layout = layout
        self.driver: FakeDriver | None = None
        self._own = rank_layout(layout, num_ranks)
        self._stack = ExitStack()
        size = self._own.block_bytes
        if is_on_gpus:
            gpus = FakeGpus(num_devices=num_ranks)
            pools = [
                DevicePool(NUM_BLOCKS, size, rank, driver=gpus.process())
                for rank in range(num_ranks)
            ]
            self.blocks = [
                pool.tensor.numpy()[: pool.num_bytes].reshape(NUM_BLOCKS, -1) for pool in pools
            ]
            self.driver = pools[0].driver if isinstance(pools[0].driver, FakeDriver) else None
            self.pool = join_ranks(layout, pools[0], [pool.handle() for pool in pools[1:]])
            self._stack.callback(self.pool.close)
        else:
            hosts = [KVPool(NUM_BLOCKS, size) for _ in range(num_ranks)]
            self.blocks = [
                np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1) for pool in hosts
            ]
            ranks = [MemoryRank(pool) for pool in hosts]
            self.pool = RankedPool(layout, ranks, [pool.handle() for pool in hosts])

    def put(self, block_ids: Sequence[int], whole: Bytes) -> None:
        """Give each rank its heads of whole blocks, with everything around them."""
        heads = self._shaped(self.layout, whole[:, : self.layout.payload_bytes])
        for blocks, part in zip(self.blocks, np.split(heads, len(self.blocks), 4), strict=True):
            blocks[block_ids] = 0
            blocks[block_ids, : self._own.payload_bytes] = part.reshape(len(block_ids), -1)
            blocks[block_ids, self._trailer(self._own)] = whole[:, self._trailer(self.layout)]

    def damage(self) -> None:
        for blocks in self.blocks:
            blocks[:] = 0xEE

    def holds(self, block_ids: Sequence[int], whole: Bytes) -> bool:
        """Whether exactly these blocks are there, and all others are as ``damage`` left them."""
        other = Ranks(self.layout, len(self.blocks), is_on_gpus=False)
        other.damage()
        other.put(block_ids, whole)
        return all(map(np.array_equal, self.blocks, other.blocks))

    def _trailer(self, layout: KVLayout) -> slice:
        return slice(layout.trailer_offset, layout.trailer_offset + 4 * len(layout.scales))

    def _shaped(self, layout: KVLayout, payload: Bytes) -> Bytes:
        shape = (layout.num_layers, layout.planes, layout.block_size, layout.num_kv_heads, -1)
        return payload.reshape(len(payload), *shape)

    def close(self) -> None:
        self._stack.close()


def whole_blocks(layout: KVLayout, seed: int = 1) -> Bytes:
    """Return blocks as the pool of one rank has them."""
    blocks = np.zeros((len(IDS), layout.block_bytes), np.uint8)
    size = layout.payload_bytes
    blocks[:, :size] = np.random.default_rng(seed).integers(0, 120, (len(IDS), size), np.uint8)
    if layout.is_quantised:
        scales = np.asarray(layout.scales, "<f4").view(np.uint8)
        blocks[:, layout.trailer_offset : layout.trailer_offset + len(scales)] = scales
    return blocks


def in_slots(memory: HostMemory) -> Bytes:
    return np.frombuffer(memory.buffer, np.uint8).reshape(memory.num_blocks, -1)


@pytest.fixture(params=[False, True], ids=["memory", "gpus"])
def is_on_gpus(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[1, 2, 4], ids=lambda count: f"{count} ranks")
def num_ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def ranks(num_ranks: int, is_on_gpus: bool) -> Iterator[Ranks]:
    with closing(Ranks(PLAIN, num_ranks, is_on_gpus=is_on_gpus)) as ranks:
        yield ranks


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_heads_are_gathered_to_the_blocks_of_one_rank_and_scattered_back(
    layout: KVLayout, num_ranks: int, is_on_gpus: bool
) -> None:
    with closing(Ranks(layout, num_ranks, is_on_gpus=is_on_gpus)) as ranks:
        memory = HostMemory(ranks.pool, 8 * layout.block_bytes, "test")
        in_slots(memory)[:] = 0x55
        copies = open_pool_copies(ranks.pool)
        whole = whole_blocks(layout)
        ranks.put(IDS, whole)
        copies.download(memory, SLOTS, IDS)
        copies.wait()
        assert (in_slots(memory)[SLOTS] == whole).all()
        assert (in_slots(memory)[[0, 5, 7]] == 0x55).all()
        ranks.damage()
        targets = [1, 2, 8, 10, 11]
        copies.upload(memory, SLOTS, targets)
        copies.wait()
        assert ranks.holds(targets, whole)
        copies.upload(memory, [], [])
        copies.settle()
        copies.close()
        memory.close()


@pytest.mark.parametrize("num_staged", [1, 2, 5])
def test_blocks_are_staged_on_a_gpu_as_many_at_a_time_as_find_room(num_staged: int) -> None:
    with closing(Ranks(PLAIN, 2, is_on_gpus=True)) as ranks:
        memory = HostMemory(ranks.pool, 8 * PLAIN.block_bytes, "test")
        on_gpus = [rank for rank in ranks.pool.ranks if isinstance(rank, DeviceRank)]
        room = num_staged * PLAIN.block_bytes + 1
        copies = RankDeviceCopies(ranks.pool, on_gpus, staged_bytes=room)
        whole = whole_blocks(PLAIN)
        ranks.put(IDS, whole)
        copies.download(memory, SLOTS, IDS)
        assert (in_slots(memory)[SLOTS] == whole).all()
        ranks.damage()
        copies.upload(memory, SLOTS, IDS)
        assert ranks.holds(IDS, whole)
        copies.close()
        memory.close()


def test_what_copies_are_made_with_goes_with_them() -> None:
    with closing(Ranks(PLAIN, 4, is_on_gpus=True)) as ranks:
        driver = ranks.driver
        assert driver is not None
        before = driver.num_mappings
        memory = HostMemory(ranks.pool, PLAIN.block_bytes, "test")
        copies = open_pool_copies(ranks.pool)
        assert driver.num_mappings > before + 1
        copies.close()
        copies.close()
        memory.close()
        assert driver.num_mappings == before
        driver.failing.add("queue")
        with pytest.raises(CudaError):
            open_pool_copies(ranks.pool)
        assert driver.num_mappings == before, "what was made until then is gone"


def test_copies_that_fail_are_told_and_drained() -> None:
    with closing(Ranks(PLAIN, 2, is_on_gpus=True)) as ranks:
        driver = ranks.driver
        assert driver is not None
        memory = HostMemory(ranks.pool, 8 * PLAIN.block_bytes, "test")
        copies = open_pool_copies(ranks.pool)
        for call in ("copy", "copy_pieces", "wait"):
            driver.failing.add(call)
            for copy in (copies.upload, copies.download):
                with pytest.raises(CudaError):
                    copy(memory, SLOTS, IDS)
                copies.settle()
            driver.failing.clear()
        copies.close()
        memory.close()


def test_copies_refuse_what_is_outside_of_either_memory(ranks: Ranks) -> None:
    copies = open_pool_copies(ranks.pool)
    memory = HostMemory(ranks.pool, 3 * PLAIN.block_bytes, "test")
    for slot, block_id in ((3, 0), (0, NUM_BLOCKS), (-1, 0), (0, -1)):
        for copy in (copies.upload, copies.download):
            with pytest.raises(IndexError):
                copy(memory, [slot], [block_id])
    copies.close()
    memory.close()


def test_gpus_that_do_not_reach_each_other_are_refused_by_name() -> None:
    gpus = FakeGpus(num_devices=2, peers=False)
    size = rank_layout(PLAIN, 2).block_bytes
    pools = [DevicePool(NUM_BLOCKS, size, rank, driver=gpus.process()) for rank in range(2)]
    pool = join_ranks(PLAIN, pools[0], [pools[1].handle()])
    with pytest.raises(TransferError, match="GPU 0 cannot reach the memory of GPU 1"):
        open_pool_copies(pool)
    pool.close()


def test_pools_of_different_kinds_are_refused() -> None:
    with (
        closing(Ranks(PLAIN, 2, is_on_gpus=False)) as hosts,
        closing(Ranks(PLAIN, 2, is_on_gpus=True)) as gpus,
    ):
        mixed = [hosts.pool.ranks[0], gpus.pool.ranks[1]]
        with pytest.raises(TransferError, match="of different kinds"):
            open_rank_copies(RankedPool(PLAIN, mixed, hosts.pool.handle().ranks))


def test_preempted_blocks_come_back_into_other_places(ranks: Ranks) -> None:
    host = open_host_blocks(ranks.pool, 5 * PLAIN.block_bytes + 1)
    assert host.num_slots == 5
    whole = whole_blocks(PLAIN)
    ranks.put(IDS, whole)
    host.swap_out(list(zip(IDS, range(5), strict=True)))
    ranks.damage()
    host.swap_in([(7, 1), (2, 4)])
    assert ranks.holds([7, 2], whole[[1, 4]])
    host.close()


@pytest.mark.parametrize("codec", ["none", "fp8"])
@pytest.mark.parametrize(("num_writers", "num_readers"), [(2, 1), (1, 2), (4, 2)])
async def test_workers_of_any_ranks_read_each_others_blocks_from_one_store(
    tmp_path: Path, is_on_gpus: bool, num_writers: int, num_readers: int, codec: str
) -> None:
    settings = Settings(
        store=f"file:{tmp_path}/s",
        store_codec=codec,
        host_tier_bytes=4 * PLAIN.block_bytes,
        store_buffer_bytes=3 * PLAIN.block_bytes,
    )
    whole = whole_blocks(PLAIN)
    numbers = whole[:, : PLAIN.payload_bytes].view(np.float32)
    numbers[:] = np.random.default_rng(3).integers(-8, 9, numbers.shape)  # all are E4M3 numbers
    for num_ranks, is_writing in ((num_writers, True), (num_readers, False)):
        with (
            closing(Ranks(PLAIN, num_ranks, is_on_gpus=is_on_gpus)) as ranks,
            closing(open_worker_store(settings, machine(PLAIN, ranks.pool))) as store,
        ):
            assert store.block_bytes == PLAIN.block_bytes
            access = StoreAccess(store, SharedLink(0))
            ranks.damage()
            if is_writing:
                ranks.put(IDS, whole)
                assert await access.write(PublishedBlocks("o", tuple(IDS), HASHES, ())) == 0
                assert store.storage.flush(SECONDS)
            else:
                assert (await access.read(HASHES, IDS, None)).num_blocks == 5
                assert ranks.holds(IDS, whole)
            access.close()


async def test_what_ranks_store_is_found_with_the_same_kv_cache_alone(tmp_path: Path) -> None:
    layout = LAYOUTS["fp8"]
    settings = Settings(store=f"file:{tmp_path}/s")
    whole = whole_blocks(layout)
    with (
        closing(Ranks(layout, 2, is_on_gpus=False)) as ranks,
        closing(open_worker_store(settings, machine(layout, ranks.pool))) as store,
    ):
        access = StoreAccess(store, SharedLink(0))
        ranks.put(IDS, whole)
        assert await access.write(PublishedBlocks("o", tuple(IDS), HASHES, ())) == 0
        access.close()
    pool = KVPool(NUM_BLOCKS, layout.block_bytes)
    with closing(open_worker_store(settings, machine(layout, pool))) as store:
        access = StoreAccess(store, SharedLink(0))
        assert (await access.read(HASHES, IDS, None)).num_blocks == 5
        assert (np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1)[IDS] == whole).all()
        access.close()
    other = replace(layout, scales=(1.0,) * 6)
    with closing(open_worker_store(settings, machine(other, pool))) as store:
        assert store.longest_prefix(HASHES) == 0
    pool.close()


def machine(layout: KVLayout, pool: KVPool | RankedPool) -> SimpleNamespace:
    """Return what a worker is made of, as far as a store cares."""
    return SimpleNamespace(model_fingerprint="0123456789abcdef", layout=layout, pool=pool)
