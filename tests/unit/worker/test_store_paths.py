"""Blocks pass the buffer between store and pool as they are, whatever room there is."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from time import perf_counter

import numpy as np
import pytest

from common.kv.blocks import PublishedBlocks
from common.kv.device_pool import DevicePool
from common.kv.pool import KVPool
from common.storage.host_tier import HostTier
from common.storage.interface import BlockStore, Memory, NoStore
from common.traffic.shared_link import SharedLink
from common.worker.host_memory import HostMemory
from common.worker.pool_copies import open_pool_copies
from common.worker.store_access import StoreAccess
from common.worker.store_buffer import BufferStats, StoreBuffer
from common.worker.store_paths import PlacedTier
from common.worker.worker_store import WorkerStore
from tests.support.fake_cuda import FakeDriver, FakeGpus
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    FLUSH_SECONDS,
    IDENTITY,
    chain,
    files_of,
    open_file_store,
    payload,
    store_chain,
)

HASHES = chain("a", 24)
IDS = [*range(30, 6, -3), *range(31, 7, -3), *range(32, 8, -3)]
"""Where they lie in the pool: in many pieces."""
NUM_BLOCKS = 40
SECONDS = 30.0


class Rig:
    """A pool in host memory or on a GPU, with a folder, a buffer and perhaps a tier."""

    def __init__(self, folder: Path, *, is_on_gpu: bool) -> None:
        self.folder = folder
        self.storage: BlockStore = open_file_store(folder)
        self.driver: FakeDriver = FakeGpus().process()
        self.pool: KVPool | DevicePool = (
            DevicePool(NUM_BLOCKS, BLOCK_BYTES, 0, driver=self.driver)
            if is_on_gpu
            else KVPool(NUM_BLOCKS, BLOCK_BYTES)
        )
        self.memories: list[HostMemory] = []
        self.accesses: list[StoreAccess] = []

    def blocks(self) -> np.ndarray:
        """Return the pool's blocks, in place."""
        memory = (
            np.frombuffer(self.pool.buffer, dtype=np.uint8)
            if isinstance(self.pool, KVPool)
            else self.pool.tensor.numpy()[: self.pool.num_bytes]
        )
        return memory.reshape(NUM_BLOCKS, BLOCK_BYTES)

    def memory(self, num_blocks: int) -> HostMemory:
        self.memories.append(HostMemory(self.pool, num_blocks * BLOCK_BYTES, "test"))
        return self.memories[-1]

    def open(self, num_slots: int, num_tier_blocks: int = 0) -> tuple[StoreAccess, StoreBuffer]:
        buffer = StoreBuffer(self.memory(num_slots))
        tier = None
        if num_tier_blocks:
            memory = self.memory(num_tier_blocks)
            tier = PlacedTier(HostTier(memory.buffer, BLOCK_BYTES), memory)
        access = StoreAccess(WorkerStore(self.storage, self.pool, tier, buffer), SharedLink(0))
        self.accesses.append(access)
        return access, buffer

    def fill(self) -> None:
        """Let the pool have the blocks."""
        for block_id, block_hash in zip(IDS, HASHES, strict=True):
            self.blocks()[block_id] = np.frombuffer(payload(block_hash), dtype=np.uint8)

    def has(self, count: int) -> bool:
        """Whether the pool has the first blocks."""
        blocks = self.blocks()
        return all(
            bytes(blocks[block_id]) == payload(block_hash)
            for block_id, block_hash in zip(IDS[:count], HASHES[:count], strict=True)
        )

    def close(self) -> None:
        for access in self.accesses:
            access.close()
        self.storage.close()
        for memory in self.memories:
            memory.close()
        self.pool.close()


