"""Workers of several ranks as one source and one target of blocks."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from common.errors import TransferError
from common.kv.device_pool import DevicePool
from common.kv.layout import KVLayout
from common.kv.pool import KVPool, PeerPool
from common.transfer.backend import PeerLink
from common.transfer.cuda_ranks import DeviceRank
from common.transfer.heads import rank_layout
from common.transfer.local import LocalBackend
from common.transfer.ranks import MemoryRank, RankedPool, RanksLink, combine_checksums
from common.transfer.ranks_transport import RANKS, as_ranked, join_ranks, open_ranks
from common.transfer.verify import verify_blocks
from tests.support.fake_cuda import FakeGpus

LAYOUT = KVLayout(3, 16, 4, 40, "float16")
NUM_BLOCKS = 6
PAIRS = ([4, 0, 1, 2], [1, 3, 4, 5])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@dataclass(frozen=True)
class Worker:
    pools: list[KVPool]
    ranked: RankedPool


def worker(stack: ExitStack, num_ranks: int, seed: int | None) -> Worker:
    """Make a worker's pools; with a seed its blocks hold the heads that the seed gives."""
    own = rank_layout(LAYOUT, num_ranks)
    assert own.block_bytes > own.payload_bytes
    pools = [KVPool(NUM_BLOCKS, own.block_bytes) for _ in range(num_ranks)]
    for pool in pools:
        stack.callback(pool.close)
    if seed is None:
        for pool in pools:
            pool.buffer[:] = b"\xee" * pool.num_bytes
    else:
        shape = (NUM_BLOCKS, 3, 2, 16, 4, 80)
        heads = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
        for pool, part in zip(pools, np.split(heads, num_ranks, axis=4), strict=True):
            blocks = np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1)
            blocks[:, : own.payload_bytes] = part.reshape(NUM_BLOCKS, -1)
    ranks = [MemoryRank(pool) for pool in pools]
    return Worker(pools, RankedPool(LAYOUT, ranks, [pool.handle() for pool in pools]))


