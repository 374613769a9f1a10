"""Three ways to bring blocks from one address to another: FlowPath's, and two to compare it with.

A mover works on the source's GPU, on streams of its own. It waits for its copies, not for whoever
computed the blocks: those must be whole before (the worker writes what a collected step computed).
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.cuda.driver import BlockCopies, CudaDriver, CudaError, CudaQueue, draining
from common.kv.layout import KVLayout

MAX_PEER_COPIES = 4
"""Up to so many runs go to another GPU by copy engines, which leave the multiprocessors alone."""
PEER_CTAS = 64
"""What a launch takes of the own GPU while the link to another one is the bound."""
LONG_BYTES = 256 * 1024 * 1024
"""Who waits for less is awake: it takes a fraction of a millisecond."""
MAX_STAGED_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Moved:
    """How many copies and launches it took, and each block's checksum at the source."""

    num_calls: int
    checksums: NDArray[np.uint64]


class BlockMover(Protocol):
    """A way to move blocks; for one thread at a time."""

    def move(self, copies: BlockCopies, runs: NDArray[np.int32]) -> Moved:
        """Copy every block and wait; ``runs`` are the same pairs as (source, target, length).

        CudaError when a copy failed; on return nothing that was enqueued runs any more.
        """
        ...

    def close(self) -> None:
        """Let go of streams and memory; a second call does nothing."""
        ...


class DirectMover:
    """One copy for each run where runs are few, else one launch for all of them.

    A copy engine reads blocks once more than the launch does, which computes checksums on the way:
    on one GPU, where both share the memory's bandwidth, the launch is always better.
    """

    def __init__(
        self, driver: CudaDriver, device: int, *, max_copies: int = 0, num_ctas: int = 0
    ) -> None:
        self._max_copies = max_copies
        self._num_ctas = num_ctas
        self._copies = driver.queue(device)
        self._sums = driver.queue(device)

    def move(self, copies: BlockCopies, runs: NDArray[np.int32]) -> Moved:
        """Copy every block (see ``BlockMover``)."""
        is_long = _is_long(copies)
        with draining(self._copies, self._sums):
            if len(runs) > self._max_copies:
                self._copies.copy_blocks(copies, num_ctas=self._num_ctas)
                return Moved(1, self._copies.wait(is_long=is_long))
            size = copies.block_bytes
            self._copies.copy(
                [
                    (copies.target + target * size, copies.source + source * size, length * size)
                    for source, target, length in runs.tolist()
                ]
            )
            self._sums.checksum_blocks(copies.source, copies.source_ids, size)
            self._copies.wait(is_long=is_long)
            return Moved(len(runs), self._sums.wait(is_long=False))

    def close(self) -> None:
        """Let go of the streams."""
        _close(self._copies, self._sums)


class LayerwiseMover:
    """The baseline: one copy for each block, layer and plane, none merged (FlowKV 1.1).

    That is what blocks cost in a pool shaped (layers, 2, blocks, ...), the layout of vanilla
    PagedAttention. It is measured mildly: a copy here is one ``cudaMemcpyAsync`` without a
    handshake or kernel of its own, and blocks of 64 tokens need a quarter of the copies that blocks
    of 16 do.
    """

    def __init__(self, driver: CudaDriver, device: int, layout: KVLayout) -> None:
        size = layout.plane_elements * layout.element_bytes
        count = layout.num_layers * layout.planes
        offsets = [index * size for index in range(count)]
        # The last fragment takes the padding with it: checksums cover whole blocks.
        ends = [*offsets[1:], layout.block_bytes]
        self._fragments = [(begin, end - begin) for begin, end in zip(offsets, ends, strict=True)]
        self._copies = driver.queue(device)
        self._sums = driver.queue(device)

    def move(self, copies: BlockCopies, runs: NDArray[np.int32]) -> Moved:
        """Copy every fragment of every block (see ``BlockMover``)."""
        size = copies.block_bytes
        with draining(self._copies, self._sums):
            self._sums.checksum_blocks(copies.source, copies.source_ids, size)
            for block, other in zip(
                copies.source_ids.tolist(), copies.target_ids.tolist(), strict=True
            ):
                source, target = copies.source + block * size, copies.target + other * size
                self._copies.copy(
                    [
                        (target + offset, source + offset, num_bytes)
                        for offset, num_bytes in self._fragments
                    ]
                )
            self._copies.wait(is_long=True)
            num_calls = len(copies.source_ids) * len(self._fragments)
            return Moved(num_calls, self._sums.wait(is_long=False))

    def close(self) -> None:
        """Let go of the streams."""
        _close(self._copies, self._sums)


class GatherBufferMover:
    """The workaround of older systems: all blocks into one buffer first, then on from there.

    The buffer is memory that no pool has. It is measured mildly: those systems send the buffer into
    a second one at the receiver, who scatters it in a third pass; here the second pass goes
    straight from the buffer to the peer's blocks, and both passes are single launches. Larger
    transfers than ``MAX_STAGED_BYTES`` go in several turns.
    """

    def __init__(self, driver: CudaDriver, device: int, *, num_ctas: int = 0) -> None:
        self._driver = driver
        self._device = device
        self._num_ctas = num_ctas
        self._queue = driver.queue(device)
        self._buffer = 0
        self._buffer_bytes = 0

    def move(self, copies: BlockCopies, runs: NDArray[np.int32]) -> Moved:
        """Copy every block by way of the buffer (see ``BlockMover``)."""
        size, count = copies.block_bytes, len(copies.source_ids)
        turn = max(1, min(count, MAX_STAGED_BYTES // size))
        self._make_room(turn * size)
        checksums: list[NDArray[np.uint64]] = []
        with draining(self._queue):
            for first in range(0, count, turn):
                sources = copies.source_ids[first : first + turn]
                targets = copies.target_ids[first : first + turn]
                staged = np.arange(len(sources), dtype=np.int32)
                self._queue.copy_blocks(
                    BlockCopies(copies.source, self._buffer, sources, staged, size)
                )
                checksums.append(self._queue.wait(is_long=False))
                self._queue.copy_blocks(
                    BlockCopies(self._buffer, copies.target, staged, targets, size),
                    num_ctas=self._num_ctas,
                )
                self._queue.wait(is_long=_is_long(copies))
        return Moved(2 * len(checksums), np.concatenate(checksums))

    def close(self) -> None:
        """Let go of the stream and the buffer."""
        _close(self._queue)
        if self._buffer_bytes:
            self._driver.free(self._device, self._buffer)
            self._buffer_bytes = 0

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes <= self._buffer_bytes:
            return
        if self._buffer_bytes:
            self._driver.free(self._device, self._buffer)
            self._buffer_bytes = 0
        self._buffer = self._driver.allocate(self._device, num_bytes)
        self._buffer_bytes = num_bytes


def _is_long(copies: BlockCopies) -> bool:
    return len(copies.source_ids) * copies.block_bytes >= LONG_BYTES


def _close(*queues: CudaQueue) -> None:
    for queue in queues:
        with suppress(CudaError):  # a broken device has nothing to wait for
            queue.close()
