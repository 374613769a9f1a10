"""A worker opens the store that its settings name, or says why it cannot."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.storage.interface import NoStore
from common.worker.store_setup import open_worker_store

LAYOUT = KVLayout(num_layers=2, block_size=8, num_kv_heads=1, head_dim=4, dtype="float32")


def machine(pool: object) -> SimpleNamespace:
    """Return what a worker is made of, as far as a store cares."""
    return SimpleNamespace(model_fingerprint="0123456789abcdef", layout=LAYOUT, pool=pool)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(4, LAYOUT.block_bytes)
    yield pool
    pool.close()


def test_blocks_go_from_the_pool_to_the_store_and_back(tmp_path: Path, pool: KVPool) -> None:
    store = open_worker_store(Settings(store=f"file:{tmp_path}/s"), machine(pool))
    pool.buffer[: LAYOUT.block_bytes] = b"\x07" * LAYOUT.block_bytes
    assert store.write(b"h" * 16, None, pool.buffer[: LAYOUT.block_bytes])
    assert store.flush(60.0)
    assert store.read([b"h" * 16], pool.buffer, [2]) == [True]
    start = 2 * LAYOUT.block_bytes
    assert bytes(pool.buffer[start : start + LAYOUT.block_bytes]) == b"\x07" * LAYOUT.block_bytes
    store.close()


@pytest.mark.parametrize("store", ["none", "auto"])
def test_a_worker_that_is_told_of_no_store_has_none(store: str) -> None:
    opened = open_worker_store(Settings(store=store), machine(object()))
    assert isinstance(opened, NoStore)


def test_a_pool_that_is_not_in_host_memory_is_refused_by_name(tmp_path: Path) -> None:
    class DevicePool:
        pass

    with pytest.raises(ConfigError, match=r"a store is for workers on a CPU.*is a DevicePool"):
        open_worker_store(Settings(store=f"file:{tmp_path}/s"), machine(DevicePool()))
    assert not (tmp_path / "s").exists()


def test_a_store_that_cannot_be_opened_is_told(tmp_path: Path, pool: KVPool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use the store's folder.*--store none serves"):
        open_worker_store(Settings(store=f"file:{tmp_path}/file/s"), machine(pool))
    with pytest.raises(ConfigError, match="say none, file:DIR or redis"):
        open_worker_store(Settings(store="s3:bucket"), machine(pool))
