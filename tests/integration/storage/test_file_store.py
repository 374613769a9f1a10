"""A store in a folder: what is written is found, also by others and after a restart."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.kv.pool import KVPool
from common.storage.file_store import FileStore
from common.storage.folder import StoreFolder
from common.storage.folder_index import FolderIndex
from tests.support.stored_blocks import (
    BLOCK_BYTES,
    FILE_BYTES,
    IDENTITY,
    chain,
    files_of,
    folder_bytes,
    open_file_store,
    payload,
    read_chain,
    store_chain,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = open_file_store(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_a_chain_is_found_and_read_back(tmp_path: Path, io: str) -> None:
    store, hashes = open_file_store(tmp_path, io=io), chain("a", 40)
    assert store.longest_prefix(hashes) == 0
    assert store_chain(store, hashes) == [True] * 40
    assert store.longest_prefix(hashes) == 40
    assert store.longest_prefix([*hashes[:7], *chain("b", 2)]) == 7
    assert store.longest_prefix(hashes[5:], previous=hashes[4]) == 35
    assert read_chain(store, hashes[5:], previous=hashes[4]) == [True] * 35
    stats = store.stats()
    assert (stats.num_hits, stats.num_misses, stats.num_written) == (35, 0, 40)
    assert stats.stored_bytes == folder_bytes(tmp_path) == 40 * FILE_BYTES
    assert stats.read_bytes == 35 * BLOCK_BYTES
    store.close()


def test_blocks_go_straight_to_their_places_in_a_pool(store: FileStore) -> None:
    hashes = chain("a", 4)
    store_chain(store, hashes)
    pool = KVPool(8, BLOCK_BYTES)
    store.register([pool.buffer])
    assert store.read(hashes, pool.buffer, [6, 1, 3, 0]) == [True] * 4
    for block_hash, block in zip(hashes, [6, 1, 3, 0], strict=True):
        place = pool.buffer[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        assert place == payload(block_hash)
    with pytest.raises(ValueError, match="leaves no room"):
        store.read(hashes[:1], pool.buffer, [8])
    store.close()
    pool.close()


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    first = open_file_store(tmp_path)
    store_chain(first, chain("a", 10))
    first.close()
    second = open_file_store(tmp_path)
    assert second.stats().num_blocks == 10
    assert second.longest_prefix(chain("a", 12)) == 10
    assert read_chain(second, chain("a", 10)) == [True] * 10
    second.close()
    assert not list(tmp_path.glob("writers/*")), "a writer that left is still there"


def test_blocks_of_another_process_are_found_without_a_restart(
    store: FileStore, tmp_path: Path
) -> None:
    other = open_file_store(tmp_path)
    store_chain(other, chain("a", 6))
    assert store.longest_prefix(chain("a", 6)) == 6
    assert read_chain(store, chain("a", 6)) == [True] * 6
    store_chain(store, chain("a", 8)[6:], previous=chain("a", 6)[-1])
    assert read_chain(other, chain("a", 8)) == [True] * 8
    assert other.stats().num_blocks == 8
    other.close()


def test_what_two_write_is_stored_once(store: FileStore, tmp_path: Path) -> None:
    other = open_file_store(tmp_path)
    store_chain(store, chain("a", 5))
    assert store_chain(store, chain("a", 5)) == [True] * 5
    assert store_chain(other, chain("a", 5)) == [True] * 5
    assert (store.stats().num_known, other.stats().num_known) == (5, 5)
    assert len(files_of(tmp_path)) == 5
    other.close()


def test_a_block_that_nobody_could_find_is_dropped(store: FileStore, tmp_path: Path) -> None:
    hashes = chain("a", 3)
    store_chain(store, hashes[1:], previous=hashes[0])
    assert store.stats().num_dropped_orphans == 2
    assert files_of(tmp_path) == []


@pytest.mark.parametrize(
    "change",
    [
        {"model_fingerprint": "another"},
        {"layout_fingerprint": "another"},
        {"dtype": "float32"},
        {"tenant_salt": "another"},
        {"block_bytes": BLOCK_BYTES * 2},
    ],
)
def test_what_belongs_to_another_identity_is_not_found(
    store: FileStore, tmp_path: Path, change: dict[str, str | int]
) -> None:
    identity = replace(IDENTITY, **change)  # type: ignore[arg-type]  # one field of its type each
    other = open_file_store(tmp_path, identity=identity)
    store_chain(store, chain("a", 3))
    assert other.longest_prefix(chain("a", 3)) == 0
    assert read_chain(other, chain("a", 3)) == [False] * 3
    store_chain(other, chain("a", 3))
    assert read_chain(other, chain("a", 3)) == [True] * 3
    assert read_chain(store, chain("a", 3)) == [True] * 3
    other.close()


def test_a_tenants_salt_is_nowhere_in_the_folder(tmp_path: Path) -> None:
    store = open_file_store(tmp_path, identity=replace(IDENTITY, tenant_salt="s3cret-salt"))
    store_chain(store, chain("a", 1))
    store.close()
    (path,) = files_of(tmp_path)
    assert b"s3cret-salt" not in path.read_bytes()


def test_tails_are_evicted_first_and_the_bound_holds(tmp_path: Path) -> None:
    store = open_file_store(tmp_path, num_blocks=10)
    store_chain(store, chain("old", 6))
    store_chain(store, chain("new", 3))
    for length in range(4, 8):
        store_chain(store, chain("new", length)[length - 1 :], chain("new", length)[length - 2])
        assert folder_bytes(tmp_path) <= 10 * FILE_BYTES
    assert store.longest_prefix(chain("new", 7)) == 7
    assert store.longest_prefix(chain("old", 6)) == 3
    assert store.stats().num_evicted == 3
    store.close()


def test_a_block_that_was_read_outlives_one_that_was_not(tmp_path: Path) -> None:
    store = open_file_store(tmp_path, num_blocks=6)
    store_chain(store, chain("a", 3))
    store_chain(store, chain("b", 3))
    read_chain(store, chain("a", 3))
    store_chain(store, chain("c", 3))
    lengths = [store.longest_prefix(chain(name, 3)) for name in "abc"]
    assert lengths == [3, 0, 3]
    store.close()


def test_another_models_blocks_are_evicted_when_nobody_uses_them(tmp_path: Path) -> None:
    former = open_file_store(tmp_path, 8, identity=replace(IDENTITY, model_fingerprint="former"))
    store_chain(former, chain("a", 8))
    former.close()
    store = open_file_store(tmp_path, num_blocks=8)
    store_chain(store, chain("b", 8))
    assert read_chain(store, chain("b", 8)) == [True] * 8
    assert folder_bytes(tmp_path) == 8 * FILE_BYTES
    store.close()


def test_a_chain_longer_than_the_store_keeps_its_beginning(tmp_path: Path) -> None:
    store = open_file_store(tmp_path, num_blocks=5)
    store_chain(store, chain("a", 12))
    assert store.longest_prefix(chain("a", 12)) == 5
    assert folder_bytes(tmp_path) <= 5 * FILE_BYTES
    store.close()


def test_a_use_that_another_process_noted_counts(tmp_path: Path) -> None:
    store, other = open_file_store(tmp_path, 4), open_file_store(tmp_path, 4)
    store_chain(store, [*chain("a", 1)])
    store_chain(store, [*chain("b", 1)])
    for path in files_of(tmp_path):
        if path.name.startswith(chain("a", 1)[0].hex()):
            os.utime(path, ns=(time.time_ns(), time.time_ns()))
    store_chain(store, chain("c", 3))
    assert [store.longest_prefix(chain(name, 1)) for name in "abc"] == [1, 0, 1]
    other.close()
    store.close()


def test_strange_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    strange = tmp_path / IDENTITY.model_fingerprint / "00"
    strange.mkdir(parents=True)
    for path in (tmp_path / "notes.txt", strange / "notes.txt", strange / ("f" * 32)):
        path.write_text("mine")
    store = open_file_store(tmp_path, num_blocks=2)
    store_chain(store, chain("a", 2))
    store_chain(store, chain("b", 2))
    store.close()
    assert len(list(tmp_path.rglob("notes.txt"))) == 2
    assert (strange / ("f" * 32)).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stored_bytes": "x", "reserved": {}}'])
def test_a_damaged_ledger_is_counted_anew(tmp_path: Path, text: str) -> None:
    store = open_file_store(tmp_path, num_blocks=4)
    store_chain(store, chain("a", 4))
    (tmp_path / "ledger").write_text(text)
    store_chain(store, chain("b", 2))
    assert read_chain(store, chain("b", 2)) == [True] * 2
    assert folder_bytes(tmp_path) <= 4 * FILE_BYTES
    store.close()


def test_a_block_that_others_removed_and_wrote_again_is_counted_again(tmp_path: Path) -> None:
    folder = StoreFolder(tmp_path)
    index = FolderIndex(folder)
    store = open_file_store(tmp_path)
    store_chain(store, chain("a", 1))
    (path,) = files_of(tmp_path)
    found = []
    for change in (lambda: None, path.unlink, lambda: path.write_bytes(bytes(FILE_BYTES))):
        change()
        index.refresh()
        found.append(index.totals())
    assert found == [(1, FILE_BYTES), (0, 0), (1, FILE_BYTES)]
    store.close()
    folder.close()
