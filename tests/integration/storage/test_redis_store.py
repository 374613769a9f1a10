"""A store in a real Redis server."""

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from common.storage.interface import BlockStore
from common.storage.open_store import open_store
from tests.support.stored_blocks import BLOCK_BYTES, IDENTITY, chain, read_chain, store_chain

redis = pytest.importorskip("redis", reason="the package redis is not installed")

HASHES = chain("a", 5)


class Server:
    """A Redis server of its own on a socket in a folder of its own, without any persistence."""

    def __init__(self, folder: Path, *settings: str) -> None:
        socket_path = folder / "redis.sock"
        self.url = f"unix://{socket_path}"
        self._process = subprocess.Popen(
            [
                *("redis-server", "--port", "0", "--unixsocket", str(socket_path)),
                *("--save", "", "--dir", str(folder), *settings),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if "ready to accept connections" in line.lower():
                break
        self.client = redis.Redis.from_url(self.url)

    def stop(self) -> None:
        self.client.close()
        self._process.terminate()
        self._process.communicate(timeout=30)


@pytest.fixture
def folder() -> Iterator[Path]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with tempfile.TemporaryDirectory(prefix="fp-") as name:  # a socket's path must be short
        yield Path(name)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    started = Server(folder)
    yield started
    started.stop()


@pytest.fixture
def store(server: Server) -> Iterator[BlockStore]:
    opened = open_store(server.url, IDENTITY)
    yield opened
    opened.close()


def test_a_chain_is_found_and_read_back_also_by_others(store: BlockStore, server: Server) -> None:
    assert store_chain(store, HASHES) == [True] * 5
    other = open_store(server.url, IDENTITY)
    assert other.longest_prefix([*HASHES[:4], *chain("b", 1)]) == 4
    assert read_chain(other, HASHES[1:], previous=HASHES[0]) == [True] * 4
    assert store_chain(other, HASHES) == [True] * 5
    assert other.stats().num_known == 5
    assert other.stats().read_bytes == 4 * BLOCK_BYTES
    other.close()
    other.close()


def test_orphans_and_other_identities_stay_out(store: BlockStore, server: Server) -> None:
    store_chain(store, HASHES[1:], previous=HASHES[0])
    assert store.stats().num_dropped_orphans == 4
    other = open_store(server.url, replace(IDENTITY, tenant_salt="another"))
    store_chain(store, HASHES)
    assert other.longest_prefix(HASHES) == 0
    assert read_chain(other, HASHES) == [False] * 5
    other.close()


@pytest.mark.parametrize("damage", ["flip", "cut", "swap"])
def test_a_damaged_value_is_a_miss_and_goes(store: BlockStore, server: Server, damage: str) -> None:
    store_chain(store, HASHES)
    keys = [f"flowpath:*:{each.hex()}" for each in HASHES[:2]]
    first, second = (server.client.keys(key)[0] for key in keys)
    value = server.client.get(first)
    changed = {"flip": value[:-1] + bytes([value[-1] ^ 1]), "cut": value[:-1]}
    server.client.set(first, changed.get(damage) or server.client.get(second))
    assert read_chain(store, HASHES) == [False, True, True, True, True]
    assert store.stats().num_damaged == 1
    assert not server.client.exists(first)


def test_a_server_without_room_drops_blocks(folder: Path) -> None:
    server = Server(folder, "--maxmemory-policy", "noeviction")
    used_bytes = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used_bytes + 20 * BLOCK_BYTES)
    store = open_store(server.url, IDENTITY)
    with capture_logs() as lines:
        store_chain(store, chain("a", 40))
    assert [line["kind"] for line in lines] == ["server_failed"]
    assert store.stats().num_write_errors > 0
    store.close()
    server.stop()


def test_a_server_that_is_gone_is_a_miss_and_a_drop(store: BlockStore, server: Server) -> None:
    store_chain(store, HASHES)
    server.stop()
    with capture_logs() as lines:
        assert store.longest_prefix(HASHES) == 0
        assert read_chain(store, HASHES) == [False] * 5
        store_chain(store, chain("b", 2))
    assert [line["kind"] for line in lines] == ["server_failed"]
    assert store.stats().num_write_errors == 2


def test_a_store_opens_before_its_server_does() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        store = open_store(f"redis://127.0.0.1:{port}/0?queue=64KiB", IDENTITY)
        assert store.longest_prefix(HASHES) == 0
        assert not store.register([bytearray(8)])
        with pytest.raises(ValueError, match="do not fit"):
            store.read(HASHES, bytearray(BLOCK_BYTES), range(5))
        store.close()
