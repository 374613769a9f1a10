"""Where the bytes of a network stream go: into blocks of a pool, wherever its memory is."""

from collections.abc import Callable
from typing import Protocol

from common.kv.layout import PAGE_BYTES
from common.kv.pool import KVPool
from common.transfer.tcp_wire import Extents

Receive = Callable[[list[memoryview]], None]
"""Fills these pieces of memory with the next bytes of the stream."""


class BlockSink(Protocol):
    """Takes the bytes of one stream. For one thread."""

    def take(self, extents: Extents, receive: Receive) -> None:
        """Bring a frame's bytes into the pool's blocks; on return they are there.

        TransferError when that fails; then nothing is on its way any more.
        """
        ...

    def close(self) -> None:
        """Let go of memory of its own."""
        ...


class HostSink:
    """Receives straight into a pool in host memory."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def take(self, extents: Extents, receive: Receive) -> None:
        """Bring a frame's bytes into the pool's blocks."""
        block_bytes = self._pool.block_bytes
        targets: list[memoryview] = []
        for block, first_page, num_pages in extents.tolist():
            start = block * block_bytes + first_page * PAGE_BYTES
            targets.append(self._pool.buffer[start : start + num_pages * PAGE_BYTES])
        receive(targets)

    def close(self) -> None:
        """Keep the pool: it is its owner's."""
