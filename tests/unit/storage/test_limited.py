from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import perf_counter

import pytest

from common.storage.file_store import FileStore
from common.storage.limited import LimitedStore, limit_store
from common.traffic.shared_link import QUANTUM_SECONDS, SharedLink
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    FLUSH_SECONDS,
    IDENTITY,
    chain,
    open_file_store,
    payload,
    store_chain,
)


@pytest.fixture
def inner(tmp_path: Path) -> Iterator[FileStore]:
    store = open_file_store(tmp_path / "store", io="threads")
    yield store
    store.close()


def test_a_read_takes_the_links_time_and_the_counts_say_so(inner: FileStore) -> None:
    store = LimitedStore(inner, SharedLink(BLOCK_BYTES * 100))
    hashes, buffer = chain("a", 5), bytearray(6 * BLOCK_BYTES)
    assert all(store_chain(store, hashes))
    assert store.longest_prefix(hashes) == 5
    began = perf_counter()
    assert store.read(hashes, buffer, [5, 1, 2, 3, 4]) == [True] * 5
    took = perf_counter() - began
    assert took >= 0.05 - QUANTUM_SECONDS - 1e-9
    assert buffer[5 * BLOCK_BYTES :] == payload(hashes[0])
    stats = store.stats()
    assert (stats.num_hits, stats.read_bytes) == (5, 5 * BLOCK_BYTES)
    assert inner.stats().read_ns / 1e9 < stats.read_ns / 1e9 <= took


def test_writes_are_not_limited(inner: FileStore) -> None:
    store = LimitedStore(inner, SharedLink(1))
    assert store.write(chain("a", 1)[0], None, payload(chain("a", 1)[0]))
    assert store.flush(FLUSH_SECONDS)
    assert store.longest_prefix(chain("a", 1)) == 1


def test_a_lifted_limit_lets_a_read_end(inner: FileStore) -> None:
    link = SharedLink(1)
    store, hashes = limit_store(inner, link), chain("a", 1)
    store_chain(store, hashes)
    buffer = bytearray(BLOCK_BYTES)
    reading = Thread(target=store.read, args=(hashes, buffer, [0]))
    reading.start()
    link.lift()
    reading.join(10)
    assert not reading.is_alive()
    assert buffer == payload(hashes[0])


def test_a_link_without_limit_leaves_a_store_as_it_is(inner: FileStore) -> None:
    assert limit_store(inner, SharedLink(0)) is inner
    assert limit_store(inner, SharedLink(1)).identity == IDENTITY
