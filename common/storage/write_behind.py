"""Blocks that wait to be written: a bounded queue in front of a slow store.

The queue's memory is one arena of slots, aligned to pages; a slot has a whole block file, header
and payload in one piece, so that a block is copied once, hashed on the way, and written from there.
Its pages are taken from the system when they are first used.
"""

import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import flowpath_native

from common.kv.layout import PAGE_BYTES
from common.storage.header import HeaderCodec
from common.storage.interface import Memory


@dataclass(frozen=True, slots=True)
class PendingBlock:
    """A block that waits; its sealed file lies at ``offset`` of the arena."""

    block_hash: bytes
    previous: bytes | None
    offset: int


WriteBatch = Callable[[Memory, Sequence[PendingBlock]], None]
"""Writes blocks that lie in the memory it is given."""


class WriteBehind:
    """Takes blocks until ``max_bytes`` wait, and has ``write_batch`` write them on its thread.

    ``write_batch`` gets at most ``max_batch`` blocks at a time, in the order in which they came,
    and afterwards they are done with. It must not raise.
    """

    def __init__(
        self,
        codec: HeaderCodec,
        block_bytes: int,
        max_bytes: int,
        write_batch: WriteBatch,
        max_batch: int,
    ) -> None:
        self._file_bytes = PAGE_BYTES + block_bytes
        self._codec = codec
        self._write_batch = write_batch
        self._max_batch = max_batch
        num_slots = max(1, max_bytes // self._file_bytes)
        self._arena = mmap.mmap(-1, num_slots * self._file_bytes)
        self._view = memoryview(self._arena)
        self._free = [slot * self._file_bytes for slot in reversed(range(num_slots))]
        self._queue: deque[PendingBlock] = deque()
        self._pending: set[bytes] = set()
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of the blocks that wait or are being written."""
        return len(self._pending) * self._file_bytes

    def offer(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a copy of the block, unless there is no room; True also where it waits already."""
        head = self._codec.pack(block_hash, previous)
        with self._changed:
            if block_hash in self._pending:
                return True
            if self._is_closing or not self._free:
                return False
            offset = self._free.pop()
            self._pending.add(block_hash)
        try:
            # Outside of the lock: nobody waits for this copy.
            place = self._view[offset : offset + self._file_bytes]
            flowpath_native.seal_block(place, head, payload)
        except BaseException:
            with self._changed:
                self._give_back(PendingBlock(block_hash, previous, offset))
            raise
        with self._changed:
            self._queue.append(PendingBlock(block_hash, previous, offset))
            self._changed.notify_all()
        return True

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until nothing waits; False when that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout_seconds)

    def close(self, timeout_seconds: float) -> int:
        """Take nothing more, write what waits, and return how many blocks were left undone."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        with self._changed:
            self._is_abandoned = True
            return len(self._pending)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue or self._is_abandoned:
                    return
                batch = [
                    self._queue.popleft() for _ in range(min(self._max_batch, len(self._queue)))
                ]
            try:
                self._write_batch(self._arena, batch)
            finally:
                with self._changed:
                    for block in batch:
                        self._give_back(block)

    def _give_back(self, block: PendingBlock) -> None:
        self._pending.discard(block.block_hash)
        self._free.append(block.offset)
        self._changed.notify_all()
