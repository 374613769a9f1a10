"""A worker opens the store that its settings name, or says why it cannot."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from common.config.settings import Settings
from common.errors import ConfigError
from common.kv.blocks import PublishedBlocks
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool
from common.storage.linked_store import LinkedStore
from common.traffic.shared_link import SharedLink
from common.worker.store_paths import BufferedPath, DirectPath
from common.worker.store_setup import open_worker_store, worker_store
from tests.support.fake_cuda import FakeGpus

LAYOUT = KVLayout(num_layers=2, block_size=8, num_kv_heads=1, head_dim=4, dtype="float32")
SIZE = LAYOUT.block_bytes


def machine(pool: object) -> SimpleNamespace:
    """Return what a worker is made of, as far as a store cares."""
    return SimpleNamespace(model_fingerprint="0123456789abcdef", layout=LAYOUT, pool=pool)


@pytest.fixture
def pool() -> Iterator[KVPool]:
    pool = KVPool(4, SIZE)
    yield pool
    pool.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file:{tmp_path}/s"


def test_blocks_go_from_the_pool_to_the_store_and_back(url: str, pool: KVPool) -> None:
    with closing(open_worker_store(Settings(store=url), machine(pool))) as opened:
        store = opened.storage
        pool.buffer[:SIZE] = b"\x07" * SIZE
        assert store.write(b"h" * 16, None, pool.buffer[:SIZE])
        assert store.flush(60.0)
        path = opened.open_path(LinkedStore(store, SharedLink(0)))
        assert isinstance(path, DirectPath)
        assert path.read([b"h" * 16], [2], None) == 1
        assert bytes(pool.buffer[2 * SIZE : 3 * SIZE]) == b"\x07" * SIZE
        assert opened.stats().num_tier_hits == 0


def test_blocks_are_stored_encoded_where_that_is_wished(url: str, pool: KVPool) -> None:
    settings = Settings(store=url, store_codec="fp8")
    numbers = np.frombuffer(pool.buffer, np.float32)
    numbers[:1024] = np.arange(1024) % 16  # all of them E4M3 numbers
    with closing(open_worker_store(settings, machine(pool))) as opened:
        path = opened.open_path(LinkedStore(opened.storage, SharedLink(0)))
        assert isinstance(path, DirectPath)
        assert path.write(PublishedBlocks("o", (0,), (b"h" * 16,), ())) == 0
        assert opened.storage.flush(60.0)
        assert path.read([b"h" * 16], [2], None) == 1
        count = LAYOUT.payload_bytes // 4
        assert (numbers[2048 : 2048 + count] == numbers[:count]).all()
        assert opened.codec_stats().num_decoded == 1
    with closing(open_worker_store(Settings(store=url), machine(pool))) as opened:
        assert opened.longest_prefix([b"h" * 16]) == 0, "it has another codec"


def test_encoded_blocks_are_prefetched_into_the_tier_as_the_pool_has_them(
    url: str, pool: KVPool
) -> None:
    settings = Settings(store=url, store_codec="fp8")
    numbers = np.frombuffer(pool.buffer, np.float32)
    numbers[:2048] = np.arange(2048) % 16
    hashes = [b"g" * 16, b"h" * 16]
    with closing(open_worker_store(settings, machine(pool))) as opened:
        path = opened.open_path(LinkedStore(opened.storage, SharedLink(0)))
        assert path.write(PublishedBlocks("o", (0, 1), tuple(hashes), ())) == 0
    settings = Settings(store=url, store_codec="fp8", host_tier_bytes=8 * SIZE)
    with closing(open_worker_store(settings, machine(pool))) as opened:
        ahead, linked = (LinkedStore(opened.storage, SharedLink(0)) for _ in range(2))
        assert opened.prefetch(ahead, hashes, None) == 2
        assert opened.open_path(linked).read(hashes, [2, 3], None) == 2
        assert linked.num_read == 0, "both are in the tier"
        count = LAYOUT.payload_bytes // 4
        for start in (0, 1024):
            assert (
                numbers[start + 2048 : start + 2048 + count] == numbers[start : start + count]
            ).all()


def test_a_codec_for_a_pool_that_is_quantised_already_is_refused_by_name(
    tmp_path: Path, url: str, pool: KVPool
) -> None:
    quantised = machine(pool)
    quantised.layout = replace(LAYOUT, dtype="bfloat16", kv_cache_dtype="float8_e4m3")
    with pytest.raises(ConfigError, match=r"store_codec fp8: .* float8_e4m3 already"):
        open_worker_store(Settings(store=url, store_codec="fp8"), quantised)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("store", ["none", "auto"])
def test_a_worker_that_is_told_of_no_store_has_none(store: str) -> None:
    with worker_store(Settings(store=store), machine(object())) as opened:
        assert opened is None


def test_blocks_pass_a_buffer_where_that_is_wished(url: str, pool: KVPool) -> None:
    settings = Settings(store=url, store_path="buffered", store_buffer_bytes=3 * SIZE)
    with worker_store(settings, machine(pool)) as opened:
        assert opened is not None
        path = opened.open_path(LinkedStore(opened.storage, SharedLink(0)))
        assert isinstance(path, BufferedPath)
        path.close()


def test_a_pool_on_a_gpu_has_a_buffer_and_a_tier_of_page_locked_memory(url: str) -> None:
    driver = FakeGpus().process()
    pool = DevicePool(4, SIZE, 0, driver=driver)
    settings = Settings(store=url, host_tier_bytes=3 * SIZE, store_buffer_bytes=2 * SIZE)
    before = driver.num_mappings
    with worker_store(settings, machine(pool)) as opened:
        assert opened is not None
        assert driver.num_mappings == before + 2
        path = opened.open_path(LinkedStore(opened.storage, SharedLink(0)))
        assert isinstance(path, BufferedPath)
        path.close()
    assert driver.num_mappings == before
    pool.close()


@pytest.mark.parametrize("setting", ["host_tier_bytes", "store_buffer_bytes"])
@pytest.mark.parametrize(("num_bytes", "reason"), [(SIZE - 1, "no block"), (2**50, "available")])
def test_host_memory_that_cannot_be_had_is_refused_by_its_name(
    url: str, pool: KVPool, setting: str, num_bytes: int, reason: str
) -> None:
    settings = Settings(store=url, store_path="buffered", **{setting: num_bytes})
    with pytest.raises(ConfigError, match=rf"{setting}.*{reason}"):
        open_worker_store(settings, machine(pool))


def test_a_pool_of_no_known_kind_is_refused_by_name(tmp_path: Path, url: str) -> None:
    class StrangePool:
        pass

    with pytest.raises(ConfigError, match=r"there is no way .* to a StrangePool, which"):
        open_worker_store(Settings(store=url), machine(StrangePool()))
    assert not (tmp_path / "s").exists()


def test_a_store_that_cannot_be_opened_is_told(tmp_path: Path, pool: KVPool) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot use the store's folder.*--store none serves"):
        open_worker_store(Settings(store=f"file:{tmp_path}/file/s"), machine(pool))
    with pytest.raises(ConfigError, match="say none, file:DIR or redis"):
        open_worker_store(Settings(store="s3:bucket"), machine(pool))
