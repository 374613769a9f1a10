"""Whatever happens to stored files: a miss or a clean block, and never an error."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.storage.file_store import FileStore
from tests.support.stored_blocks import (
    FILE_BYTES,
    IDENTITY,
    chain,
    files_of,
    folder_bytes,
    open_file_store,
    read_chain,
    store_chain,
)

HASHES = chain("a", 3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    opened = open_file_store(tmp_path)
    store_chain(opened, HASHES)
    yield opened
    opened.close()


def file_of(root: Path, block_hash: bytes) -> Path:
    (path,) = (path for path in files_of(root) if path.name.startswith(block_hash.hex()))
    return path


@pytest.mark.parametrize("place", [3, 100, 130, 4085, 4095, 4096, FILE_BYTES - 1])
def test_a_flipped_byte_is_a_miss_and_the_file_goes(
    store: FileStore, tmp_path: Path, place: int
) -> None:
    path = file_of(tmp_path, HASHES[1])
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with capture_logs() as lines:
        assert read_chain(store, HASHES) == [True, False, True]
    assert [line["kind"] for line in lines] == ["damaged"]
    assert not path.exists()
    assert store.longest_prefix(HASHES) == 1
    assert store.stats().num_damaged == 1
    store_chain(store, HASHES)
    assert read_chain(store, HASHES) == [True] * 3


@pytest.mark.parametrize("size", [0, 1, 4096, FILE_BYTES - 1])
def test_a_cut_file_is_a_miss_and_goes(store: FileStore, tmp_path: Path, size: int) -> None:
    path = file_of(tmp_path, HASHES[2])
    os.truncate(path, size)
    assert read_chain(store, HASHES) == [True, True, False]
    assert not path.exists()


def test_a_deleted_file_is_a_miss(store: FileStore, tmp_path: Path) -> None:
    file_of(tmp_path, HASHES[0]).unlink()
    assert read_chain(store, HASHES) == [False, True, True]
    assert store.longest_prefix(HASHES) == 0
    assert store.stats().num_damaged == 0
    store_chain(store, HASHES)
    assert store.longest_prefix(HASHES) == 3


def test_a_deleted_folder_is_a_miss_and_is_made_again(store: FileStore, tmp_path: Path) -> None:
    for shard in {path.parent for path in files_of(tmp_path)}:
        shutil.rmtree(shard)
    assert read_chain(store, HASHES) == [False] * 3
    for _ in range(2):
        store_chain(store, HASHES)
    assert read_chain(store, HASHES) == [True] * 3


@pytest.mark.parametrize("change", [{"model_fingerprint": "x"}, {"tenant_salt": "x"}])
def test_a_file_of_another_model_or_tenant_under_this_name_is_a_miss(
    store: FileStore,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    change: dict[str, str],
) -> None:
    elsewhere = tmp_path_factory.mktemp("other")
    other = open_file_store(elsewhere, identity=replace(IDENTITY, **change))  # type: ignore[arg-type]  # texts alone
    store_chain(other, HASHES)
    other.close()
    shutil.copy(file_of(elsewhere, HASHES[1]), file_of(tmp_path, HASHES[1]))
    assert read_chain(store, HASHES) == [True, False, True]
    assert store.stats().num_damaged == 1


def test_another_block_under_this_name_is_a_miss(store: FileStore, tmp_path: Path) -> None:
    shutil.copy(file_of(tmp_path, HASHES[0]), file_of(tmp_path, HASHES[1]))
    assert read_chain(store, HASHES) == [True, False, True]


def test_a_folder_that_was_emptied_fills_again(store: FileStore, tmp_path: Path) -> None:
    other = open_file_store(tmp_path)
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert read_chain(store, HASHES) == [False] * 3
    for opened, name in ((store, "a"), (other, "b"), (store, "c"), (other, "d")):
        store_chain(opened, chain(name, 3))
    assert read_chain(other, chain("d", 3)) == [True] * 3
    assert read_chain(store, chain("c", 3)) == [True] * 3
    other.close()
    store.close()
    assert json.loads((tmp_path / "ledger").read_text()) == {
        "stored_bytes": folder_bytes(tmp_path),
        "reserved": {},
    }


def test_a_folder_in_the_place_of_a_file_is_a_miss(store: FileStore, tmp_path: Path) -> None:
    path = file_of(tmp_path, HASHES[1])
    path.unlink()
    path.mkdir()
    with capture_logs() as lines:
        assert read_chain(store, HASHES) == [True, False, True]
    assert [line["kind"] for line in lines] == ["read_failed"]
    assert store.stats().num_read_errors == 1


def test_files_that_may_not_be_read_are_misses_and_stay(
    tmp_path: Path,
) -> None:
    if os.geteuid() == 0:
        pytest.skip("permissions do not bind the superuser")
    store = open_file_store(tmp_path)
    store_chain(store, HASHES)
    path = file_of(tmp_path, HASHES[1])
    path.chmod(0)
    assert read_chain(store, HASHES) == [True, False, True]
    assert path.exists()
    store.close()


class Mount:
    """A file system of its own, from the system's ``mount``; skips where that is forbidden."""

    def __init__(self, *arguments: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="flowpath-store-"))
        self._num_mounts = 0
        self.mount(*arguments)

    def mount(self, *arguments: str) -> None:
        done = subprocess.run(
            ["mount", *arguments, str(self.path)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            self.close()
            pytest.skip(f"mount is not possible here: {done.stderr.strip()}")
        self._num_mounts += 1

    def close(self) -> None:
        for _ in range(self._num_mounts):
            subprocess.run(["umount", "-l", str(self.path)], check=True)
        self.path.rmdir()


@pytest.fixture
def small_disk() -> Iterator[Mount]:
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    mounted = Mount("-t", "tmpfs", "-o", f"size={20 * FILE_BYTES}", "tmpfs")
    yield mounted
    mounted.close()


def test_a_full_disk_drops_blocks_and_makes_room_for_the_next(small_disk: Mount) -> None:
    store = open_file_store(small_disk.path, num_blocks=1000)
    with capture_logs() as lines:
        for number in range(12):
            store_chain(store, chain(f"{number}", 6))
            read_chain(store, chain(f"{number}", 6))
    assert {line["kind"] for line in lines} == {"write_failed"}
    stats = store.stats()
    assert stats.num_write_errors > 0
    assert stats.num_evicted > 0
    assert stats.stored_bytes == folder_bytes(small_disk.path)
    found = [store.longest_prefix(chain(f"{number}", 6)) for number in range(12)]
    assert found[0] == 0, "the oldest blocks are still there"
    assert sum(found[-3:]) > 0, "new blocks find no room"
    store.close()
    assert not list(small_disk.path.glob("writers/*"))


def test_a_folder_that_became_read_only_still_serves(small_disk: Mount) -> None:
    store = open_file_store(small_disk.path, num_blocks=10)
    store_chain(store, HASHES)
    small_disk.mount("-o", "bind", str(small_disk.path))
    store.close()
    subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk.path)], check=True)
    with capture_logs() as lines:
        reader = open_file_store(small_disk.path, num_blocks=10)
    assert [line.get("kind") for line in lines] == ["read_only", None]
    assert reader.longest_prefix(HASHES) == 3
    assert read_chain(reader, HASHES) == [True] * 3
    assert store_chain(reader, chain("b", 2)) == [False] * 2
    assert reader.stats().num_dropped_full == 2
    reader.close()
