from collections.abc import Iterator
from dataclasses import replace

import flowpath_native
import numpy as np
import pytest

from common.errors import RemoteProtocolError, TransferError
from common.kv.blocks import BlockManager, Hold
from common.kv.pool import KVPool
from common.transfer.backend import LinkRate, PeerLink, TransferBackend
from common.transfer.local import LocalBackend
from common.transfer.shm import ShmBackend
from common.transfer.verify import verify_blocks

BLOCK = 4096
NUM_BLOCKS = 16


@pytest.fixture
def source() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    for block in range(NUM_BLOCKS):
        write(pool, block, block + 1)
    yield pool
    pool.close()


@pytest.fixture
def target() -> Iterator[KVPool]:
    pool = KVPool(NUM_BLOCKS, BLOCK)
    pool.buffer[:] = b"\xee" * pool.num_bytes
    yield pool
    pool.close()


def write(pool: KVPool, block: int, value: int) -> None:
    """Fill a block with bytes that tell its number and the place inside of it."""
    place = np.arange(BLOCK, dtype=np.int64)
    content = ((place * 31 + value * 7) % 251).astype(np.uint8)
    pool.buffer[block * BLOCK : (block + 1) * BLOCK] = content.tobytes()


def read(pool: KVPool, block: int) -> bytes:
    return pool.buffer[block * BLOCK : (block + 1) * BLOCK].tobytes()


def test_shm_writes_every_pair_in_one_call_for_each_aligned_run(
    source: KVPool, target: KVPool
) -> None:
    link: PeerLink = ShmBackend(source).open_peer(target.handle())
    pairs_src, pairs_dst = [5, 3, 4, 9], [12, 10, 11, 0]
    report = link.write(pairs_src, pairs_dst)
    assert (report.num_blocks, report.num_calls, report.num_bytes) == (4, 2, 4 * BLOCK)
    assert report.seconds > 0
    for src, dst in zip(pairs_src, pairs_dst, strict=True):
        assert read(target, dst) == read(source, src)
    for block in set(range(NUM_BLOCKS)) - set(pairs_dst):
        assert read(target, block) == b"\xee" * BLOCK, "nothing else was touched"
    link.close()


def test_checksums_stand_in_the_order_of_the_pairs(source: KVPool, target: KVPool) -> None:
    link = ShmBackend(source).open_peer(target.handle())
    pairs_src, pairs_dst = [7, 2, 15, 3, 0, 7], [1, 9, 4, 10, 15, 5]
    report = link.write(pairs_src, pairs_dst)
    one_by_one = [flowpath_native.checksum(read(source, block)) for block in pairs_src]
    assert report.checksums.tolist() == one_by_one
    assert report.checksums.dtype == np.uint64
    assert verify_blocks(target, pairs_dst, report.checksums) is None
    link.close()


def test_the_first_wrong_block_is_found(source: KVPool, target: KVPool) -> None:
    link = ShmBackend(source).open_peer(target.handle())
    blocks = list(range(8))
    checksums = link.write(blocks, blocks).checksums
    for block in (6, 3):
        target.buffer[block * BLOCK + 100] ^= 1
    assert verify_blocks(target, blocks, checksums) == 3
    assert verify_blocks(target, [4, 5, 6], checksums[4:7]) == 2
    assert verify_blocks(target, [], checksums[:0]) is None
    link.close()


def test_blocks_that_changed_places_are_found(source: KVPool, target: KVPool) -> None:
    link = ShmBackend(source).open_peer(target.handle())
    checksums = link.write([0, 1], [1, 0]).checksums
    assert verify_blocks(target, [0, 1], checksums) == 0
    link.close()


def test_a_wrong_number_of_checksums_is_the_peers_fault(target: KVPool) -> None:
    with pytest.raises(RemoteProtocolError, match="1 checksums for 2 blocks"):
        verify_blocks(target, [0, 1], np.zeros(1, dtype=np.uint64))
    with pytest.raises(TransferError, match="cannot checksum 1 blocks"):
        verify_blocks(target, [NUM_BLOCKS], np.zeros(1, dtype=np.uint64))


def test_writing_nothing_is_no_call(source: KVPool, target: KVPool) -> None:
    link = ShmBackend(source).open_peer(target.handle())
    report = link.write([], [])
    assert (report.num_blocks, report.num_calls, len(report.checksums)) == (0, 0, 0)
    link.close()


