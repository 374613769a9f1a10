import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from common.errors import ConfigError, TransferError
from common.kv import memory_file
from common.kv import pool as pool_module
from common.kv.pool import KVPool, PeerPool

BLOCK = 8192


def open_files() -> set[str]:
    """Return what is open of pools; what other tests have left there may go at any time."""
    targets = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            targets.add(str(link.readlink()) + link.name)
        except FileNotFoundError:
            continue  # the folder's own descriptor, closed by now
    return {target for target in targets if "flowpath-kv" in target}


def test_a_pool_is_zeroed_writable_and_page_aligned() -> None:
    pool = KVPool(4, BLOCK)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint8)
    assert numbers.size == pool.num_bytes == 4 * BLOCK
    assert numbers.ctypes.data % 4096 == 0
    assert not numbers.any()
    numbers[-1] = 7
    assert pool.buffer[4 * BLOCK - 1] == 7
    pool.close()


def test_a_peer_sees_every_write_and_the_owner_sees_its_writes() -> None:
    pool = KVPool(4, BLOCK)
    peer = PeerPool.open(pool.handle())
    assert (peer.num_blocks, peer.block_bytes, peer.num_bytes) == (4, BLOCK, 4 * BLOCK)
    pool.buffer[5] = 1
    peer.buffer[BLOCK] = 2
    assert (peer.buffer[5], pool.buffer[BLOCK]) == (1, 2)
    peer.close()
    peer.close()
    assert pool.buffer[BLOCK] == 2
    pool.close()


def test_opening_a_peer_changes_no_byte() -> None:
    pool = KVPool(4, BLOCK)
    np.frombuffer(pool.buffer, dtype=np.uint8)[:] = 0xAB
    peer = PeerPool.open(pool.handle())
    assert set(peer.buffer.tobytes()) == {0xAB}
    peer.close()
    pool.close()


def test_huge_pages_are_a_wish_that_changes_no_promise() -> None:
    pool = KVPool(1, 4 * 1024 * 1024, is_huge=True)
    peer = PeerPool.open(pool.handle())
    peer.buffer[-1] = 9
    assert pool.buffer[-1] == 9
    peer.close()
    pool.close()


def test_a_closed_pool_leaves_no_file_and_cannot_be_opened() -> None:
    before = open_files()
    pool = KVPool(1, BLOCK)
    handle = pool.handle()
    assert open_files() - before
    pool.close()
    pool.close()
    assert not open_files() - before
    with pytest.raises(TransferError, match="pid namespace"):
        PeerPool.open(handle)


def test_arrays_over_the_buffer_outlive_the_pool() -> None:
    before = open_files()
    pool = KVPool(1, BLOCK)
    numbers = np.frombuffer(pool.buffer, dtype=np.uint8)
    pool.close()
    del pool
    numbers[0] = 3
    assert numbers[0] == 3
    del numbers
    assert not open_files() - before


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"), [(0, BLOCK), (1, 0), (1, 5000), (-1, -4096)]
)
def test_an_impossible_pool_is_refused(num_blocks: int, block_bytes: int) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096"):
        KVPool(num_blocks, block_bytes)


def test_a_pool_beyond_the_available_memory_is_refused_before_it_is_filled() -> None:
    before = open_files()
    with pytest.raises(ConfigError, match=r"needs 1048576\.00 GiB .* available; make the pool sm"):
        KVPool(2**20, 2**30)
    assert not open_files() - before


def test_memory_that_fails_while_it_is_filled_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = open_files()
    monkeypatch.setattr(pool_module, "map_shared", fail)
    with pytest.raises(ConfigError, match="Cannot allocate memory; make the pool smaller"):
        KVPool(1, BLOCK)
    assert not open_files() - before


def test_a_handle_that_fits_another_file_is_refused() -> None:
    pool = KVPool(2, BLOCK)
    handle = pool.handle()
    stranger = os.memfd_create("flowpath-kv")
    os.ftruncate(stranger, 2 * BLOCK + 4096)
    other, pipe = os.pipe()
    wrong = [
        (replace(handle, nonce=b"0" * 16), "the nonce differs"),
        (replace(handle, num_blocks=3, num_bytes=3 * BLOCK), "do not fit"),
        (replace(handle, num_bytes=BLOCK), "do not fit"),
        (replace(handle, fd=stranger), "size is not sealed"),
        (replace(handle, fd=pipe), "it is pipe:"),
        (replace(handle, fd=10**6), "the peer is gone"),
        (replace(handle, pid=2**22 + 1), "the peer is gone"),
    ]
    for bad, message in wrong:
        with pytest.raises(TransferError, match=message):
            PeerPool.open(bad)
    for fd in (stranger, other, pipe):
        os.close(fd)
    pool.close()


def test_a_refused_opening_of_another_user_says_what_to_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    pool = KVPool(1, BLOCK)
    monkeypatch.setattr(pool_module, "open_peer_file", refuse)
    with pytest.raises(TransferError, match="run as the same user"):
        PeerPool.open(pool.handle())
    pool.close()


def test_nobody_can_shrink_the_file_under_a_mapping() -> None:
    pool = KVPool(1, BLOCK)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.handle().fd, 4096)
    pool.close()


def test_a_kernel_without_the_populate_advice_still_gets_its_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_file, "MADV_POPULATE_WRITE", 9999)
    pool = KVPool(2, BLOCK)
    assert pool.buffer.tobytes() == bytes(2 * BLOCK)
    pool.close()


def test_available_memory_is_bounded_by_the_machine() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory_file.available_bytes() <= total


def test_a_control_groups_limit_bounds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_file, "_cgroup_limits", lambda: [(10_000, 4_000), (50_000, 60_000)])
    assert memory_file.available_bytes() == 0
    monkeypatch.setattr(memory_file, "_cgroup_limits", lambda: [(10_000, 4_000)])
    assert memory_file.available_bytes() == 6_000
