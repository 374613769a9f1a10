"""Workers of several ranks as one source and one target of blocks."""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from common.errors import TransferError
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, PeerPool
from common.transfer.backend import PeerLink
from common.transfer.heads import rank_layout
from common.transfer.ranks import RankedPool, RanksLink, combine_checksums
from common.transfer.verify import verify_blocks

LAYOUT = KVLayout(3, 16, 4, 40, "float16")
NUM_BLOCKS = 6
PAIRS = ([4, 0, 1, 2], [1, 3, 4, 5])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def worker(stack: ExitStack, num_ranks: int, seed: int | None) -> RankedPool:
    """Make a worker's pools; with a seed its blocks hold the heads that the seed gives."""
    own = rank_layout(LAYOUT, num_ranks)
    assert own.block_bytes > own.payload_bytes
    pools = [KVPool(NUM_BLOCKS, own.block_bytes) for _ in range(num_ranks)]
    for pool in pools:
        stack.callback(pool.close)
    ranked = RankedPool(LAYOUT, pools)
    if seed is None:
        for pool in pools:
            pool.buffer[:] = b"\xee" * pool.num_bytes
    else:
        shape = (NUM_BLOCKS, 3, 2, 16, 4, 80)
        heads = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        for pool, part in zip(pools, np.split(heads, num_ranks, axis=4), strict=True):
            blocks = np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1)
            blocks[:, : own.payload_bytes] = part.reshape(NUM_BLOCKS, -1)
    return ranked


def heads_of(ranked: RankedPool, block_ids: list[int]) -> bytes:
    own = rank_layout(LAYOUT, len(ranked.ranks))
    parts = [
        np.frombuffer(pool.buffer, np.uint8)
        .reshape(NUM_BLOCKS, -1)[block_ids, : own.payload_bytes]
        .reshape(len(block_ids), 3, 2, 16, -1, 80)
        for pool in ranked.ranks
    ]
    return np.concatenate(parts, axis=4).tobytes()


@pytest.mark.parametrize(
    ("num_sources", "num_targets"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (4, 4)]
)
def test_blocks_arrive_whole_and_verified_whatever_the_ranks(
    stack: ExitStack, num_sources: int, num_targets: int
) -> None:
    source = worker(stack, num_sources, seed=1)
    target = worker(stack, num_targets, seed=None)
    link: PeerLink = RanksLink.between(source, target.ranks)
    report = link.write(*PAIRS)
    assert heads_of(target, PAIRS[1]) == heads_of(source, PAIRS[0])
    assert report.num_blocks == 4
    assert report.num_bytes == 4 * target.block_bytes
    is_whole = num_sources == num_targets
    # Blocks 0 to 2 go to neighbours: one run; else a piece a token, layer and plane.
    pairs = max(num_sources, num_targets)
    assert report.num_calls == (2 * pairs if is_whole else 4 * pairs * 3 * 2 * 16)
    assert verify_blocks(target, PAIRS[1], report.checksums) is None
    for pool in target.ranks:
        untouched = np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1)[[0, 2]]
        assert (untouched == 0xEE).all()
    rate = link.measure()
    assert rate.gigabytes_per_second > 0
    link.close()
    with pytest.raises(TransferError, match="is closed"):
        link.write(*PAIRS)


def test_a_changed_byte_in_any_rank_is_found(stack: ExitStack) -> None:
    source, target = worker(stack, 1, seed=1), worker(stack, 4, seed=None)
    report = RanksLink.between(source, target.ranks).write(*PAIRS)
    for index, pool in enumerate(target.ranks):
        place = PAIRS[1][index] * pool.block_bytes + 77
        pool.buffer[place] ^= 1
        assert verify_blocks(target, PAIRS[1], report.checksums) == index
        pool.buffer[place] ^= 1
    assert verify_blocks(target, PAIRS[1], report.checksums) is None


def test_ranks_that_changed_places_are_found() -> None:
    first, second = (np.array([number], np.uint64) for number in (5, 9))
    assert combine_checksums([first, second]) != combine_checksums([second, first])
    assert combine_checksums([first]) is first


def test_a_peer_with_other_blocks_is_refused(stack: ExitStack) -> None:
    source, target = worker(stack, 2, seed=1), worker(stack, 4, seed=None)
    with pytest.raises(TransferError, match=r"the peer's rank 0 have 8192 bytes, not 16384"):
        RanksLink.between(source, target.ranks[:2])
    with pytest.raises(ValueError, match="blocks of rank 0 have"):
        RankedPool(LAYOUT, target.ranks[:2])


def test_a_mapped_pool_is_written_and_unmapped_with_the_link(stack: ExitStack) -> None:
    source, target = worker(stack, 1, seed=1), worker(stack, 2, seed=None)
    mapped = [PeerPool.open(pool.handle()) for pool in target.ranks if isinstance(pool, KVPool)]
    link = RanksLink.between(source, mapped)
    report = link.write(*PAIRS)
    assert verify_blocks(target, PAIRS[1], report.checksums) is None
    link.close()
    with pytest.raises(ValueError, match="released"):
        mapped[0].buffer[0]


def test_blocks_are_copied_inside_of_a_workers_own_pools(stack: ExitStack) -> None:
    own = worker(stack, 2, seed=1)
    link = RanksLink.within(own)
    report = link.write([4, 0], [1, 3])
    assert heads_of(own, [1, 3]) == heads_of(own, [4, 0])
    assert verify_blocks(own, [1, 3], report.checksums) is None
    link.close()
    assert heads_of(own, [1]) == heads_of(own, [4]), "the pools are there"


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("pairs", [([0, 9], [1, 2]), ([0, 1], [2, 2]), ([0], [1, 2])])
def test_bad_pairs_are_refused(
    stack: ExitStack, num_sources: int, num_targets: int, pairs: tuple[list[int], list[int]]
) -> None:
    source, target = worker(stack, num_sources, seed=1), worker(stack, num_targets, seed=None)
    with pytest.raises(TransferError, match="cannot write"):
        RanksLink.between(source, target.ranks).write(*pairs)