@pytest.mark.parametrize(
    ("pairs_src", "pairs_dst"),
    [
        ([0, 1], [3, NUM_BLOCKS]),
        ([0, NUM_BLOCKS], [3, 4]),
        ([0, 1], [3, -1]),
        ([0, 1], [3, 3]),
        ([0], [3, 4]),
        ([0], [2**40]),
    ],
)
def test_a_write_that_cannot_be_right_moves_nothing(
    source: KVPool, target: KVPool, pairs_src: list[int], pairs_dst: list[int]
) -> None:
    link = ShmBackend(source).open_peer(target.handle())
    with pytest.raises(TransferError, match="cannot write"):
        link.write(pairs_src, pairs_dst)
    assert target.buffer.tobytes() == b"\xee" * target.num_bytes
    link.close()


def test_a_peer_with_other_blocks_is_refused_with_both_sizes(source: KVPool) -> None:
    other = KVPool(2, 2 * BLOCK)
    with pytest.raises(TransferError, match="the peer's blocks have 8192 bytes, ours 4096"):
        ShmBackend(source).open_peer(other.handle())
    other.close()


def backends(pool: KVPool) -> list[TransferBackend]:
    return [LocalBackend(pool), ShmBackend(pool)]


def test_a_closed_link_refuses_to_write(source: KVPool) -> None:
    for backend in backends(source):
        link = backend.open_peer(source.handle())
        link.close()
        link.close()
        with pytest.raises(TransferError, match="closed"):
            link.write([0], [1])
        with pytest.raises(TransferError, match="closed"):
            link.measure()


def test_measuring_writes_nothing_and_tells_both_rates(source: KVPool) -> None:
    before = source.buffer.tobytes()
    for backend in backends(source):
        link = backend.open_peer(source.handle())
        rate = link.measure()
        assert rate.num_bytes == source.num_bytes
        assert rate.gigabytes_per_second > 0
        assert rate.limit_gigabytes_per_second > 0
        link.close()
    assert source.buffer.tobytes() == before


def test_a_link_below_half_of_a_memcpy_is_flagged() -> None:
    assert LinkRate(1, 4.9, 10.0).is_flagged
    assert not LinkRate(1, 5.0, 10.0).is_flagged


def test_a_forked_partial_block_is_copied_inside_of_the_pool(source: KVPool) -> None:
    manager = BlockManager(NUM_BLOCKS, 64, 0, "m")
    manager.acquire("a", [1] * 100, hold=Hold.REQUEST, max_cached_tokens=0)
    copies = manager.fork("a", "a/1", 100)
    assert copies
    link = LocalBackend(source).open_peer(source.handle())
    report = link.write([src for src, _ in copies], [dst for _, dst in copies])
    assert (report.num_blocks, report.num_calls) == (1, 1)
    ours, childs = manager.block_ids("a"), manager.block_ids("a/1")
    assert [read(source, b) for b in ours] == [read(source, b) for b in childs]
    link.close()


def test_a_block_that_stays_in_place_is_no_copy_but_has_its_checksum(source: KVPool) -> None:
    link = LocalBackend(source).open_peer(source.handle())
    report = link.write([1, 2, 3], [1, 9, 3])
    assert (report.num_blocks, report.num_calls, report.num_bytes) == (1, 1, BLOCK)
    assert verify_blocks(source, [1, 2, 3], report.checksums) is None
    assert link.write([4, 5], [4, 5]).num_calls == 0
    link.close()


@pytest.mark.parametrize(
    ("pairs_src", "pairs_dst", "message"),
    [
        ([1, 2], [2, 3], "block 2 is both a source and a target"),
        ([1, 2], [2, 2], "block 2 is both a source and a target"),
        ([1, 1], [5, 5], "given twice"),
        ([1], [5, 6], "1 source and 2 target"),
    ],
)
def test_copies_inside_of_a_pool_whose_order_would_matter_are_refused(
    source: KVPool, pairs_src: list[int], pairs_dst: list[int], message: str
) -> None:
    before = source.buffer.tobytes()
    link = LocalBackend(source).open_peer(source.handle())
    with pytest.raises(TransferError, match=message):
        link.write(pairs_src, pairs_dst)
    assert source.buffer.tobytes() == before
    link.close()


def test_the_local_transport_reaches_the_own_pool_alone(source: KVPool, target: KVPool) -> None:
    for handle in (target.handle(), replace(source.handle(), nonce=b"1" * 16)):
        with pytest.raises(TransferError, match="not this worker's own pool"):
            LocalBackend(source).open_peer(handle)