def heads_of(worker: Worker, block_ids: list[int]) -> bytes:
    own = rank_layout(LAYOUT, len(worker.pools))
    parts = [
        np.frombuffer(pool.buffer, np.uint8)
        .reshape(NUM_BLOCKS, -1)[block_ids, : own.payload_bytes]
        .reshape(len(block_ids), 3, 2, 16, -1, 80)
        for pool in worker.pools
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
    link: PeerLink = RanksLink.between(source.ranked, target.ranked.ranks)
    report = link.write(*PAIRS)
    assert heads_of(target, PAIRS[1]) == heads_of(source, PAIRS[0])
    assert report.num_blocks == 4
    assert report.num_bytes == 4 * target.ranked.block_bytes
    is_whole = num_sources == num_targets
    # Blocks 0 to 2 go to neighbours: one run; else a piece a token, layer and plane.
    pairs = max(num_sources, num_targets)
    assert report.num_calls == (2 * pairs if is_whole else 4 * pairs * 3 * 2 * 16)
    assert verify_blocks(target.ranked, PAIRS[1], report.checksums) is None
    for pool in target.pools:
        untouched = np.frombuffer(pool.buffer, np.uint8).reshape(NUM_BLOCKS, -1)[[0, 2]]
        assert (untouched == 0xEE).all()
    rate = link.measure()
    assert rate.gigabytes_per_second > 0
    link.close()
    with pytest.raises(TransferError, match="is closed"):
        link.write(*PAIRS)


def test_a_changed_byte_in_any_rank_is_found(stack: ExitStack) -> None:
    source, target = worker(stack, 1, seed=1), worker(stack, 4, seed=None)
    report = RanksLink.between(source.ranked, target.ranked.ranks).write(*PAIRS)
    for index, pool in enumerate(target.pools):
        place = PAIRS[1][index] * pool.block_bytes + 77
        pool.buffer[place] ^= 1
        assert verify_blocks(target.ranked, PAIRS[1], report.checksums) == index
        pool.buffer[place] ^= 1
    assert verify_blocks(target.ranked, PAIRS[1], report.checksums) is None


def test_ranks_that_changed_places_are_found() -> None:
    first, second = (np.array([number], np.uint64) for number in (5, 9))
    assert combine_checksums([first, second]) != combine_checksums([second, first])
    assert combine_checksums([first]) is first


def test_a_peer_with_other_blocks_is_refused(stack: ExitStack) -> None:
    source, target = worker(stack, 2, seed=1), worker(stack, 4, seed=None)
    with pytest.raises(TransferError, match=r"the peer's rank 0 have 8192 bytes, not 16384"):
        RanksLink.between(source.ranked, target.ranked.ranks[:2])
    with pytest.raises(ValueError, match="blocks of rank 0 have"):
        RankedPool(LAYOUT, target.ranked.ranks[:2], target.ranked.handle().ranks[:2])
    with pytest.raises(ValueError, match="1 handles for 2 ranks"):
        RankedPool(LAYOUT, source.ranked.ranks, source.ranked.handle().ranks[:1])


def test_a_mapped_pool_is_written_and_unmapped_with_the_link(stack: ExitStack) -> None:
    source, target = worker(stack, 1, seed=1), worker(stack, 2, seed=None)
    mapped = [PeerPool.open(pool.handle()) for pool in target.pools]
    link = RanksLink.between(source.ranked, [MemoryRank(pool) for pool in mapped])
    report = link.write(*PAIRS)
    assert verify_blocks(target.ranked, PAIRS[1], report.checksums) is None
    link.close()
    with pytest.raises(ValueError, match="released"):
        mapped[0].buffer[0]


def test_blocks_are_copied_inside_of_a_workers_own_pools(stack: ExitStack) -> None:
    own = worker(stack, 2, seed=1)
    link = RanksLink.within(own.ranked)
    report = link.write([4, 0], [1, 3])
    assert heads_of(own, [1, 3]) == heads_of(own, [4, 0])
    assert verify_blocks(own.ranked, [1, 3], report.checksums) is None
    link.close()
    assert heads_of(own, [1]) == heads_of(own, [4]), "the pools are there"


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 2)])
@pytest.mark.parametrize("pairs", [([0, 9], [1, 2]), ([0, 1], [2, 2]), ([0], [1, 2])])
def test_bad_pairs_are_refused(
    stack: ExitStack, num_sources: int, num_targets: int, pairs: tuple[list[int], list[int]]
) -> None:
    source, target = worker(stack, num_sources, seed=1), worker(stack, num_targets, seed=None)
    with pytest.raises(TransferError, match="cannot write"):
        RanksLink.between(source.ranked, target.ranked.ranks).write(*pairs)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 1), (2, 2), (4, 2)])
