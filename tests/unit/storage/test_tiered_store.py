"""A store with a tier before it: what storage is asked, and that a hit is never wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.storage.file_store import FileStore
from common.storage.host_tier import HostTier
from common.storage.interface import NoStore
from common.storage.linked_store import LinkedStore
from common.storage.tiered_store import TieredStore
from common.traffic.shared_link import SharedLink
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    IDENTITY,
    chain,
    files_of,
    open_file_store,
    payload,
    read_chain,
    store_chain,
)

HASHES = chain("a", 8)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStore]:
    storage = open_file_store(tmp_path)
    yield storage
    storage.close()


def tiered(storage: FileStore, num_slots: int = 16) -> TieredStore:
    return TieredStore(storage, HostTier(bytearray(num_slots * BLOCK_BYTES), BLOCK_BYTES))


def test_what_was_read_once_is_not_read_from_storage_again(storage: FileStore) -> None:
    store_chain(storage, HASHES)
    store = tiered(storage)
    for _ in range(2):
        assert read_chain(store, HASHES) == [True] * 8
    assert (store.stats().num_hits, store.stats().num_tier_hits) == (8, 8)
    assert store.stats().tier_bytes == 8 * BLOCK_BYTES
    assert store.stats().read_bytes == 8 * BLOCK_BYTES, "what storage gave"


def test_a_block_is_in_the_tier_as_soon_as_it_is_taken(storage: FileStore, tmp_path: Path) -> None:
    store = tiered(storage)
    store_chain(store, HASHES)
    for path in files_of(tmp_path):
        path.unlink()
    assert store.longest_prefix(HASHES) == 8
    assert read_chain(store, HASHES) == [True] * 8
    assert (storage.stats().num_hits, storage.stats().num_misses) == (0, 0)


def test_a_block_that_storage_drops_is_not_kept() -> None:
    store = TieredStore(NoStore(IDENTITY), HostTier(bytearray(BLOCK_BYTES), BLOCK_BYTES))
    assert not store.write(HASHES[0], None, payload(HASHES[0]))
    assert store.longest_prefix(HASHES) == 0
    assert read_chain(store, HASHES[:1]) == [False]


def test_the_tier_and_storage_make_up_a_prefix_together(storage: FileStore) -> None:
    store_chain(storage, HASHES)
    store = tiered(storage)
    for first in (2, 5):
        read_chain(store, HASHES[first : first + 2], HASHES[first - 1])
    assert read_chain(store, HASHES) == [True] * 8
    assert store.stats().num_tier_hits == 4
    assert storage.stats().num_hits == 4 + 4


def test_a_prefix_that_storage_lost_parts_of_is_found_as_far_as_the_tier_helps(
    storage: FileStore, tmp_path: Path
) -> None:
    store_chain(storage, HASHES)
    store = tiered(storage)
    read_chain(store, HASHES[:4])
    for gone in (1, 2, 6):
        next(p for p in files_of(tmp_path) if p.name.startswith(HASHES[gone].hex())).unlink()
    assert read_chain(storage, HASHES).count(False) == 3
    assert storage.longest_prefix(HASHES) == 1
    assert store.longest_prefix(HASHES) == 6
    assert read_chain(store, HASHES) == [True] * 6 + [False, True]


def test_a_damaged_block_does_not_get_into_the_tier(storage: FileStore, tmp_path: Path) -> None:
    store_chain(storage, HASHES)
    path = next(p for p in files_of(tmp_path) if p.name.startswith(HASHES[3].hex()))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    store = tiered(storage)
    expected = [True] * 3 + [False] + [True] * 4
    for _ in range(2):
        assert read_chain(store, HASHES) == expected
    assert store.stats().num_tier_hits == 7


def test_more_ids_than_blocks_are_refused(storage: FileStore) -> None:
    with pytest.raises(ValueError, match="8 blocks for 3 ids"):
        tiered(storage).read(HASHES, bytearray(8 * BLOCK_BYTES), [0, 1, 2])


def test_only_what_comes_from_storage_passes_the_link(storage: FileStore) -> None:
    store_chain(storage, HASHES)
    link = SharedLink(0)
    linked = LinkedStore(storage, link)
    store = TieredStore(linked, HostTier(bytearray(16 * BLOCK_BYTES), BLOCK_BYTES))
    read_chain(store, HASHES[:3])
    read_chain(store, HASHES)
    read_chain(store, HASHES)
    assert link.stats().kv_bytes == 8 * BLOCK_BYTES
    assert linked.num_read == 8
    assert linked.read_seconds > 0
