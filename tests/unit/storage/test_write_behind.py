"""The queue of blocks that wait to be written."""

import threading
from collections.abc import Sequence

import pytest

from common.storage.header import HEADER_BYTES, HeaderCodec
from common.storage.interface import Memory
from common.storage.write_behind import PendingBlock, WriteBehind
from tests.support.stored_blocks import BLOCK_BYTES, FILE_BYTES, IDENTITY, chain, payload

WAIT_SECONDS = 30.0


class SlowDisk:
    """Writes when it is told to."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.is_writing = threading.Event()
        self.batches: list[list[PendingBlock]] = []
        self.files: dict[bytes, bytes] = {}

    def write_batch(self, arena: Memory, blocks: Sequence[PendingBlock]) -> None:
        self.is_writing.set()
        assert self.may_write.wait(WAIT_SECONDS)
        self.batches.append(list(blocks))
        for block in blocks:
            place = memoryview(arena)[block.offset : block.offset + FILE_BYTES]
            self.files[block.block_hash] = bytes(place)


def make_queue(disk: SlowDisk, num_slots: int, max_batch: int = 2) -> WriteBehind:
    codec = HeaderCodec(IDENTITY)
    return WriteBehind(codec, BLOCK_BYTES, num_slots * FILE_BYTES, disk.write_batch, max_batch)


def test_blocks_are_written_in_order_whole_and_sealed() -> None:
    disk, hashes = SlowDisk(), chain("a", 5)
    queue = make_queue(disk, num_slots=5)
    for previous, block_hash in zip([None, *hashes], hashes, strict=False):
        assert queue.offer(block_hash, previous, payload(block_hash))
    disk.may_write.set()
    assert queue.flush(WAIT_SECONDS)
    written = [block.block_hash for batch in disk.batches for block in batch]
    assert written == hashes
    assert max(len(batch) for batch in disk.batches) == 2
    file = disk.files[hashes[1]]
    assert file[:HEADER_BYTES] == HeaderCodec(IDENTITY).pack(hashes[1], hashes[0])
    assert file[4096:] == payload(hashes[1])
    assert queue.close(WAIT_SECONDS) == 0


def test_a_full_queue_drops_at_once_and_takes_again_when_there_is_room() -> None:
    disk, hashes = SlowDisk(), chain("a", 4)
    queue = make_queue(disk, num_slots=2)
    taken = [queue.offer(block_hash, None, payload(block_hash)) for block_hash in hashes[:3]]
    assert taken == [True, True, False]
    assert queue.queued_bytes == 2 * FILE_BYTES
    disk.may_write.set()
    assert queue.flush(WAIT_SECONDS)
    assert queue.queued_bytes == 0
    assert queue.offer(hashes[3], None, payload(hashes[3]))
    queue.close(WAIT_SECONDS)
    assert set(disk.files) == {*hashes[:2], hashes[3]}


def test_a_block_that_waits_is_taken_once() -> None:
    disk, (block_hash,) = SlowDisk(), chain("a", 1)
    queue = make_queue(disk, num_slots=1)
    assert queue.offer(block_hash, None, payload(block_hash))
    assert queue.offer(block_hash, None, payload(block_hash))
    disk.may_write.set()
    queue.close(WAIT_SECONDS)
    assert len(disk.batches) == 1


def test_a_block_of_the_wrong_size_is_refused_and_its_slot_given_back() -> None:
    disk, (block_hash,) = SlowDisk(), chain("a", 1)
    disk.may_write.set()
    queue = make_queue(disk, num_slots=1)
    with pytest.raises(ValueError, match="do not make a block"):
        queue.offer(block_hash, None, b"short")
    assert queue.offer(block_hash, None, payload(block_hash))
    assert queue.close(WAIT_SECONDS) == 0


def test_closing_in_front_of_a_disk_that_hangs_tells_what_was_left() -> None:
    disk, hashes = SlowDisk(), chain("a", 4)
    queue = make_queue(disk, num_slots=4, max_batch=1)
    for block_hash in hashes:
        queue.offer(block_hash, None, payload(block_hash))
    assert disk.is_writing.wait(WAIT_SECONDS)
    assert not queue.flush(0.0)
    assert queue.close(0.0) == 4
    assert not queue.offer(chain("b", 1)[0], None, bytes(BLOCK_BYTES))
    disk.may_write.set()
    queue.close(WAIT_SECONDS)
    assert len(disk.files) == 1, "blocks that were given up were written"
