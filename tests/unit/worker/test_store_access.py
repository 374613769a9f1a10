"""A worker's threads for the store, and the link that its reads pass."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from common.kv.blocks import PublishedBlocks
from common.kv.pool import KVPool
from common.storage.file_store import FileStore
from common.storage.interface import BlockStore, Memory, NoStore
from common.traffic.shared_link import SharedLink
from common.worker.store_access import StoreAccess
from common.worker.worker_store import WorkerStore
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    chain,
    open_file_store,
    payload,
    store_chain,
)

HASHES = chain("a", 8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    store = open_file_store(tmp_path / "store")
    assert all(store_chain(store, HASHES))
    yield store
    store.close()


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(16, BLOCK_BYTES)
    yield pool
    pool.close()


def access_to(store: BlockStore, pool: KVPool, link: SharedLink | None = None) -> StoreAccess:
    return StoreAccess(WorkerStore(store, pool), link or SharedLink(0))


def block_of(pool: KVPool, block_id: int) -> bytes:
    return bytes(pool.buffer[block_id * BLOCK_BYTES : (block_id + 1) * BLOCK_BYTES])


async def test_leading_blocks_are_counted_up_to_the_first_that_is_missing(
    store: FileStore, pool: KVPool
) -> None:
    access = access_to(store, pool)
    other = chain("b", 1)
    read = await access.read([*HASHES[2:5], *other, *HASHES[5:6]], [9, 3, 4, 5, 6], HASHES[1])
    assert read.num_blocks == 3
    assert read.seconds > 0
    assert [block_of(pool, n) for n in (9, 3, 4)] == [payload(h) for h in HASHES[2:5]]
    assert await access.longest_prefix([*HASHES, *other]) == 8
    access.close()


class Shelf(NoStore):
    """Takes three blocks."""

    def __init__(self) -> None:
        super().__init__(IDENTITY)
        self.taken: list[tuple[bytes, bytes | None, bytes]] = []

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy, while there is room."""
        if len(self.taken) == 3:
            return False
        self.taken.append((block_hash, previous, bytes(payload)))
        return True


async def test_blocks_are_written_from_where_they_lie_until_one_is_dropped(pool: KVPool) -> None:
    shelf = Shelf()
    access = access_to(shelf, pool)
    for block_id, block_hash in ((7, HASHES[0]), (2, HASHES[1])):
        start = block_id * BLOCK_BYTES
        pool.buffer[start : start + BLOCK_BYTES] = payload(block_hash)
    for place, block_id in ((0, 7), (1, 2)):
        held = PublishedBlocks("o", (block_id,), (HASHES[place],), tuple(HASHES[:place]))
        assert await access.write(held) == 0
    many = PublishedBlocks("o", tuple(range(6)), tuple(HASHES[2:]), tuple(HASHES[:2]))
    assert await access.write(many) == 5
    hashes, before = HASHES[:3], [None, *HASHES[:2]]
    assert [taken[:2] for taken in shelf.taken] == list(zip(hashes, before, strict=True))
    assert [taken[2] for taken in shelf.taken[:2]] == [payload(h) for h in HASHES[:2]]
    access.close()


async def test_reads_take_as_long_as_at_a_link_of_the_rate(store: FileStore, pool: KVPool) -> None:
    access = access_to(store, pool, SharedLink(8 * BLOCK_BYTES * 10))
    read = await access.read(HASHES, range(8), None)
    assert read.num_blocks == 8
    assert read.seconds > 0.08, "a tenth of a second, but for what a quantum gives"
    assert access.link_stats().kv_bytes == 8 * BLOCK_BYTES
    access.close()


async def test_a_worker_that_ends_does_not_wait_for_the_link(
    store: FileStore, pool: KVPool
) -> None:
    link = SharedLink(BLOCK_BYTES // 16)
    access = access_to(store, pool, link)
    reading = asyncio.ensure_future(access.read(HASHES, range(8), None))
    while store.stats().num_hits < 8:
        await asyncio.sleep(0)
    began = monotonic()
    await asyncio.to_thread(access.close)
    assert monotonic() - began < 60.0, "two minutes at the link's rate"
    assert (await reading).num_blocks == 8
