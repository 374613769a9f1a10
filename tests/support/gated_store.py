"""A store whose reads and writes a test can hold back, and which tells what it was offered."""

from collections.abc import Sequence

from common.storage.interface import BlockStore, Memory, StoreIdentity, StoreStats
from tests.support.board import Board, Gate


class GatedStore:
    """``inner`` behind gates, open at first. While ``is_full`` it drops what it is offered."""

    def __init__(self, inner: BlockStore, board: Board) -> None:
        self._inner = inner
        self.reads = Gate(board)
        self.writes = Gate(board)
        self.is_full = False
        self.num_read = 0
        """Blocks that it was asked for."""
        self.asked: list[Sequence[bytes]] = []
        """What each read asked for, in their order."""
        self.offered: list[tuple[bytes | None, bytes]] = []
        """Each offered block's predecessor and hash."""

    @property
    def identity(self) -> StoreIdentity:
        """Whose blocks these are."""
        return self._inner.identity

    def register(self, buffers: Sequence[Memory]) -> bool:
        """Prepare memory."""
        return self._inner.register(buffers)

    def longest_prefix(self, hashes: Sequence[bytes], previous: bytes | None = None) -> int:
        """Look up."""
        return self._inner.longest_prefix(hashes, previous)

    def read(
        self,
        hashes: Sequence[bytes],
        buffer: Memory,
        block_ids: Sequence[int],
        previous: bytes | None = None,
    ) -> list[bool]:
        """Read, once the gate lets it."""
        self.reads.pass_through()
        self.num_read += len(hashes)
        self.asked.append(hashes)
        return self._inner.read(hashes, buffer, block_ids, previous)

    def write(self, block_hash: bytes, previous: bytes | None, payload: Memory) -> bool:
        """Take a block, once the gate lets it."""
        self.writes.pass_through()
        self.offered.append((previous, block_hash))
        return not self.is_full and self._inner.write(block_hash, previous, payload)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait for the queue."""
        return self._inner.flush(timeout_seconds)

    def stats(self) -> StoreStats:
        """Return the counts."""
        return self._inner.stats()

    def close(self) -> None:
        """Let all through and close."""
        self.reads.open()
        self.writes.open()
        self._inner.close()
