"""Which store a URL opens, and what a wrong one is told."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.storage.file_store import FileStore
from common.storage.interface import NoStore
from common.storage.open_store import open_store
from tests.support.stored_blocks import FILE_BYTES, IDENTITY, chain, read_chain, store_chain


def test_a_file_url_names_folder_and_bounds(tmp_path: Path) -> None:
    folder = tmp_path / "a store"
    store = open_store(f"file:{tmp_path}/a%20store?capacity=1MiB&queue=64KiB&depth=4", IDENTITY)
    assert isinstance(store, FileStore)
    assert folder.is_dir()
    assert store.stats().capacity_bytes == 2**20
    store.close()
    store.close()


@pytest.mark.parametrize("io", ["threads", "auto"])
def test_the_way_of_io_can_be_chosen(tmp_path: Path, io: str) -> None:
    store = open_store(f"file://{tmp_path}?io={io}", IDENTITY)
    assert store_chain(store, chain("a", 3)) == [True] * 3
    assert read_chain(store, chain("a", 3)) == [True] * 3
    store.close()


def test_none_keeps_nothing() -> None:
    store = open_store("none", IDENTITY)
    assert isinstance(store, NoStore)
    assert store_chain(store, chain("a", 2)) == [False] * 2
    assert store.longest_prefix(chain("a", 2)) == 0
    assert read_chain(store, chain("a", 2)) == [False] * 2
    assert not store.register([bytearray(1)])
    assert store.stats().num_blocks == 0
    store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "say none, file:DIR or redis"),
        ("file:", "say none, file:DIR or redis"),
        ("file://host/path", "say none, file:DIR or redis"),
        ("ftp://host/path", "say none, file:DIR or redis"),
        ("file:{dir}?capacity=much", "capacity is not a size"),
        ("file:{dir}?size=1GiB&capacity=1GiB", "there is no option size"),
        ("file:{dir}?capacity=4096", "holds no block"),
        ("file:{dir}?depth=0", "1 to 1024"),
        ("file:{dir}?io=pigeons", "neither io_uring nor threads"),
        ("file:{dir}/taken", "cannot use the store's folder"),
        ("redis://localhost:1/0?colour=red", "there is no option colour"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason(tmp_path: Path, url: str, words: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match=words):
        open_store(url.format(dir=tmp_path), IDENTITY)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_fingerprint": "m" * 33}, "model fingerprint"),
        ({"layout_fingerprint": ""}, "layout fingerprint"),
        ({"dtype": "größe"}, "dtype"),
        ({"block_bytes": 5000}, "multiples of 4096"),
    ],
)
def test_an_identity_that_no_header_holds_is_refused(
    tmp_path: Path, change: dict[str, str | int], words: str
) -> None:
    identity = replace(IDENTITY, **change)  # type: ignore[arg-type]  # one field of its type each
    with pytest.raises(ConfigError, match=words):
        open_store(f"file:{tmp_path}?capacity={100 * FILE_BYTES}", identity)