@pytest.fixture(params=[False, True], ids=["memory", "gpu"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    with closing(Rig(tmp_path / "store", is_on_gpu=request.param)) as rig:
        yield rig


def held(start: int = 0, end: int = len(HASHES)) -> PublishedBlocks:
    return PublishedBlocks(
        "o", tuple(IDS[start:end]), tuple(HASHES[start:end]), tuple(HASHES[:start])
    )


@pytest.mark.parametrize("num_slots", [1, 2, 7, 96])
async def test_blocks_come_back_as_they_were_whatever_room_there_is(
    rig: Rig, num_slots: int
) -> None:
    access, buffer = rig.open(num_slots)
    rig.fill()
    assert await access.write(held(0, 5)) == 0
    assert await access.write(held(5)) == 0
    assert rig.storage.flush(FLUSH_SECONDS)
    rig.blocks()[:] = 0
    read = await access.read(HASHES, IDS, None)
    assert (read.num_blocks, read.num_from_storage) == (24, 24)
    assert read.seconds >= read.storage_seconds > 0
    assert rig.has(24)
    assert not rig.blocks()[[0, 1, 39]].any(), "other blocks are left alone"
    assert buffer.num_free == num_slots
    total = 24 * BLOCK_BYTES
    assert access.buffer_stats() == BufferStats(
        total, total, total, access.buffer_stats().wait_seconds
    )


async def test_what_comes_after_a_missing_block_is_not_used(rig: Rig) -> None:
    store_chain(rig.storage, HASHES)
    next(p for p in files_of(rig.folder) if p.name.startswith(HASHES[9].hex())).unlink()
    access, buffer = rig.open(16)
    assert (await access.read(HASHES, IDS, None)).num_blocks == 9
    assert rig.has(9)
    assert not rig.blocks()[IDS[9:]].any()
    assert buffer.num_free == 16


async def test_blocks_of_the_tier_go_into_the_pool_past_storage_and_buffer(rig: Rig) -> None:
    access, _ = rig.open(8, num_tier_blocks=64)
    rig.fill()
    assert await access.write(held(0, 10)) == 0
    assert rig.storage.flush(FLUSH_SECONDS)
    rig.storage.write(HASHES[10], HASHES[9], payload(HASHES[10]))
    assert rig.storage.flush(FLUSH_SECONDS)
    for from_storage in (1, 0):
        rig.blocks()[:] = 0
        before = access.buffer_stats()
        read = await access.read(HASHES[:11], IDS[:11], None)
        assert (read.num_blocks, read.num_from_storage) == (11, from_storage)
        assert rig.has(11)
        after = access.buffer_stats()
        assert after.loaded_bytes - before.loaded_bytes == from_storage * BLOCK_BYTES
        assert after.uploaded_bytes - before.uploaded_bytes == 11 * BLOCK_BYTES
    assert access.link_stats().kv_bytes == BLOCK_BYTES
    assert access.stats().num_tier_hits == 10 + 11


async def test_a_prefix_with_holes_in_the_tier_is_read_in_order(rig: Rig) -> None:
    store_chain(rig.storage, HASHES)
    access, _ = rig.open(8, num_tier_blocks=64)
    for start, end in ((3, 5), (9, 10), (20, 24)):
        await access.read(HASHES[start:end], IDS[start:end], HASHES[start - 1])
    rig.blocks()[:] = 0
    read = await access.read(HASHES, IDS, None)
    assert (read.num_blocks, read.num_from_storage) == (24, 24 - 7)
    assert rig.has(24)


def test_a_read_waits_for_room_and_then_goes_on(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    store_chain(rig.storage, HASHES)
    access, buffer = rig.open(2)
    taken = [*buffer.take(1), *buffer.take(1)]
    is_waiting, wait_for = Event(), buffer._changed.wait_for

    def say_and_wait(is_so: Callable[[], object]) -> object:
        is_waiting.set()
        return wait_for(is_so)

    monkeypatch.setattr(buffer._changed, "wait_for", say_and_wait)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(access._read, HASHES, IDS, None)
        assert is_waiting.wait(SECONDS)
        since = perf_counter()
        with pytest.raises(TimeoutError):
            reading.result(timeout=0.05)
        waited = perf_counter() - since
        assert rig.storage.stats().num_hits == 0
        buffer.give_back(taken[:1])
        assert reading.result(timeout=SECONDS).num_blocks == 24
    buffer.give_back(taken[1:])
    assert rig.has(24)
    assert access.buffer_stats().wait_seconds >= waited >= 0.05


@pytest.mark.parametrize("num_slots", [1, 3])
def test_reads_and_writes_that_crowd_each_other_all_end(rig: Rig, num_slots: int) -> None:
    store_chain(rig.storage, HASHES)
    access, buffer = rig.open(num_slots)
    others = PublishedBlocks("o", tuple(range(6)), tuple(chain("b", 6)), ())
    with ThreadPoolExecutor(2) as threads:
        for _ in range(10):
            writing = threads.submit(access._write, others)
            reading = threads.submit(access._read, HASHES, IDS, None)
            assert writing.result(timeout=SECONDS) == 0
            assert reading.result(timeout=SECONDS).num_blocks == 24
    assert buffer.num_free == num_slots
    assert rig.has(24)


async def test_a_dropped_block_takes_along_what_comes_after_it(rig: Rig) -> None:
    class Shelf(NoStore):
        room = 7

        def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
            self.room -= 1
            return self.room >= 0

    rig.storage.close()
    rig.storage = Shelf(IDENTITY)
    access, buffer = rig.open(12)
    assert await access.write(held(2, 20)) == 18 - 7
    assert buffer.num_free == 12


async def test_a_copy_that_fails_brings_nothing_and_loses_no_room(tmp_path: Path) -> None:
    with closing(Rig(tmp_path / "store", is_on_gpu=True)) as rig:
        store_chain(rig.storage, HASHES)
        access, buffer = rig.open(8, num_tier_blocks=30)
        for call in ("copy", "wait"):
            rig.driver.failing.add(call)
            assert (await access.read(HASHES, IDS, None)).num_blocks == 0
            assert await access.write(held()) == 24
            assert buffer.num_free == 8
            rig.driver.failing.clear()
        assert (await access.read(HASHES, IDS, None)).num_blocks == 24
        assert rig.has(24)


def test_copies_refuse_what_is_outside_of_either_memory(rig: Rig) -> None:
    copies, memory = open_pool_copies(rig.pool), rig.memory(3)
    for slot, block_id in ((3, 0), (0, NUM_BLOCKS), (-1, 0)):
        for copy in (copies.upload, copies.download):
            with pytest.raises(IndexError):
                copy(memory, [slot], [block_id])
    copies.close()
