from collections.abc import Iterator, Sequence

import pytest

from common.errors import TransferError
from common.kv.blocks import BlockManager, Hold
from common.kv.pool import KVPool
from common.transfer.backend import LinkRate, WriteReport
from common.transfer.local import LocalBackend
from common.worker import compaction
from common.worker.compaction import Compactor

BLOCK = 4096
NUM_BLOCKS = 16
PROMPTS = [[number] * 2 for number in range(NUM_BLOCKS)]


@pytest.fixture
def pool() -> Iterator[KVPool]:
    made = KVPool(NUM_BLOCKS, BLOCK)
    yield made
    made.close()


def content(pool: KVPool, block: int) -> bytes:
    return pool.buffer[block * BLOCK : (block + 1) * BLOCK].tobytes()


def with_holes(pool: KVPool) -> BlockManager:
    """Fill the pool with one cached block a prompt, then free every other one."""
    blocks = BlockManager(NUM_BLOCKS, 2, 0, "m")
    for number, prompt in enumerate(PROMPTS):
        got = blocks.acquire(str(number), prompt, hold=Hold.REQUEST, max_cached_tokens=0)
        assert got is not None
        pool.buffer[got.block_ids[0] * BLOCK : (got.block_ids[0] + 1) * BLOCK] = (
            bytes([number]) * BLOCK
        )
        if number % 2:
            blocks.publish(str(number), prompt)
    for number in range(NUM_BLOCKS):
        blocks.release(str(number))
    assert blocks.counts().largest_free_run == 1
    assert blocks.counts().cached == NUM_BLOCKS // 2
    return blocks


def test_free_memory_comes_together_and_every_prefix_keeps_its_bytes(pool: KVPool) -> None:
    blocks = with_holes(pool)
    compactor = Compactor(blocks, LocalBackend(pool).open_peer(pool.handle()), BLOCK)
    moved = 0
    while num := compactor.move_some():
        moved += num
        blocks.validate()
    assert moved > 0
    counts = blocks.counts()
    assert (counts.free, counts.cached) == (NUM_BLOCKS // 2, NUM_BLOCKS // 2)
    assert counts.largest_free_run >= NUM_BLOCKS // 2 - 1, "all but what lies at block 0"
    for number in range(1, NUM_BLOCKS, 2):
        assert blocks.hold_prefix("reader", PROMPTS[number]) == 2
        assert content(pool, blocks.block_ids("reader")[0]) == bytes([number]) * BLOCK
        blocks.release("reader")


def test_a_round_moves_a_bounded_number(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "ROUND_BYTES", 2 * BLOCK)
    blocks = with_holes(pool)
    compactor = Compactor(blocks, LocalBackend(pool).open_peer(pool.handle()), BLOCK)
    assert 0 < compactor.move_some() <= 2


class BrokenLink:
    """A pool that cannot be written."""

    def write(self, src: Sequence[int], dst: Sequence[int], token: bytes = b"") -> WriteReport:
        raise TransferError("broken")

    def measure(self) -> LinkRate:
        raise TransferError("broken")

    def close(self) -> None:
        """Have nothing to close."""


def test_a_copy_that_fails_leaves_the_blocks_where_they_are_and_is_not_tried_again(
    pool: KVPool,
) -> None:
    blocks = with_holes(pool)
    compactor = Compactor(blocks, BrokenLink(), BLOCK)
    before = blocks.free_runs()
    assert compactor.move_some() == 0
    assert blocks.free_runs() == before
    blocks.validate()
    assert compactor.move_some() == 0