def test_gpus_of_two_workers_move_heads_and_check_them(num_sources: int, num_targets: int) -> None:
    """Each rank in a process of its own, rank 0's moves all; every GPU is seen by all."""
    gpus = FakeGpus(num_devices=8)
    heads = np.random.default_rng(2).integers(0, 256, (NUM_BLOCKS, 3, 2, 16, 4, 80), dtype=np.uint8)

    def pools(num_ranks: int, first: int) -> list[DevicePool]:
        size = rank_layout(LAYOUT, num_ranks).block_bytes
        return [
            DevicePool(NUM_BLOCKS, size, first + rank, driver=gpus.process())
            for rank in range(num_ranks)
        ]

    def ranked(made: list[DevicePool]) -> RankedPool:
        return join_ranks(LAYOUT, made[0], [pool.handle() for pool in made[1:]])

    sources, targets = pools(num_sources, 0), pools(num_targets, 4)
    for pool, part in zip(sources, np.split(heads, num_sources, axis=4), strict=True):
        blocks = pool.tensor.numpy()[: pool.num_bytes].reshape(NUM_BLOCKS, -1)
        flat = part.reshape(NUM_BLOCKS, -1)
        blocks[:, : flat.shape[1]] = flat
    own, peer = ranked(sources), ranked(targets)
    driver = sources[0].driver
    link = RanksLink.between(own, [DeviceRank.mapped(driver, pool.handle()) for pool in targets])
    report = link.write(*PAIRS)
    assert report.num_bytes == 4 * peer.block_bytes
    assert verify_blocks(peer, PAIRS[1], report.checksums) is None
    for pool, part in zip(targets, np.split(heads, num_targets, axis=4), strict=True):
        blocks = pool.tensor.numpy()[: pool.num_bytes].reshape(NUM_BLOCKS, -1)
        flat = part.reshape(NUM_BLOCKS, -1)[PAIRS[0]]
        assert (blocks[PAIRS[1], : flat.shape[1]] == flat).all()
    with pytest.raises(TransferError, match="outside of"):
        link.write([0], [NUM_BLOCKS])
    assert link.measure().gigabytes_per_second > 0
    link.close()
    link.close()


def test_memory_of_other_kinds_is_refused(stack: ExitStack) -> None:
    host = worker(stack, 1, seed=1)
    pool = DevicePool(NUM_BLOCKS, LAYOUT.block_bytes, 0, driver=FakeGpus().process())
    device = join_ranks(LAYOUT, pool, ())
    with pytest.raises(TransferError, match="not in host memory"):
        RanksLink.between(host.ranked, device.ranks)
    with pytest.raises(TransferError, match="not on GPUs"):
        RanksLink.between(device, host.ranked.ranks)
    hidden = FakeGpus().process([1])
    with pytest.raises(TransferError, match="does not see"):
        DeviceRank.mapped(hidden, pool.handle())


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 2), (2, 1), (2, 2)])
def test_workers_of_any_ranks_open_each_other_by_handle(
    stack: ExitStack, num_sources: int, num_targets: int
) -> None:
    source, target = worker(stack, num_sources, seed=1), worker(stack, num_targets, seed=None)
    export, _ = open_ranks(target.ranked)
    _, backend = open_ranks(source.ranked)
    link = backend.open_peer(export.handle())
    report = link.write(*PAIRS)
    assert heads_of(target, PAIRS[1]) == heads_of(source, PAIRS[0])
    assert verify_blocks(target.ranked, PAIRS[1], report.checksums) is None
    link.close()


def test_a_worker_of_one_rank_is_opened_as_one_of_several(stack: ExitStack) -> None:
    alone, split = worker(stack, 1, seed=1), worker(stack, 2, seed=None)
    whole = as_ranked(alone.pools[0], LAYOUT)
    assert whole is not None
    assert whole.block_bytes == LAYOUT.block_bytes
    link = open_ranks(whole)[1].open_peer(split.ranked.handle())
    report = link.write(*PAIRS)
    assert heads_of(split, PAIRS[1]) == heads_of(alone, PAIRS[0])
    assert verify_blocks(split.ranked, PAIRS[1], report.checksums) is None
    link.close()
    with pytest.raises(TransferError, match=f"{RANKS}: the peer's pool is offered as memfd"):
        open_ranks(whole)[1].open_peer(alone.pools[0].handle())


def test_blocks_are_copied_inside_of_the_pools_of_all_ranks(stack: ExitStack) -> None:
    split = worker(stack, 2, seed=1)
    before = heads_of(split, [4])
    link = LocalBackend(split.ranked).open_peer(split.ranked.handle())
    report = link.write([4], [1])
    assert heads_of(split, [1]) == before
    assert verify_blocks(split.ranked, [1], report.checksums) is None
    link.close()
    with pytest.raises(TransferError, match="offered over ranks is not this worker's own"):
        LocalBackend(split.ranked).open_peer(worker(stack, 2, seed=2).ranked.handle())
